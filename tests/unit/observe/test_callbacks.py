"""A task hears of its run in a process of its own: every step in order, once, or again after the process has died."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus import Task
from raytrain_plus.observe.run_events import EventLog, Tail
from raytrain_plus.observe.trackers import callbacks as module
from raytrain_plus.observe.trackers.callbacks import FILE, Callbacks, CalledTask, defined_callbacks
from raytrain_plus.observe.trackers.calling import call, raised, step_values
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.task import RunFacts
from tests.unit.observe.feed import evaluated, event, step

TASK = """
import json, os, time
from pathlib import Path
from raytrain_plus import Task

class Tells(Task):
    def __init__(self, folder, act="pass"):
        self.folder, self.act = folder, act

    def model(self):
        raise AssertionError("the model is not built")

    def say(self, *what):
        with open(self.folder + "/heard", "a") as heard:
            heard.write(json.dumps([*what, self.run.total_steps, os.getpid()]) + "\\n")

    def on_step(self, metrics):
        self.say("step", metrics["step"], metrics["loss"])
        exec(self.act)

    def on_evaluate(self, step, metrics):
        self.say("evaluate", step, metrics)

    def on_checkpoint(self, step, path):
        self.say("checkpoint", step, path)
"""
WHERE = 1 + TASK.splitlines().index("        exec(self.act)")
"""The line in which a test's `act` is done."""


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    """Write the task's module, and open the log of a run."""
    (tmp_path / "task_that_hears.py").write_text(TASK)
    (tmp_path / "run").mkdir()
    made = EventLog(LocalFolder(tmp_path / "run"))
    yield made
    made.close()


def callbacks_of(tmp_path: Path, act: str = "pass", task: str = "task_that_hears:Tells") -> Callbacks:
    run = LocalFolder(tmp_path / "run")
    called = CalledTask(
        task=task,
        pickled_task=None,
        roots=(str(tmp_path),),
        args={"folder": str(tmp_path), "act": act},
        facts=RunFacts(total_steps=7, batch_size=48),
        folder=run.address,
        checkpoints=run.inside("checkpoints").address,
    )
    return Callbacks(called, run)


def write(log: EventLog, *events: dict[str, Any]) -> None:
    for one in events:
        fields = {name: value for name, value in one.items() if name not in ("kind", "time", "generation")}
        if one["kind"] == "step_committed":
            fields["grad_norm"] = 0.5
        log.write(one["kind"], generation=0, fields=fields)


def steps(log: EventLog, *numbers: int) -> None:
    write(log, *(step(number) for number in numbers))


def heard(tmp_path: Path) -> list[list[Any]]:
    file = tmp_path / "heard"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def heard_steps(tmp_path: Path) -> list[int]:
    return [one[1] for one in heard(tmp_path) if one[0] == "step"]


