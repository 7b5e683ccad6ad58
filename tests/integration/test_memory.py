"""Workers whose memory a control group limits, like that of a container: what does not fit is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from raytrain_plus import Data, InputError, Job, Parallel, Workers
from tests.integration.conftest import TASKS
from tests.integration.elastic import Run, raylets
from tests.integration.tasks import write_data
from tests.support.commands import REPOSITORY, write_job

ROOT = Path("/sys/fs/cgroup/memory")
POSSIBLE = os.access(ROOT / "cgroup.procs", os.W_OK)
LIMIT = 1_900 * 10**6
"""Bytes of each group. Of this model the state of a worker takes 1.6 GB, and the process 0.4 GB without it."""


@contextmanager
def limited_groups(count: int) -> Iterator[list[Path]]:
    """Make control groups of `LIMIT` bytes each; all their processes have to have ended on exit."""
    groups = [ROOT / f"raytrain-{os.getpid()}-{number}" for number in range(count)]
    try:
        for group in groups:
            group.mkdir()
            (group / "memory.limit_in_bytes").write_text(str(LIMIT))
        yield groups
    finally:
        for group in groups:
            group.rmdir()


def move(process: psutil.Process, group: Path) -> None:
    """Move a process and all that it has started into a group; what it starts from now on begins there."""
    for one in (process, *process.children(recursive=True)):
        (group / "cgroup.procs").write_text(str(one.pid))


def validate(group: Path, file: Path) -> subprocess.CompletedProcess[str]:
    """Run `raytrain validate` in a group."""
    enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "enter"]
    command = [sys.executable, "-m", "raytrain_plus", "validate", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [*enter, *command], capture_output=True, text=True, cwd=TASKS, env=environment, timeout=150, check=False
    )


@pytest.mark.slow
@pytest.mark.skipif(not POSSIBLE, reason="needs root and memory control groups of version 1")
@pytest.mark.timeout(400)
def test_a_model_that_does_not_fit_trains_with_the_setting_that_is_named(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    told = "set parallel.sharded to full: then it takes about 1.2 GB"
    data = {"path": str(tmp_path / "data"), "batch_size": 24, "shards": 4}
    file: dict[str, Any] = {"task": "tasks:Heavy", "data": data, "workers": {"min": 4}, "steps": 6}
    wished = Job(
        name="whole",
        task="tasks:Heavy",
        data=Data(**data),
        workers=Workers(min=4),
        steps=6,
        storage=str(tmp_path / "runs"),
    )
    with limited_groups(5) as (first, *others):
        refused = validate(first, write_job(tmp_path, **file))
        assert (refused.returncode, told in refused.stderr) == (2, True), refused.stderr
        accepted = validate(first, write_job(tmp_path, **file, parallel={"sharded": "full"}))
        assert accepted.returncode == 0, accepted.stderr
        with raylets(len(others)) as cluster:
            for group, node in zip(others, cluster.worker_nodes, strict=True):
                move(psutil.Process(node.all_processes["raylet"][0].process.pid), group)
            with pytest.raises(InputError, match=told):
                Run(wished).finish()
            full = Run(replace(wished, name="full", parallel=Parallel(sharded="full")))
            assert full.finish(200).status == "finished"
            assert full.events("worker_lost") == [], "the kernel killed none"
            assert len(full.losses()) == 6


@pytest.mark.slow
@pytest.mark.skipif(not POSSIBLE, reason="needs root and memory control groups of version 1")
@pytest.mark.timeout(400)
def test_experts_that_do_not_fit_are_accepted_if_they_are_divided(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    data = {"path": str(tmp_path / "data"), "batch_size": 24, "shards": 4}
    file: dict[str, Any] = {"task": "tasks:HeavyExperts", "data": data, "workers": {"min": 4}, "steps": 6}
    with limited_groups(1) as (group,):
        refused = validate(group, write_job(tmp_path, **file))
        assert refused.returncode == 2
        assert "the training state of a worker takes about 1.9 GB" in refused.stderr
        accepted = validate(group, write_job(tmp_path, **file, parallel={"experts": 4}))
        assert accepted.returncode == 0, accepted.stderr
