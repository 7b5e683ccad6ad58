"""Trackers continue one run across restarts and survive failing libraries; a fake W&B library records its calls."""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus.errors import InputError
from raytrain_plus.observe.trackers import trackers as module
from raytrain_plus.observe.trackers.event_metrics import MetricValue
from raytrain_plus.observe.trackers.trackers import Relay, Trackers, check_installed, settings_for, start_trackers
from raytrain_plus.storage.folders.local import LocalFolder
from tests.support.events import shown
from tests.unit.observe.feed import event, step

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
    say("init", settings, "WANDB_SERVICE" in os.environ, os.getcwd())
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
    monkeypatch.setenv("WANDB_SERVICE", "another's")
    return tmp_path


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the warnings."""
    told: list[str] = []
    monkeypatch.setattr(module.log, "warning", lambda text, *values: told.append(text % values))
    return told


def calls(folder: Path) -> list[list[Any]]:
    file = folder / "calls"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def until(what: Any) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def relay(folder: Path, **environment: str) -> Relay:
    run = LocalFolder(folder / "run")
    [found] = start_trackers(["wandb"], run, JOB, {"WANDB_DIR": str(folder), **environment}, str(folder))
    return found


def test_one_run_across_restarts(wandb: Path, said: list[str]) -> None:
    for status, number in (("stopped", 7), ("finished", 3)):
        one = relay(wandb)
        # The last metrics arrive within less than the collection period.
        until(lambda: (wandb / "run" / "trackers" / "wandb.json").exists())
        trackers = Trackers(LocalFolder(wandb / "run"), [one])
        trackers.add(step(number, loss=2.5, time=9.5))
        trackers.add(event("run_finished", status=status, error=None, steps=1, samples=48, state_sha256=None))
        trackers.close()
        trackers.close()
    first, again = ([call for call in calls(wandb) if call[0] == "init"][number] for number in (0, 1))
    assert first[1]["id"] == again[1]["id"] == json.loads((wandb / "run/trackers/wandb.json").read_text())["run"]
    assert first[1]["config"] == {"name": "digits", "data": {"path": "x"}, "trackers": ["wandb"]}
    assert (first[1]["name"], first[1]["resume"]) == ("digits", "allow")
    assert first[2:] == [False, str(wandb)]
    assert [call for call in calls(wandb) if call[0] == "define_metric"][:2] == [
        ["define_metric", ["trainer/step"], {}],
        ["define_metric", ["*"], {"step_metric": "trainer/step"}],
    ]
    assert [call for call in calls(wandb) if call[0] in ("log", "finish")] == [
        ["log", {"train/loss": 2.5, "train/samples_per_second": 96.0, "trainer/step": 7, "_timestamp": 9.5}],
        ["finish", 0, {"status": "stopped"}],
        ["log", {"train/loss": 2.5, "train/samples_per_second": 96.0, "trainer/step": 3, "_timestamp": 9.5}],
        ["finish", 0, {"status": "finished"}],
    ]
    assert len(list((wandb / "run" / "tensorboard").iterdir())) == 2
    assert said == []


def test_a_failing_library_is_reported_once(wandb: Path, said: list[str]) -> None:
    one = relay(wandb, WANDB_MODE="1/0", WANDB_API_KEY="division")
    one.add([MetricValue("train/loss", 1.0, 0, 0.0)])
    until(lambda: said)
    one.end("failed")
    one.close()
    assert said == [
        "wandb: it does not accept metrics; retrying: ZeroDivisionError: *** by zero",
        "wandb: 1 metric values were not delivered; the run's events contain them",
    ]
    assert not (wandb / "run" / "trackers").exists()


def test_a_dying_process_is_reported_once(wandb: Path, said: list[str]) -> None:
    one = relay(wandb, WANDB_MODE="os._exit(3)")
    until(lambda: said)
    for number in range(3):
        one.add([MetricValue("train/loss", 1.0, number, 0.0)])
    one.end("finished")
    one.close()
    assert said == ["wandb exited with code 3; it receives no further metrics of the run"]


def test_a_stopped_process_delays_nothing(wandb: Path, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOAD_S", "END_S", "GOING_S"):
        monkeypatch.setattr(module, name, 0.1)
    monkeypatch.setattr(module, "MOST_BYTES", 100_000)
    one = relay(wandb)
    assert one._process is not None
    os.kill(one._process.pid, signal.SIGSTOP)
    longest = 0.0
    for number in range(10_000):
        began = time.monotonic()
        one.add([MetricValue("train/loss", 1.0, number, 0.0)])
        longest = max(longest, time.monotonic() - began)
    assert longest < 0.5
    assert one._process.owed < module.MOST_BYTES + 100
    assert one._dropped > 0
    one.end("finished")
    one.close()
    assert one._process.code == -signal.SIGKILL
    assert said == ["wandb did not end in time; it may lack the run's last metrics"]


def test_a_run_of_another_controller_is_not_ended(wandb: Path, said: list[str]) -> None:
    one = relay(wandb)
    until(lambda: calls(wandb))
    trackers = Trackers(LocalFolder(wandb / "run"), [one])
    trackers.abandon()
    trackers.close()
    assert one._process is not None
    assert one._process.code is not None
    assert "finish" not in [call[0] for call in calls(wandb)]
    assert said == []


def test_a_process_that_cannot_be_started_costs_no_step(
    wandb: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(wandb / "none"))
    one = relay(wandb)
    one.add([MetricValue("train/loss", 1.0, 0, 0.0)])
    one.end("finished")
    one.close()
    assert len(said) == 1
    assert said[0].startswith("wandb cannot be started: ")


def test_a_file_that_is_damaged_costs_no_step(wandb: Path, said: list[str]) -> None:
    run = LocalFolder(wandb / "run")
    run.write("trackers/wandb.json", [b"{"])
    assert Relay("wandb", run)._kept() is None
    assert said == ["cannot read the id of this run in wandb; starting a new run there"]


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


def test_after_a_resumption_tensorboard_shows_no_step_twice(tmp_path: Path) -> None:
    reached = {0: {"accuracy": 0.5}}
    trackers = Trackers(LocalFolder(tmp_path), evaluated=lambda step: reached.get(step, {}))
    trackers.add(event("evaluated", step=0, metrics=reached[0]))
    for number in range(3):
        trackers.add(step(number, loss=float(number)))
    trackers.add(event("evaluated", step=2, metrics={"accuracy": 0.75}))
    trackers.add(event("resumed", step=0, checkpoint=None, voided_to=2))
    trackers.add(step(1, loss=7.0))
    trackers.close()
    assert shown(tmp_path / "tensorboard", "train/loss") == [(0, 0.0), (1, 7.0)]
    assert shown(tmp_path / "tensorboard", "evaluation/accuracy") == [(1, 0.5)]
