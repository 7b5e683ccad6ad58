"""A task hears of its run: every step in order, once, or again after its process has died."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus import Task
from raytrain_plus.observe.run_events import EventLog, Tail
from raytrain_plus.observe.trackers.callbacks import call, defined_callbacks, raised, step_values
from raytrain_plus.observe.trackers.listened import CALLBACKS, CalledTask
from raytrain_plus.observe.trackers.listening import Listening
from raytrain_plus.storage.folders.claimed import Claim
from raytrain_plus.storage.folders.local import LocalFolder
from tests.support.listeners import finished, listened, until
from tests.unit.observe.feed import evaluated, event, step

FILE = "trackers/callbacks.json"
TASK = """
import json, time
from pathlib import Path
from raytrain_plus import StopRun, Task

class Tells(Task):
    def __init__(self, folder, act="pass"):
        self.folder, self.act = folder, act

    def model(self):
        raise AssertionError("the model is not built")

    def say(self, *what):
        with open(self.folder + "/heard", "a") as heard:
            heard.write(json.dumps([*what, self.run.total_steps]) + "\\n")

    def on_step(self, metrics):
        self.say("step", metrics["step"], metrics["loss"])
        exec(self.act)
        return getattr(self, 'returned', None)

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
    (tmp_path / f"{module_of(tmp_path)}.py").write_text(TASK)
    (tmp_path / "run").mkdir()
    made = EventLog(LocalFolder(tmp_path / "run"))
    yield made
    made.close()


def module_of(tmp_path: Path) -> str:
    """Return the name of the task's module, another one in each test: this process imports it."""
    return f"task_of_{tmp_path.parent.name}_{tmp_path.name}".replace("-", "_")


def begun(
    tmp_path: Path, log: EventLog, act: str = "pass", task: str = "Tells", claim: Claim | None = None
) -> Listening:
    called = CalledTask(
        task=f"{module_of(tmp_path)}:{task}",
        pickled_task=None,
        roots=(str(tmp_path),),
        args={"folder": str(tmp_path), "act": act},
        total_steps=7,
        batch_size=48,
        rows=0,
        checkpoints=str(tmp_path / "run" / "checkpoints"),
    )
    one = listened(tmp_path / "run", task=called, claim=claim)
    return Listening(one, log.behind, {}, (tmp_path / "stopped").touch)


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


def bookmark(tmp_path: Path) -> dict[str, int]:
    file = tmp_path / "run" / FILE
    return json.loads(file.read_text()) if file.exists() else {}


def test_a_task_hears_of_steps_evaluations_and_checkpoints_in_order(tmp_path: Path, log: EventLog) -> None:
    one = begun(tmp_path, log)
    name = "000000000000-00000000"
    write(log, evaluated(-1, accuracy=0.5), event("waiting", **{"for": "x"}), {**step(0, loss="nan")})
    write(log, event("checkpoint_saved", step=0, seconds=0.1, stall_s=0.0, checkpoint=name))
    # Of an older version: it says not where the checkpoint is.
    write(log, event("checkpoint_saved", step=0, seconds=0.1, stall_s=0.0))
    steps(log, 1)
    assert finished(one) == []
    told = heard(tmp_path)
    assert [call[:3] for call in told if call[1:2] != [0] or call[0] != "step"] == [
        ["evaluate", -1, {"accuracy": 0.5}],
        ["checkpoint", 0, str(tmp_path / "run" / "checkpoints" / name)],
        ["step", 1, 1.25],
    ]
    assert str(told[1][2]) == "nan"
    assert {call[3] for call in told} == {7}


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


def test_a_slow_method_delays_nobody_and_is_called_for_all(tmp_path: Path, log: EventLog) -> None:
    one = begun(tmp_path, log, "time.sleep(0.02)")
    began = time.monotonic()
    steps(log, *range(50))
    assert time.monotonic() - began < 0.5
    assert finished(one) == []
    assert heard_steps(tmp_path) == list(range(50))


def test_a_method_that_raises_is_reported_once_with_its_place(tmp_path: Path, log: EventLog) -> None:
    one = begun(tmp_path, log, "raise SystemExit('boom\\nmore')")
    steps(log, 0, 1, 2)
    place = f"{tmp_path / module_of(tmp_path)}.py:{WHERE}"
    assert finished(one) == [
        f"Task.on_step raised SystemExit: boom at {place} (step 1); the run and further calls continue"
    ]
    assert heard_steps(tmp_path) == [0, 1, 2]


STOPS = "self.returned = StopRun('all is learnt')"


def test_a_method_can_have_the_run_stop(tmp_path: Path, log: EventLog) -> None:
    one = begun(tmp_path, log, STOPS)
    steps(log, 0, 1)
    assert finished(one) == ["Task.on_step after step 1 stops the run: all is learnt"]
    assert (tmp_path / "stopped").exists()
    # The calls of other steps are made nevertheless.
    assert heard_steps(tmp_path) == [0, 1]


def test_what_an_earlier_controller_did_not_tell_stops_no_resumed_run(tmp_path: Path, log: EventLog) -> None:
    finished(begun(tmp_path, log))
    steps(log, 0, 1)
    again = EventLog(LocalFolder(tmp_path / "run"))
    one = begun(tmp_path, again, STOPS)
    until(lambda: heard_steps(tmp_path) == [0, 1])
    assert (finished(one), (tmp_path / "stopped").exists()) == ([], False)
    one = begun(tmp_path, again, STOPS)
    steps(again, 2)
    assert (finished(one) != [], (tmp_path / "stopped").exists()) == (True, True)
    again.close()


