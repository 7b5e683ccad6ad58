"""What a worker does about a controller that is silent, asleep or gone."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from raytrain_plus.runs.process import this_process
from raytrain_plus.workers import controller_watch as module
from raytrain_plus.workers.controller_watch import ControllerProcess, ControllerWatch, Verdict, verdict


@pytest.mark.parametrize(
    ("silent_s", "sleeps", "wait_s", "dead", "found"),
    [
        (9, True, 60, False, "wait"),
        (11, True, 60, False, "wake"),
        (11, False, 60, False, "wait"),
        (61, False, 60, False, "alone"),
        (61, True, 60, False, "alone"),
        # Ray needs some time to start the next one, however short a job waits.
        (11, False, 1, False, "wait"),
        (21, False, 1, False, "alone"),
        (0, False, 60, True, "over"),
    ],
)
def test_verdicts(silent_s: float, sleeps: bool, wait_s: float, dead: bool, found: Verdict) -> None:
    assert verdict(dead=dead, silent_s=silent_s, sleeps=sleeps, wait_s=wait_s) == found


class Controller:
    """An actor whose signs of life a test gives."""

    def __init__(self) -> None:
        self.answers: list[Future[Any]] = []
        self.__ray_ready__ = SimpleNamespace(options=self._options)

    def _options(self, max_task_retries: int) -> Any:
        assert max_task_retries == 0
        self.answers.append(Future())
        return SimpleNamespace(remote=lambda: SimpleNamespace(future=lambda: self.answers[-1]))


class Watched(ControllerWatch):
    """A watch whose thread and clock a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pid: int = 0, wait_s: float | None = 60.0) -> None:
        self.controller, self.found = Controller(), ""
        monkeypatch.setattr(module.threading.Thread, "start", lambda thread: None)
        monkeypatch.setattr(module.ray, "get_actor", self._get)
        process = ControllerProcess("run/1", pid or os.getpid(), this_process())
        self.done: list[str] = []
        super().__init__(process, lambda: wait_s, self._leaves, lambda: self.done.append("end"))
        self.now = time.monotonic()

    def _get(self, name: str, namespace: str) -> Any:
        assert (name, namespace) == ("run/1", "raytrain_plus")
        if self.found:
            raise {"late": GetTimeoutError("no GCS"), "gone": ValueError("no such actor")}[self.found]
        return self.controller

    def _leaves(self) -> None:
        self.done.append("leave")
        self.meanwhile()

    def meanwhile(self) -> None:
        """What happens while this worker writes what it leaves."""

    def after(self, seconds: float) -> Verdict:
        """Look twice a second for so long, or until there is something to do."""
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            if (found := self._look(self.now)) != "wait":
                return found
        return "wait"


def test_an_answer_or_a_call_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watched(monkeypatch)
    monkeypatch.setattr(module.time, "monotonic", lambda: watch.now)
    for _ in range(5):
        assert watch.after(8) == "wait"
        watch.heard()
    # One question at a time.
    assert len(watch.controller.answers) == 1
    for _ in range(5):
        assert watch.after(8) == "wait"
        watch.controller.answers[-1].set_result(True)
    assert watch.after(8) == "wait"
    assert len(watch.controller.answers) == 6
    assert watch.after(8) == "wake"


def test_a_process_that_sleeps_on_another_machine_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watched(monkeypatch)
    watch.follow(ControllerProcess("run/1", os.getpid(), {**this_process(), "machine": "another"}))
    assert watch.after(30) == "wait"
    watch.follow(ControllerProcess("run/1", os.getpid(), {}))
    watch.now = time.monotonic()
    watch._looked = watch.now
    assert watch.after(30) == "wait"
    assert watch.after(40) == "alone"


def test_only_a_controller_that_ray_does_not_start_again_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watched(monkeypatch)
    watch.found = "late"
    assert watch.after(1) == "wait"
    watch.found = ""
    assert watch.after(1) == "wait"
    watch.controller.answers[-1].set_exception(ActorUnavailableError("it starts again", b"\0" * 16))
    assert watch.after(3) == "wait"
    watch.controller.answers[-1].set_exception(ActorDiedError())
    assert watch.after(0.5) == "over"
    watch = Watched(monkeypatch)
    watch.found = "gone"
    assert watch.after(0.5) == "over"


def test_a_worker_that_was_stopped_itself_has_heard_nothing_for_that_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watched(monkeypatch)
    watch.after(5)
    watch.now += 1000
    assert watch._look(watch.now) == "wait"
    assert watch.after(4) == "wait"
    assert watch.after(3) == "wake"


def test_a_process_without_a_job_waits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watched(monkeypatch, wait_s=None)
    watch._process = ControllerProcess("run/1", 0, {})
    assert watch.after(59) == "wait"
    assert watch.after(3) == "alone"


def test_a_worker_leaves_what_it_has_before_the_workers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watched(monkeypatch)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(watch, "_look", lambda now: "over")
    watch._run()
    assert watch.done == ["leave", "end"]


def test_the_workers_stay_if_a_controller_adopts_them_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watched(monkeypatch)
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(watch, "_look", lambda now: "alone" if len(watch.done) < 2 else "over")
    monkeypatch.setattr(watch, "meanwhile", lambda: watch.heard() if len(watch.done) == 1 else None)
    watch._run()
    assert watch.done == ["leave", "leave", "end"]
