"""Trackers continue one run across restarts and survive failing libraries; a fake W&B library records its calls."""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus.errors import InputError
from raytrain_plus.observe.run_events import EventLog
from raytrain_plus.observe.trackers.bookmark import Bookmark
from raytrain_plus.observe.trackers.listening import Listening, settle_process
from raytrain_plus.observe.trackers.trackers import check_installed, settings_for
from raytrain_plus.storage.folders.local import LocalFolder
from tests.support.listeners import finished, listened, until
from tests.unit.observe.feed import Event, step

WANDB = """
import json, os, sys, time

def say(*what):
    with open(os.environ["WANDB_DIR"] + "/calls", "a") as calls:
        calls.write(json.dumps(what) + "\\n")

class Settings(dict):
    pass

class Run:
    def __init__(self, id):
        self.id, self.summary = id, {}

    def define_metric(self, *names, **settings):
        say("define_metric", names, settings)

    def log(self, values):
        say("log", values)

    def finish(self, exit_code):
        say("finish", exit_code, self.summary)

def init(**settings):
    say("init", settings)
    print("W&B has much to say")
    if "WANDB_MODE" in os.environ:
        eval(os.environ["WANDB_MODE"])
    return Run(settings["id"])
"""
"""The part of W&B's API that is used."""
JOB = "name: digits\ndata: {path: x}\ntrackers: [wandb]\n"


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the fake library before any other; return the folder in which it records its calls."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path / "lib")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    # Both are imported again, and forgotten at the end.
    for name in ("wandb", "raytrain_plus.observe.trackers.wandb"):
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    return tmp_path


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    (tmp_path / "run").mkdir()
    made = EventLog(LocalFolder(tmp_path / "run"))
    yield made
    made.close()


def calls(folder: Path) -> list[list[Any]]:
    file = folder / "calls"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def begun(folder: Path, behind: int = 0) -> Listening:
    return Listening(listened(folder / "run", trackers=["wandb"], job_yaml=JOB), behind, {}, lambda: None)


def write(log: EventLog, *events: Event) -> None:
    for one in events:
        fields = {name: value for name, value in one.items() if name not in ("kind", "time", "generation")}
        log.write(one["kind"], generation=0, time=one["time"], fields={**fields, "grad_norm": 0.5})


def test_one_run_across_restarts(wandb: Path, log: EventLog) -> None:
    for status, number in (("stopped", 7), ("finished", 3)):
        one = begun(wandb)
        write(log, step(number, loss=2.5, time=9.5))
        assert finished(one, status) == []
    first, again = ([call for call in calls(wandb) if call[0] == "init"][number] for number in (0, 1))
    kept = json.loads((wandb / "run/trackers/wandb.json").read_text())
    assert first[1]["id"] == again[1]["id"] == kept["run"]
    assert first[1]["config"] == {"name": "digits", "data": {"path": "x"}, "trackers": ["wandb"]}
    assert (first[1]["name"], first[1]["resume"]) == ("digits", "allow")
    assert [call for call in calls(wandb) if call[0] == "define_metric"][:2] == [
        ["define_metric", ["trainer/step"], {}],
        ["define_metric", ["*"], {"step_metric": "trainer/step"}],
    ]
    metrics = {"train/loss": 2.5, "train/grad_norm": 0.5, "train/samples_per_second": 96.0, "_timestamp": 9.5}
    assert [call for call in calls(wandb) if call[0] in ("log", "finish")] == [
        ["log", {**metrics, "trainer/step": 7}],
        ["finish", 0, {"status": "stopped"}],
        ["log", {**metrics, "trainer/step": 3}],
        ["finish", 0, {"status": "finished"}],
    ]
    assert len(list((wandb / "run" / "tensorboard").iterdir())) == 2


def test_the_id_of_the_trackers_run_is_kept_as_soon_as_it_has_one(wandb: Path, log: EventLog) -> None:
    one = begun(wandb)
    file = wandb / "run" / "trackers" / "wandb.json"
    until(lambda: file.exists() and "run" in json.loads(file.read_text()))
    assert "finish" not in [call[0] for call in calls(wandb)]
    finished(one)


