"""Tasks that hear of real runs: each call once through kills of workers, and again only after other deaths."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from raytrain_plus import Checkpoint, Evaluate, Workers
from tests.integration.elastic import Run, job
from tests.integration.tasks import write_data
from tests.support.listeners import until

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]

STEPS = 120


@pytest.fixture
def hearing(tmp_path: Path) -> Run:
    """Start a run whose task hears of it."""
    return started(tmp_path)


def started(tmp_path: Path, fresh: bool = True) -> Run:
    held_out = str(write_data(tmp_path / "data"))
    wanted = job(
        tmp_path,
        task="tasks:Hears",
        steps=STEPS,
        workers=Workers(min=1, max=2),
        evaluate=Evaluate(path=held_out, every_steps=20),
        checkpoint=Checkpoint(every_steps=30, keep=10),
        args={"pad_s": 0.01},
    )
    return Run(wanted, fresh)


def heard(tmp_path: Path, kind: str) -> list[Any]:
    lines = (tmp_path / "heard").read_text().splitlines()
    return [what for _, name, *what in map(json.loads, lines) if name == kind]


def steps(tmp_path: Path) -> list[int]:
    return [step for step, _ in heard(tmp_path, "step")]


def pids(tmp_path: Path) -> list[int]:
    file = tmp_path / "heard"
    return [json.loads(line)[0] for line in file.read_text().splitlines()] if file.exists() else []


def check_repeated(numbers: list[int]) -> None:
    """Check that each step was called, in order, but for one return."""
    assert sorted(set(numbers)) == list(range(STEPS))
    back = [before - after for before, after in pairwise(numbers) if after != before + 1]
    assert len(back) <= 1
    assert all(steps >= 0 for steps in back)


def test_each_call_is_made_once_through_the_loss_of_a_worker(tmp_path: Path, hearing: Run) -> None:
    hearing.until_size(2)
    hearing.until_step(40)
    hearing.kill(hearing.members()[1])
    done = hearing.finish()
    assert (done.status, done.steps, done.recoveries) == ("finished", STEPS, 1)
    assert heard(tmp_path, "step") == [[step, loss] for step, loss in enumerate(hearing.losses())]
    told = [[event["step"], event["metrics"]["loss"]] for event in hearing.events("evaluated")]
    assert heard(tmp_path, "evaluation") == told
    assert [step for step, _ in told] == [-1, *range(19, STEPS, 20)]
    assert heard(tmp_path, "checkpoint") == [[event["step"], True] for event in hearing.events("checkpoint_saved")]
    assert len(set(pids(tmp_path))) == 1
    until(lambda: not psutil.pid_exists(pids(tmp_path)[0]))
    [noted] = [event["text"] for event in hearing.events("noted") if "Task." in event["text"]]
    assert noted.startswith("Task.on_evaluate raised ValueError: no room for this evaluation at ")
    assert "tasks.py:" in noted


@pytest.mark.slow
def test_a_killed_process_of_listeners_misses_nothing(tmp_path: Path, hearing: Run) -> None:
    hearing.until(lambda: pids(tmp_path) and len(steps(tmp_path)) > 10, "calls")
    os.kill(pids(tmp_path)[0], signal.SIGKILL)
    done = hearing.finish()
    assert (done.status, done.steps) == ("finished", STEPS)
    assert len(set(pids(tmp_path))) == 2
    # Calls after the last bookmark, which is written every two seconds, are made again.
    check_repeated(steps(tmp_path))
    [noted] = [event["text"] for event in hearing.events("noted") if "process" in event["text"]]
    assert noted == "the process of the run's listeners died and is started again"


@pytest.mark.slow
def test_no_call_is_missed_when_the_controller_dies(tmp_path: Path, hearing: Run) -> None:
    hearing.until(lambda: pids(tmp_path) and len(steps(tmp_path)) > 40, "calls")
    os.kill(hearing.events("controller_started")[-1]["pid"], signal.SIGKILL)
    done = hearing.finish()
    assert (done.status, done.steps) == ("finished", STEPS)
    assert not hearing.events("resumed")
    assert len(set(pids(tmp_path))) == 2
    # The next process begins behind what is stored.
    check_repeated(steps(tmp_path))
