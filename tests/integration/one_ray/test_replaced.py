"""The controller dies: its workers train on, and another one takes its place."""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from raytrain_plus import Data, Workers
from tests.integration.elastic import Run, born, ended, job
from tests.integration.one_ray.remains import nothing_is_left
from tests.integration.tasks import write_data

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]

TAKEN_OVER_S = 4.0
"""Maximum seconds from the death of a controller to the first event of the next one."""


def exact(tmp_path: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "reduction": "exact",
        "steps": 400,
        "workers": Workers(min=1, max=2),
        "data": Data(path=str(tmp_path / "data"), batch_size=48, shards=4),
        "args": {"pad_s": 0.003},
    }
    return job(tmp_path, **{**settings, **changes})


def controller_of(run: Run) -> dict[str, Any]:
    """Return the event of the newest controller."""
    return run.events("controller_started")[-1]


def kill_controller(run: Run) -> float:
    """Kill the controller, and return the Unix seconds."""
    pid = controller_of(run)["pid"]
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    return killed


def until_replaced(run: Run, killed: float, count: int = 2) -> dict[str, Any]:
    """Wait for the controller number `count`, and return its event; check that it came in time."""
    told = run.until_told("controller_started", count)
    assert told["time"] - killed < TAKEN_OVER_S
    return told


def check(run: Run, killed: int, expected: Any) -> None:
    """Check that the run ended as the undisturbed one, with the same workers."""
    assert ended(run) == expected
    assert not run.events("resumed")
    assert len(run.events("controller_started")) == killed + 1
    nothing_is_left()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, cluster: None) -> Any:
    folder = tmp_path_factory.mktemp("undisturbed")
    write_data(folder / "data")
    return ended(Run(exact(folder)))


def test_its_workers_train_on_and_the_next_one_adopts_them(tmp_path: Path, undisturbed: Any) -> None:
    write_data(tmp_path / "data")
    run = Run(exact(tmp_path))
    before = born(run.until_size(2))
    run.until_step(60)
    killed = kill_controller(run)
    told = until_replaced(run, killed)
    assert told["adopted"] == sorted(member["worker"] for member in run.members())
    assert born(run.members()) == before
    check(run, 1, undisturbed)
    # Nobody stood still.
    moments = [event["time"] for event in run.events("step_committed")]
    gaps = [after - before for before, after in pairwise(moments)]
    around = [gap for gap, at in zip(gaps, moments, strict=False) if killed - 1 < at < told["time"] + 1]
    print(f"longest gap {max(around):.3f} s, median step {median(gaps):.4f} s")


def test_with_a_worker(tmp_path: Path, undisturbed: Any) -> None:
    write_data(tmp_path / "data")
    run = Run(exact(tmp_path))
    run.until_size(2)
    run.until_step(60)
    killed = kill_controller(run)
    run.kill(run.members()[1])
    until_replaced(run, killed)
    run.until_told("recovered")
    check(run, 1, undisturbed)


def test_while_the_group_recovers(tmp_path: Path, undisturbed: Any) -> None:
    write_data(tmp_path / "data")
    run = Run(exact(tmp_path))
    run.until_size(2)
    run.until_step(60)
    run.kill(run.members()[1])
    run.until_told("worker_lost")
    killed = kill_controller(run)
    until_replaced(run, killed)
    check(run, 1, undisturbed)


def test_while_it_sleeps(tmp_path: Path, undisturbed: Any) -> None:
    write_data(tmp_path / "data")
    run = Run(exact(tmp_path, args={"pad_s": 0.02}))
    run.until_size(2)
    run.until_step(20)
    os.kill(controller_of(run)["pid"], signal.SIGSTOP)
    run.until_told("controller_started", 2)
    check(run, 1, undisturbed)