def until(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_task_hears_of_steps_evaluations_and_checkpoints_in_order(tmp_path: Path, log: EventLog) -> None:
    one = callbacks_of(tmp_path)
    one.begin(log.behind)
    name = "000000000000-00000000"
    write(log, evaluated(-1, accuracy=0.5), event("waiting", **{"for": "x"}), {**step(0, loss="nan")})
    write(log, event("checkpoint_saved", step=0, seconds=0.1, stall_s=0.0, checkpoint=name))
    # Of an older version: it says not where the checkpoint is.
    write(log, event("checkpoint_saved", step=0, seconds=0.1, stall_s=0.0))
    steps(log, 1)
    one.finish()
    told = heard(tmp_path)
    assert [call[:3] for call in told if call[1:2] != [0] or call[0] != "step"] == [
        ["evaluate", -1, {"accuracy": 0.5}],
        ["checkpoint", 0, str(tmp_path / "run" / "checkpoints" / name)],
        ["step", 1, 1.25],
    ]
    assert str(told[1][2]) == "nan"
    assert {call[3] for call in told} == {7}
    assert one.news() == []


def test_a_step_is_a_plain_dict() -> None:
    values = step_values({**step(3), "grad_norm": "inf", "lr": 0.5, "metrics": {"accuracy": 1}})
    assert values == {
        "step": 3,
        "epoch": 0,
        "samples": 48,
        "seconds": 0.5,
        "loss": 1.25,
        "grad_norm": float("inf"),
        "skipped": False,
        "lr": 0.5,
        "metrics": {"accuracy": 1.0},
    }


@pytest.mark.slow
def test_a_slow_method_delays_nobody_and_is_called_for_all(tmp_path: Path, log: EventLog) -> None:
    one = callbacks_of(tmp_path, "time.sleep(0.02)")
    one.begin(log.behind)
    steps(log, *range(50))
    one.finish()
    assert heard_steps(tmp_path) == list(range(50))


def test_a_method_that_raises_is_reported_once_with_its_place(tmp_path: Path, log: EventLog) -> None:
    one = callbacks_of(tmp_path, "raise SystemExit('boom\\nmore')")
    one.begin(log.behind)
    steps(log, 0, 1, 2)
    one.finish()
    assert heard_steps(tmp_path) == [0, 1, 2]
    place = f"{tmp_path / 'task_that_hears.py'}:{WHERE}"
    assert one.news() == [
        f"Task.on_step raised SystemExit: boom at {place} (step 1); the run and further calls continue"
    ]
    assert one.news() == []


def test_a_killed_process_is_started_again_behind_the_last_call(tmp_path: Path, log: EventLog) -> None:
    one = callbacks_of(tmp_path)
    one.begin(log.behind)
    steps(log, 0, 1)
    until(lambda: heard_steps(tmp_path) == [0, 1])
    [first] = {call[-1] for call in heard(tmp_path)}
    until(lambda: one._place[0] == (tmp_path / "run" / "events.ndjson").stat().st_size)
    os.kill(first, signal.SIGKILL)
    steps(log, 2, 3)
    until(lambda: heard_steps(tmp_path)[-1] == 3)
    one.finish()
    assert heard_steps(tmp_path) == [0, 1, 2, 3]
    assert len({call[-1] for call in heard(tmp_path)}) == 2
    assert one.news() == ["the process of the task's callbacks ended with code -9 and is started again"]


@pytest.mark.slow
def test_the_next_controller_continues_where_the_last_one_was(tmp_path: Path, log: EventLog) -> None:
    one = callbacks_of(tmp_path)
    one.begin(log.behind)
    steps(log, 0, 1)
    one.finish()
    # Nobody calls these before the controller is dead.
    steps(log, 2)
    again = EventLog(LocalFolder(tmp_path / "run"))
    steps(again, 3)
    two = callbacks_of(tmp_path)
    two.begin(again.behind)
    two.finish()
    again.close()
    assert heard_steps(tmp_path) == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_run_whose_task_did_not_listen_before_is_called_from_now_on(tmp_path: Path, log: EventLog) -> None:
    steps(log, 0, 1)
    again = EventLog(LocalFolder(tmp_path / "run"))
    one = callbacks_of(tmp_path)
    one.begin(again.behind)
    steps(again, 2)
    one.finish()
    again.close()
    assert heard_steps(tmp_path) == [2]


@pytest.mark.slow
def test_a_place_behind_the_end_of_the_log_repeats_nothing(tmp_path: Path, log: EventLog) -> None:
    steps(log, 0, 1)
    again = EventLog(LocalFolder(tmp_path / "run"))
    (tmp_path / "run" / "trackers").mkdir()
    (tmp_path / "run" / FILE).write_text('{"at": 1000000, "events": 0}\n')
    one = callbacks_of(tmp_path)
    one.begin(again.behind)
    steps(again, 2)
    one.finish()
    again.close()
    assert heard_steps(tmp_path) == [2]


@pytest.mark.slow
def test_a_method_that_hangs_does_not_hold_up_the_end(
    tmp_path: Path, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "END_S", 0.5)
    one = callbacks_of(tmp_path, "time.sleep(600)")
    one.begin(log.behind)
    steps(log, 0)
    until(lambda: heard_steps(tmp_path))
    began = time.monotonic()
    one.finish()
    assert time.monotonic() - began < 10
    assert one.news() == ["the task's callbacks did not end within 0 s; some may not be called"]
    assert one._process is not None
    assert one._process.code == -signal.SIGKILL
    # Not called to its end: the next controller calls it again.
    assert json.loads((tmp_path / "run" / FILE).read_text()) == {"at": 0, "events": 0}


@pytest.mark.slow
def test_a_process_exits_when_the_controller_is_dead(tmp_path: Path, log: EventLog) -> None:
    one = callbacks_of(tmp_path)
    one.begin(log.behind)
    steps(log, 0)
    until(lambda: heard_steps(tmp_path))
    assert one._process is not None
    one._process.end_input()
    one._keeper.join(30)
    assert one._process.code == 0
    assert one.news() == []


@pytest.mark.slow
def test_a_task_that_cannot_be_built_is_reported_once(tmp_path: Path, log: EventLog) -> None:
    one = callbacks_of(tmp_path, task="task_that_hears:Nobody")
    one.begin(log.behind)
    steps(log, 0)
    one.finish()
    [text] = one.news()
    assert text.startswith("the task's callbacks are not called: ")
    assert "has no 'Nobody'" in text


def test_a_process_that_cannot_be_started_is_reported_once(
    tmp_path: Path, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    monkeypatch.setattr(module, "AGAIN_S", 0.01)
    one = callbacks_of(tmp_path)
    one.begin(log.behind)
    told: list[str] = []
    until(lambda: told.extend(one.news()) or told)
    one.close()
    assert len(told + one.news()) == 1
    assert told[0].startswith("the task's callbacks cannot be called: ")


@pytest.mark.slow
def test_an_overtaken_controller_stores_nothing(tmp_path: Path, log: EventLog) -> None:
    one = callbacks_of(tmp_path)
    one.begin(log.behind)
    steps(log, 0)
    until(lambda: heard_steps(tmp_path) and one._place[0])
    (tmp_path / "run" / FILE).write_text("another's")
    one.abandon()
    assert (tmp_path / "run" / FILE).read_text() == "another's"


def test_only_defined_methods_count() -> None:
    class Silent(Task):
        pass

    class Saves(Task):
        def on_checkpoint(self, step: int, path: str) -> None:
            pass

    assert defined_callbacks(Silent) == ()
    assert defined_callbacks(Saves) == ("on_checkpoint",)
    # The default of the others does nothing.
    assert call(Saves(), {**step(0), "grad_norm": 0.5}, str)
    assert not call(Saves(), event("waiting", **{"for": "x"}), str)


def test_a_report_holds_no_credentials() -> None:
    told = raised(evaluated(2, loss=1.0), ValueError("https://me:pw@host is away"))
    assert told["text"].startswith("Task.on_evaluate raised ValueError: https://***@host is away")


def test_a_tail_begins_at_a_place(tmp_path: Path, log: EventLog) -> None:
    run = LocalFolder(tmp_path / "run")
    steps(log, 0, 1, 2)
    tail = Tail(run)
    read = tail.read()
    next(read)
    next(read)
    assert [one["step"] for one in Tail(run, *tail.place).read()] == [2]
