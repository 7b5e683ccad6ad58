"""The templates of `raytrain init`: their files, what they need, and the commands to begin with. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from raytrain_plus.errors import InputError


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """The run of a script, which is its own job."""

    folder: str
    """Where it is, from the folder of the script."""
    export: str
    """The options with which `raytrain export` writes its model."""
    opened_by: str


@dataclass(frozen=True, slots=True)
class Template:
    """A folder of `templates/`."""

    stem: str
    """The name of its module and of its job. It must not be the name of a library, which it would hide."""
    needs: Mapping[str, str]
    """The modules that it imports beside those of raytrain_plus -> the package to install."""
    script: ScriptRun | None = None
    """For a script in place of a task."""

    @property
    def files(self) -> tuple[str, ...]:
        """Return the names of its files: task, job, test."""
        job = () if self.script else (f"{self.stem}.yaml",)
        return f"{self.stem}.py", *job, f"test_{self.stem}.py"


TEMPLATES = {
    "digits": Template("digits", {"sklearn": "scikit-learn"}),
    "gpt": Template("gpt", {}),
    "session": Template("spirals", {}),
    "lightning": Template(
        "spirals",
        {"lightning": "lightning", "torchmetrics": "torchmetrics"},
        ScriptRun("spirals/lightning_logs/run", "--format lightning --to spirals.ckpt", "load_from_checkpoint"),
    ),
    "trainer": Template(
        "reviews",
        {"transformers": "transformers", "tokenizers": "tokenizers", "accelerate": "accelerate"},
        ScriptRun("reviews/run", "--format transformers --to model", "from_pretrained"),
    ),
    "transformers": Template("sentiment", {"transformers": "transformers", "tokenizers": "tokenizers"}),
    "vision": Template("shapes", {}),
}
"""The names that `--template` takes; the first is the default."""


def check_installed(name: str, installed: Callable[[str], bool]) -> None:
    """Raise `InputError` if a template needs a package that is missing. `installed`: whether a module is found."""
    missing = {package: module for module, package in TEMPLATES[name].needs.items() if not installed(module)}
    if missing:
        raise InputError(
            f"the template needs {' and '.join(missing)}, not installed here",
            where=f"--template {name}",
            remedy=f"pip install {' '.join(missing)}",
        )


def next_steps(name: str, folder: Path) -> list[str]:
    """Return lines for a person: what was written, and the commands to go on with."""
    stem, begin = (
        TEMPLATES[name].stem,
        [(f"cd {folder}", ""), ("pytest", "it learns, without Ray (pip install pytest)")],
    )
    script = TEMPLATES[name].script
    if script is not None:
        steps = [
            *begin,
            (f"raytrain run {stem}.py --set workers.max=2", "trains, on this machine"),
            (f"raytrain audit {script.folder}", "each row was used once in each epoch"),
            (f"raytrain export {script.folder} {script.export}", f"writes what {script.opened_by} opens"),
        ]
    else:
        steps = [
            *begin,
            (f"raytrain validate {stem}.yaml", "checks the job, and tries its task on one batch"),
            (f"raytrain run {stem}.yaml", "trains, on this machine"),
            (f"raytrain verify {stem}.yaml --set reduction=exact --workers 1,2 --kill 1", "kills a worker: equal bits"),
            (f"raytrain export {stem} --to model.safetensors", "writes the trained model"),
        ]
    width = max(len(command) for command, _ in steps)
    lines = [f"  {command.ljust(width)}   # {why}" if why else f"  {command}" for command, why in steps]
    return [f"{folder}: wrote {', '.join(TEMPLATES[name].files)}; next:", *lines]
