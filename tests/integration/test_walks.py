"""The commands of the pages, executed in order in a copy of the repository, as a reader executes them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.head import head
from tests.pages import PAGES, commands
from tests.support.commands import REPOSITORY
from tests.walks import WALKS, Step, Walk

SHORTER = {
    "-m tests.benchmarks.steps": "--rounds 1 --models mlp",
    "-m tests.benchmarks.costs": "--rounds 1 --models paced_20ms",
    "-m tests.benchmarks.proof": "--rounds 1",
    "-m tests.benchmarks.checkpoints": "--rounds 1 --gigabytes 0.05",
    "-m tests.benchmarks.pipeline": "--rounds 1 --pad 0.002",
    "-m tests.benchmarks.experts pace": "--rounds 1 --width 64 --depth 1",
    "-m tests.benchmarks.experts curves": "--seeds 1 --steps 8",
    "-m tests.benchmarks.replacement": "--workers 4 --kills 1",
    "-m tests.benchmarks.conversion": "--gb 0.01 --rounds 1",
    "-m tests.benchmarks.images": "--images 100 --rounds 1",
    "-m tests.benchmarks.techniques": "--rounds 1 --width 64 --depth 1",
    "-m tests.benchmarks.plans": "--steps 6 --models byte_gpt",
    "-m tests.benchmarks.overlap": "--steps 6 --width 128",
    "-m tests.benchmarks.recovery --only": "",
    "-m tests.benchmarks.recovery": "--only ours --kills 1",
}
"""Words that shorten a benchmark, added to those of its command. The first entry that a command begins with counts."""
SHORT_JOBS = {
    "jobs/digits.yaml": (("epochs: 20", "epochs: 2"), ("every_steps: 100", "every_steps: 10")),
    "jobs/byte_gpt.yaml": (("steps: 300", "steps: 12"), ("every_steps: 100", "every_steps: 6")),
}
"""The numbers by which the jobs are shortened: file -> (text, its replacement)."""
TOOLS = ("lint-imports", "mypy", "pip", "pytest", "ray", "raytrain", "ruff")
BIN = Path(sys.executable).parent


def copy_repository(folder: Path) -> None:
    """Copy what a user would check out, with jobs that are short."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split("\n"):
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, folder / name)
    for name, changes in SHORT_JOBS.items():
        text = (folder / name).read_text()
        for before, after in changes:
            assert text.count(before) == 1, (name, before)
            text = text.replace(before, after)
        (folder / name).write_text(text)


def write_environment(folder: Path) -> None:
    """Write a .venv as `make setup` leaves it; its programs are those of this environment."""
    scripts = {name: f'exec {BIN / name} "$@"\n' for name in TOOLS}
    cases = [f'  "{command}"*) exec {sys.executable} "$@" {words};;\n' for command, words in SHORTER.items()]
    # Nothing is installed into the environment of these tests.
    cases.append('  "-m pip install"*) exit 0;;\n')
    python = f'case "$*" in\n{"".join(cases)}esac\nexec {sys.executable} "$@"\n'
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name, script in {**scripts, "python": python, "python3": python}.items():
        file = folder / ".venv" / "bin" / name
        file.write_text(f"#!/bin/sh\n{script}")
        file.chmod(0o755)
    (folder / ".venv" / "bin" / "activate").write_text(f"PATH={folder}/.venv/bin:$PATH\n")
    (folder / ".venv" / ".horovod").touch()


def environment(folder: Path, bare: bool) -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "VIRTUAL_ENV")}
    known |= {"HOME": str(folder.parent), "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", f"{Path.home()}/.cache")}
    if bare:
        # pip finds there what is required, and fetches nothing.
        known |= {"PYTHONPATH": str(Path(pytest.__file__).parents[1]), "PATH": f"{BIN}{os.pathsep}{known['PATH']}"}
        return {**known, "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    path = f"{folder}/.venv/bin{os.pathsep}{known['PATH']}"
    # make starts pytest, which would start this test: it collects.
    return {**known, "PATH": path, "PYTHONPATH": str(folder), "PYTEST_ADDOPTS": "--collect-only"}


def script_of(steps: tuple[Step, ...], known: dict[str, str]) -> str:
    """Return the walk as a shell script that ends at the first command with another exit code than expected."""
    lines = []
    for number, step in enumerate(steps):
        command = f"{step.command} {step.also}"
        for text, replacement in {**step.instead, **known}.items():
            command = command.replace(text, replacement)
        lines += [f"echo; echo '::{number}'", command, f"[ $? = {step.code} ] || exit 9"]
    return "\n".join([*lines, "echo; echo '::end'"])


@contextlib.contextmanager
def surroundings(walk: Walk) -> Iterator[dict[str, str]]:
    """Yield what stands for the pages' hosts."""
    if not walk.cluster:
        yield {}
        return
    with head(cpus=6) as started:
        yield {"http://HOST:8265": started.dashboard, "HOST:6379": started.address}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.timeout(walk.timeout_s), *[pytest.mark.slow] * walk.slow])
        for name, walk in WALKS.items()
    ],
)
def test_a_walk_through_the_pages(name: str, tmp_path: Path, nothing_goes_on: None) -> None:
    walk = WALKS[name]
    stated = {command.text for page in PAGES for command in commands(page, (REPOSITORY / page).read_text())}
    assert {step.command for step in walk.steps} <= stated
    folder = tmp_path / "raytrain_plus"
    copy_repository(folder)
    if not walk.bare:
        write_environment(folder)
    with surroundings(walk) as known:
        done = subprocess.run(
            ["bash", "-c", script_of(walk.steps, known)],
            cwd=folder,
            env=environment(folder, walk.bare),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    shown = dict(zip(*[iter(re.split(r"(?m)^::(\w+)$", done.stdout)[1:])] * 2, strict=True))
    assert "end" in shown, done.stdout[-5000:]
    missed = [
        (step.command, shown[str(number)][-3000:])
        for number, step in enumerate(walk.steps)
        if not re.search(step.shows, shown[str(number)])
    ]
    assert not missed
