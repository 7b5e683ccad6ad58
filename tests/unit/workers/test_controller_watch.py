"""What a worker does about a controller that is silent, asleep or gone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from raytrain_plus.runs.process import this_process
from raytrain_plus.workers import controller_watch as module
from raytrain_plus.workers import run_actors
from raytrain_plus.workers.controller_watch import ControllerProcess, ControllerWatch, Verdict, end_workers, verdict


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


class Ended(BaseException):
    """The process is gone."""


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

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pid: int = 0, wait_s: float = 60.0) -> None:
        self.controller, self.found = Controller(), ""
        monkeypatch.setattr(module.ray, "get_actor", self._get)
        process = ControllerProcess("run/1", pid or os.getpid(), this_process(), wait_s)
        self.done: list[str] = []
        self.others: list[bool] = []
        """Whether others hear a controller, each time that they are asked; they do not any more."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.threading.Thread, "start", lambda thread: None)
            super().__init__(process, self._others, self._leaves, lambda: None, self._ends)
        self.now = time.monotonic()

    def _get(self, name: str, namespace: str) -> Any:
        assert (name, namespace) == ("run/1", "raytrain_plus")
        if self.found:
            raise {"late": GetTimeoutError("no GCS"), "gone": ValueError("no such actor")}[self.found]
        return self.controller

    def _leaves(self) -> None:
        self.done.append("leave")
        self.meanwhile()

    def _others(self) -> bool:
        return self.others.pop(0) if self.others else False

    def _ends(self, led: Callable[[], bool]) -> None:
        self.done.append("wait for others")
        self.meanwhile()
        if not led():
            self.done.append("end")
            raise Ended

    def run(self, verdict: Verdict) -> list[str]:
        """Act on this verdict until the workers end; return what was done."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.time, "sleep", lambda seconds: None)
            patch.setattr(self, "_look", lambda now: verdict)
            with pytest.raises(Ended):
                self._run()
        return self.done

    def meanwhile(self) -> None:
        """What happens while this worker writes what it leaves, or waits for others that do."""

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
    watch.follow(ControllerProcess("run/1", os.getpid(), {**this_process(), "machine": "another"}, 60))
    assert watch.after(30) == "wait"
    watch.follow(ControllerProcess("run/1", os.getpid(), {}, 60))
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


def test_all_processes_of_a_run_wait_as_long_as_its_job_says(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watched(monkeypatch, wait_s=600)
    watch._process = ControllerProcess("run/1", 0, {}, 600)
    assert watch.after(599) == "wait"
    assert watch.after(3) == "alone"


ALL = ["leave", "wait for others", "end"]


@pytest.mark.parametrize("why", ["over", "alone"])
def test_a_worker_leaves_what_it_has_before_the_workers_end(monkeypatch: pytest.MonkeyPatch, why: Verdict) -> None:
    assert Watched(monkeypatch).run(why) == ALL


@pytest.mark.parametrize("adopted_in", [1, 2])
def test_the_workers_stay_if_a_controller_adopts_them_meanwhile(
    monkeypatch: pytest.MonkeyPatch, adopted_in: int
) -> None:
    watch = Watched(monkeypatch)
    monkeypatch.setattr(watch, "meanwhile", lambda: watch.heard() if len(watch.done) == adopted_in else None)
    assert watch.run("alone") == ALL[:adopted_in] + ALL


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_a_worker_that_is_cut_off_ends_no_workers_that_hear_a_controller(
    monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    watch = Watched(monkeypatch)
    watch.others = [False] * asked + [True]
    assert watch.run("alone") == ALL[:asked] + ALL
    assert not watch.others
    # Dead for good is dead for all: what they have heard a moment ago was its last.
    watch = Watched(monkeypatch)
    watch.others = [True] * 3
    assert watch.run("over") == ALL


def test_a_storage_that_hangs_keeps_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_actors, "WRITE_S", 0.01)
    monkeypatch.setattr(run_actors, "LOOK_S", 0.01)
    watch, go = Watched(monkeypatch), threading.Event()
    monkeypatch.setattr(watch, "_leave", lambda: go.wait(5) or watch.done.append("written"))
    assert watch.run("over") == ["wait for others", "end"]
    go.set()


def test_a_controller_is_heard_for_as_long_as_it_does_not_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watched(monkeypatch)
    monkeypatch.setattr(module.time, "monotonic", lambda: watch.now)
    watch.now += 9
    assert watch.hears()
    watch.now += 2
    assert not watch.hears()
    watch.heard()
    assert watch.hears()


def test_a_controller_that_comes_while_others_write_keeps_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    context = SimpleNamespace(get_actor_name=lambda: "run/1/b")
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(module, "actors_of", lambda run: {f"{run}/{name}": name for name in "abc"})
    monkeypatch.setattr(module, "leave", lambda workers: done.append([*workers]))
    monkeypatch.setattr(module.time, "sleep", done.append)
    monkeypatch.setattr(module, "clear", lambda *what: done.append(what))
    monkeypatch.setattr(module.os, "_exit", done.append)
    end_workers("run/1", "place", lambda: True)
    # Its turn is the second.
    assert done == [["a", "c"], module.TURN_S]
    end_workers("run/1", "place", lambda: False)
    assert done[2:] == [["a", "c"], module.TURN_S, ("run/1", "run/1/b", "place"), 1]
