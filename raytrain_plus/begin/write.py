"""Write what `raytrain init` and `raytrain new-job` write."""

from __future__ import annotations

import inspect
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa

from raytrain_plus.begin.catalogue import TEMPLATES, check_installed, next_steps
from raytrain_plus.begin.job_text import KnownData, job_text, name_of
from raytrain_plus.data.dataset import dataset
from raytrain_plus.errors import DataError, InputError

FOLDER = Path(__file__).parent / "templates"


def write_template(name: str, folder: Path) -> list[str]:
    """Write the files of a template into a folder, which is created if it is missing. Return what to tell the user.

    Raises `InputError`, with nothing written, if one of the files exists or a package that the task imports is missing.
    """
    check_installed(name, lambda module: find_spec(module) is not None)
    files = {folder / file: FOLDER / name / file for file in TEMPLATES[name].files}
    files[folder / "pytest.ini"] = FOLDER / "pytest.ini"
    _write({to: file.read_text(encoding="utf-8") for to, file in files.items()})
    return next_steps(name, folder)


def write_job(spec: str, data: str | None, to: Path | None) -> list[str]:
    """Write a job file for the task `module:Class` to `to`, or in the working directory. Return what to tell the user.

    Raises `TaskError` if there is no such task, and `InputError` if the file exists.
    """
    # Loaded here, because it loads torch.
    from raytrain_plus.job.task_loader import load_task

    task = load_task(spec, [Path.cwd()])
    module = spec.partition(":")[0]
    prepare = f"{module}:prepare" if callable(getattr(sys.modules[module], "prepare", None)) else None
    known, remark = _look_at(data)
    file = to or Path(f"{name_of(spec)}.yaml")
    _write({file: job_text(spec, inspect.signature(task), data, known, prepare)})
    return [f"{file}: wrote a job for {spec}; next: raytrain validate {file}", *remark]


def _look_at(data: str | None) -> tuple[KnownData | None, list[str]]:
    """Return what is known of the data, and a line if it cannot be read."""
    if data is None:
        return None, []
    try:
        seen = dataset(data)
    except DataError as error:
        return None, [f"  the sizes in it do not come from the data: {error.where}: {error.what}"]
    images = "image" in seen.schema.names and pa.types.is_binary(seen.schema.field("image").type)
    return KnownData(seen.rows, len(seen.unit_rows), seen.schema.names, images), []


def _write(texts: dict[Path, str]) -> None:
    """Create files with these texts. Raises `InputError`, with nothing written, if one exists."""
    for file in texts:
        if file.exists() or file.is_symlink():
            raise InputError("exists, and is not overwritten", where=str(file), remedy="choose another place")
    at = next(iter(texts))
    try:
        for at, text in texts.items():
            at.parent.mkdir(parents=True, exist_ok=True)
            with at.open("x", encoding="utf-8") as opened:
                opened.write(text)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", where=str(at)) from error