def test_the_next_process_of_a_controller_continues_behind_the_last_call(tmp_path: Path, log: EventLog) -> None:
    one = begun(tmp_path, log)
    steps(log, 0, 1)
    until(lambda: heard_steps(tmp_path) == [0, 1])
    one.stop(30)
    steps(log, 2, 3)
    assert heard_steps(tmp_path) == [0, 1]
    assert finished(begun(tmp_path, log)) == []
    assert heard_steps(tmp_path) == [0, 1, 2, 3]


def test_a_stop_comes_between_two_calls_and_the_next_process_makes_the_rest(tmp_path: Path, log: EventLog) -> None:
    one = begun(tmp_path, log, "time.sleep(0.02)")
    steps(log, *range(40))
    until(lambda: heard_steps(tmp_path))
    one.stop(30)
    assert 0 < len(heard_steps(tmp_path)) < 40
    assert finished(begun(tmp_path, log)) == []
    assert heard_steps(tmp_path) == [*range(40)]


def test_the_next_controller_continues_where_the_last_one_was(tmp_path: Path, log: EventLog) -> None:
    one = begun(tmp_path, log)
    steps(log, 0, 1)
    finished(one)
    # Nobody calls these before the controller is dead.
    steps(log, 2)
    again = EventLog(LocalFolder(tmp_path / "run"))
    steps(again, 3)
    finished(begun(tmp_path, again))
    again.close()
    assert heard_steps(tmp_path) == [0, 1, 2, 3]


def test_a_place_of_an_older_version_is_continued(tmp_path: Path, log: EventLog) -> None:
    steps(log, 0)
    size = (tmp_path / "run" / "events.ndjson").stat().st_size
    steps(log, 1)
    again = EventLog(LocalFolder(tmp_path / "run"))
    LocalFolder(tmp_path / "run").write(FILE, [f'{{"at": {size}, "events": 0}}\n'.encode()])
    finished(begun(tmp_path, again))
    again.close()
    assert heard_steps(tmp_path) == [1]


def test_a_run_whose_task_did_not_listen_before_is_called_from_now_on(tmp_path: Path, log: EventLog) -> None:
    steps(log, 0, 1)
    again = EventLog(LocalFolder(tmp_path / "run"))
    one = begun(tmp_path, again)
    steps(again, 2)
    finished(one)
    again.close()
    assert heard_steps(tmp_path) == [2]


def test_a_place_behind_the_end_of_the_log_repeats_nothing(tmp_path: Path, log: EventLog) -> None:
    steps(log, 0, 1)
    again = EventLog(LocalFolder(tmp_path / "run"))
    LocalFolder(tmp_path / "run").write(FILE, [b'{"at": 1000000, "events": 0}\n'])
    one = begun(tmp_path, again)
    steps(again, 2)
    assert finished(one) == []
    again.close()
    assert heard_steps(tmp_path) == [2]


def test_a_damaged_place_is_reported_and_the_calls_of_new_steps_are_made(tmp_path: Path, log: EventLog) -> None:
    steps(log, 0, 1)
    again = EventLog(LocalFolder(tmp_path / "run"))
    LocalFolder(tmp_path / "run").write(FILE, [b'{"at": "far"'])
    one = begun(tmp_path, again)
    steps(again, 2)
    [said] = finished(one)
    again.close()
    assert said.startswith("the task's callbacks: new events only, because ")
    assert f"{FILE}, line 1: the file is damaged" in said
    assert heard_steps(tmp_path) == [2]


def test_a_method_that_hangs_holds_up_nobody_else_and_counts_as_not_called(tmp_path: Path, log: EventLog) -> None:
    one = begun(tmp_path, log, "time.sleep(600)")
    steps(log, 0)
    until(lambda: heard_steps(tmp_path))
    one.end("finished")
    until(lambda: one.news(1.0).left == (CALLBACKS,))
    began = time.monotonic()
    one.stop(0.1)
    assert time.monotonic() - began < 10
    assert bookmark(tmp_path) == {"at": 0, "events": 0, "behind": 0}


def test_a_task_that_cannot_be_built_is_reported_once_and_called_by_the_next_controller(
    tmp_path: Path, log: EventLog
) -> None:
    one = begun(tmp_path, log, task="Nobody")
    steps(log, 0)
    [text] = finished(one)
    assert text.startswith("the task's callbacks: no event of this run is delivered: ")
    assert "has no 'Nobody'" in text
    assert bookmark(tmp_path) == {"at": 0, "events": 0, "behind": 0}


def test_an_overtaken_controller_stores_nothing(tmp_path: Path, log: EventLog) -> None:
    (tmp_path / "run" / "claim").write_text("another's")
    one = begun(tmp_path, log, claim=Claim("claim", b"ours"))
    steps(log, 0)
    # TensorBoard's metrics are in a file that is opened once.
    assert finished(one) == []
    assert bookmark(tmp_path) == {}


def test_only_defined_methods_count() -> None:
    class Silent(Task):
        pass

    class Saves(Task):
        def on_checkpoint(self, step: int, path: str) -> None:
            pass

    assert defined_callbacks(Silent) == ()
    assert defined_callbacks(Saves) == ("on_checkpoint",)
    # The default of the others does nothing.
    call(Saves(), {**step(0), "grad_norm": 0.5}, str)
    call(Saves(), event("waiting", **{"for": "x"}), str)


def test_a_report_holds_no_credentials() -> None:
    _, text = raised(evaluated(2, loss=1.0), ValueError("https://me:pw@host is away"))
    assert text.startswith("Task.on_evaluate raised ValueError: https://***@host is away")


def test_a_tail_begins_at_a_place(tmp_path: Path, log: EventLog) -> None:
    run = LocalFolder(tmp_path / "run")
    steps(log, 0, 1, 2)
    tail = Tail(run)
    read = tail.read()
    next(read)
    next(read)
    assert [one["step"] for one in Tail(run, *tail.place).read()] == [2]
