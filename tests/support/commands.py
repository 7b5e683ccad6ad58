"""Commands that run in processes of their own, as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from raytrain_plus import attach
from tests.integration.conftest import TASKS
from tests.processes import still_alive

REPOSITORY = Path(__file__).parents[2]


def write_job(tmp_path: Path, **changes: Any) -> Path:
    job = {
        "task": "tasks:Net",
        "data": {"path": str(tmp_path / "data"), "batch_size": 48, "shards": 8},
        "steps": 8,
        "workers": {"min": 2},
        "storage": str(tmp_path / "runs"),
        **changes,
    }
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(job))
    return file


def command(*arguments: str | Path, cwd: Path = TASKS, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "raytrain_plus", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **environment},
    )


def raytrain(*arguments: str | Path, cwd: Path = TASKS, **environment: str) -> tuple[int, str, str]:
    process = command(*arguments, cwd=cwd, **environment)
    out, err = process.communicate(timeout=150)
    return process.returncode, out, err


def outliving(processes: list[psutil.Process]) -> set[str]:
    """Return the commands of the processes that still run after 10 s, and end these."""
    left = still_alive(processes, 10)
    names = {" ".join([entry.name(), *entry.cmdline()[:4]]) for entry in left}
    for entry in left:
        entry.kill()
    return names


def until(holds: Callable[[], object], what: str, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in attach(folder).events("step_committed")]