def test_a_run_of_an_older_version_is_continued_with_new_steps(wandb: Path, log: EventLog) -> None:
    """It kept the id of the tracker's run, and no place: what it lacked was lost."""
    write(log, step(0))
    (wandb / "run" / "trackers").mkdir()
    (wandb / "run" / "trackers" / "wandb.json").write_text('{"run": "theirs"}\n')
    again = EventLog(LocalFolder(wandb / "run"))
    write(again, step(1))
    assert finished(begun(wandb, again.behind)) == []
    again.close()
    assert [call[1]["id"] for call in calls(wandb) if call[0] == "init"] == ["theirs"]
    assert [call[1]["trainer/step"] for call in calls(wandb) if call[0] == "log"] == [1]


def test_what_a_dead_controller_has_not_delivered_the_next_one_does(
    wandb: Path, log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "1/0")
    one = begun(wandb)
    write(log, step(0))
    until(lambda: one.news(1.0).reports)
    one.stop(30)
    monkeypatch.delenv("WANDB_MODE")
    write(log, step(1))
    assert finished(begun(wandb, (wandb / "run" / "events.ndjson").stat().st_size)) == []
    assert [call[1]["trainer/step"] for call in calls(wandb) if call[0] == "log"] == [0, 1]


def test_a_failing_library_is_reported_once(wandb: Path, log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "1/0")
    monkeypatch.setenv("WANDB_API_KEY", "division")
    one = begun(wandb)
    write(log, step(0))
    said: list[str] = []
    until(lambda: said.extend(text for _, text in one.news(1.0).reports) or said)
    assert said + finished(one, "failed") == [
        "wandb does not accept events; retrying: ZeroDivisionError: *** by zero",
        "wandb lacks the end of the run, which the run's events contain",
    ]
    assert "run" not in json.loads((wandb / "run" / "trackers" / "wandb.json").read_text())


def test_a_hanging_library_holds_up_nobody_else(wandb: Path, log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "time.sleep(600)")
    one = begun(wandb)
    until(lambda: calls(wandb))
    write(log, step(0))
    one.end("finished")
    began = time.monotonic()
    assert one.news(30.0) == ([], ("wandb",))
    assert time.monotonic() - began < 15
    assert len(list((wandb / "run" / "tensorboard").iterdir())) == 1


def test_a_stopped_listener_does_not_end_the_trackers_run(wandb: Path, log: EventLog) -> None:
    one = begun(wandb)
    until(lambda: calls(wandb))
    one.stop(30)
    one.end("finished")
    assert one.news(30) == ([], ())
    assert "finish" not in [call[0] for call in calls(wandb)]


def test_a_damaged_bookmark_begins_a_new_run_there(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path / "run")
    for text in (b"{", b'{"run": 5}', b"{}", b'{"at": -1, "events": 0}', b'{"at": 1}'):
        run.write("trackers/wandb.json", [text])
        made = Bookmark(run, "wandb", 7)
        with pytest.raises(InputError, match="the file is damaged"):
            made.load()
        assert (made.run, made.place) == (None, (7, 0))


def test_a_missing_package_is_reported_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), os.path.dirname(os.__file__)])
    # W&B leaves such a folder behind.
    (tmp_path / "wandb").mkdir()
    with pytest.raises(InputError, match=r"trackers: wandb: wandb is not installed on (.|\n)*raytrain-plus\[wandb\]"):
        check_installed(["wandb"])
    check_installed([])


def test_only_variables_of_the_named_trackers_are_passed_on() -> None:
    environment = {"MLFLOW_TRACKING_URI": "a", "WANDB_API_KEY": "b", "HOME": "c"}
    assert settings_for(["wandb"], environment) == {"WANDB_API_KEY": "b"}
    assert settings_for(["mlflow", "wandb"], environment) == {"MLFLOW_TRACKING_URI": "a", "WANDB_API_KEY": "b"}
    assert settings_for([], environment) == {}


def test_the_process_gets_the_trackers_environment_and_the_tasks_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    there = {"HOME": "c", "WANDB_SERVICE": "another's", "MLFLOW_HTTP_REQUEST_TIMEOUT": "7"}
    root = tmp_path / "task"
    root.mkdir()
    ours = {"WANDB_API_KEY": "b", "WANDB_SERVICE": "the driver's"}
    told = listened(tmp_path, environment=ours, roots=(str(root),))
    settle_process(told, there)
    assert there == {
        "HOME": "c",
        "WANDB_API_KEY": "b",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "7",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    }
    assert (sys.path[0], os.getcwd()) == (str(root), str(root))
    assert "WANDB_API_KEY" not in repr(told)
