"""Prepare missing data with the user's function: once per node under a lock, completely or not at all."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from raytrain_plus.data.dataset import both_data, reads_otherwise
from raytrain_plus.data.of_job import data_paths
from raytrain_plus.data.paths.files import data_exists, split_pattern
from raytrain_plus.data.sources.source import Source, check_enough
from raytrain_plus.errors import DataError, TaskError, WaitExpired
from raytrain_plus.job.settings import Job
from raytrain_plus.job.task_loader import load_function, reporting, trim_traceback
from raytrain_plus.storage.place import RemotePath, place_of

LOCK_S = 3600.0
"""Maximum seconds to wait for another process of this node that prepares the same data."""


def prepared_data(job: Job, roots: Sequence[Path], *, older: bool) -> tuple[Source, Source | None]:
    """Return the training data and the held-out data of a job, which are made if they are missing.

    `older`: see `READING`. Raises the errors of `both_data`, and `DataError` if there are too few rows.
    """
    check_preparable(job, roots)
    prepare_data(job, roots)
    seen, held_out = both_data(job, roots, older=older)
    if older and reads_otherwise(seen):
        print(
            "warning: this run was begun by an older version: as before, fractions of text formats are float64, and "
            "the names of folders no columns",
            file=sys.stderr,
        )
    for one in filter(None, (seen, held_out)):
        check_enough(one, job.data.shards)
    return seen, held_out


def check_preparable(job: Job, roots: Sequence[Path]) -> None:
    """Check the job's `data.prepare`, if it has one, without calling it.

    Raises `TaskError` if the function cannot be imported, and `DataError` if a path is an address or a pattern, which
    name no folder to write to.
    """
    if job.data.prepare is not None:
        load_function(job.data.prepare, roots)
        for key, path in data_paths(job).items():
            _local_folder(path, f"{key}: {path}")


def _local_folder(path: str | Path, where: str = "") -> Path:
    """Return the path of the folder to write. Raises `DataError` if it is remote, or a pattern."""
    target = place_of(path)
    if isinstance(target, RemotePath):
        raise DataError(
            "data.prepare writes local folders, and cannot write to an address",
            where=where or str(target),
            remedy="write the data there beforehand and leave out data.prepare, or use the path of a folder",
        )
    root, pattern = split_pattern(target)
    if pattern:
        raise DataError(
            "data.prepare writes a folder, and cannot write to a path with wildcards",
            where=where or str(target),
            expected="the path of a folder",
            remedy=f"use the folder itself, such as {root}, or leave out data.prepare",
        )
    return target


def prepare_data(job: Job, roots: Sequence[Path]) -> None:
    """Call the job's `data.prepare`, if it has one, for each of its paths that does not exist. Raises as `prepare`."""
    for path in data_paths(job).values():
        prepare(job.data.prepare, path, roots)


def prepare(spec: str | None, path: str | Path, roots: Sequence[Path]) -> None:
    """Call `module:function` as function(folder, name) if `path` does not exist.

    `folder` is an empty folder beside `path`; it is renamed to `path` when the function has returned. `name` is the
    last part of `path`, so that one function can write several splits.

    Raises `TaskError` with the user's own frames if the function raises, `DataError` if it writes nothing, the folder
    cannot be made, or `path` is a pattern, and `WaitExpired` if another process prepares the data for more than
    `LOCK_S`.
    """
    if spec is None or data_exists(place_of(path)):
        return
    target = _local_folder(path)
    function = load_function(spec, roots)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.parent / f".{target.name}.lock", timeout=LOCK_S)
        with lock:
            if not data_exists(target):
                _write(function, spec, target)
    except Timeout as error:
        raise WaitExpired(f"another process has been preparing {target} for more than {LOCK_S:g} s") from error
    except OSError as error:
        raise DataError(f"cannot be created: {error.strerror}", where=str(target)) from error


def _write(function: object, spec: str, target: Path) -> None:
    def report(error: BaseException) -> TaskError:
        what, where = f"data.prepare raised {type(error).__name__}: {error}", f"data.prepare: {spec}"
        return TaskError(what, where=where, user_traceback=trim_traceback(error))

    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        with reporting(report):
            function(folder, target.name)  # type: ignore[operator]
        if not any(folder.iterdir()):
            raise DataError("data.prepare wrote nothing", where=f"data.prepare: {spec}", expected="Parquet files")
        folder.chmod(0o755)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
