"""The listeners' process: started again if it dies, waited for at the end for a while, gone with the controller."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from raytrain_plus.controller.record import listeners_actor as module
from raytrain_plus.controller.record.listeners_actor import MOST_STARTS, RayListeners
from raytrain_plus.observe.trackers.listening import News
from tests.support.listeners import listened

NODE = "ab" * 28


class FakeRay:
    """Actors that a test answers for."""

    def __init__(self) -> None:
        self.started: list[tuple[Any, ...]] = []
        self.ended: list[str] = []
        self.killed = 0
        self.asked: Future[News] = Future()
        self.news = self.end = self

    def options(self, **options: Any) -> FakeRay:
        assert options["num_cpus"] == 0
        assert options["scheduling_strategy"].node_id == NODE
        return self

    def remote(self, *given: Any) -> Any:
        if given == (module.ListenersActor,):
            return self
        if len(given) > 1:
            self.started.append(given)
            return self
        if isinstance(given[0], str):
            self.ended.append(given[0])
            return None
        self.asked = Future()
        return self

    def future(self) -> Future[News]:
        return self.asked

    def kill(self, actor: Any) -> None:
        assert actor is self
        self.killed += 1

    def die(self) -> None:
        self.asked.set_exception(ActorDiedError())


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made = FakeRay()
    monkeypatch.setattr(module, "ray", made)
    return made


def begun(tmp_path: Path) -> RayListeners:
    made = RayListeners(listened(tmp_path, trackers=["mlflow"]), NODE, "the controller")
    made.begin(7, lambda: {1: {"accuracy": 0.5}})
    return made


def test_news_are_passed_on_without_waiting(ray: FakeRay, tmp_path: Path) -> None:
    one = begun(tmp_path)
    assert ray.started[0][1:4] == (7, {1: {"accuracy": 0.5}}, "the controller")
    assert one.news() == []
    ray.asked.set_result(News([("slow", "mlflow is slow")], ("mlflow",)))
    assert (one.news(), one.news()) == (["mlflow is slow"], [])
    assert not ray.asked.done()
    # The next process says the same.
    ray.die()
    one.news()
    ray.asked.set_result(News([("slow", "mlflow is slow, too"), ("bad", "it fails")], ("mlflow",)))
    assert one.news() == ["it fails"]


def test_a_process_that_dies_is_started_again_and_given_up_at_last(ray: FakeRay, tmp_path: Path) -> None:
    one = begun(tmp_path)
    said = []
    for _ in range(MOST_STARTS):
        ray.die()
        said += one.news()
    assert len(ray.started) == MOST_STARTS
    assert said == [
        "the process of the run's listeners died and is started again",
        f"the process of the run's listeners died {MOST_STARTS} times; without it: TensorBoard, mlflow",
    ]
    one.finish("finished", lambda: None)
    assert one.news() == []


def test_deaths_that_are_far_apart_do_not_add_up(ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEADY_S", 0.0)
    one = begun(tmp_path)
    for _ in range(2 * MOST_STARTS):
        time.sleep(0.001)
        ray.die()
        one.news()
    assert len(ray.started) == 1 + 2 * MOST_STARTS


def test_the_end_waits_until_all_have_heard_of_it_even_in_another_process(ray: FakeRay, tmp_path: Path) -> None:
    one = begun(tmp_path)
    ray.die()
    left = [News([("late", "late news")], ("mlflow",)), News([], ())]

    def meanwhile() -> None:
        if left:
            ray.asked.set_result(left.pop(0))

    one.finish("stopped", meanwhile)
    assert (ray.ended, ray.killed, left) == (["stopped", "stopped"], 1, [])
    assert one.news() == ["the process of the run's listeners died and is started again", "late news"]
    one.finish("failed", meanwhile)
    assert (ray.ended, ray.killed) == (["stopped", "stopped"], 1)


def test_the_end_does_not_wait_for_ever(ray: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_S", 0.1)
    one = begun(tmp_path)
    ray.asked.set_result(News([], ("mlflow",)))
    one.finish("finished", lambda: None)
    assert ray.killed == 1
    assert one.news() == ["not done within 0 s of the run's end, and may lack some of it: mlflow"]


def test_an_overtaken_controller_ends_them_at_once_and_starts_none(ray: FakeRay, tmp_path: Path) -> None:
    one = begun(tmp_path)
    one.abandon()
    ray.die()
    assert (one.news(), ray.killed, len(ray.started)) == ([], 1, 1)
    one.finish("failed", lambda: None)
    assert (ray.ended, ray.killed) == ([], 1)


CONTROLLER = """
import json
from raytrain_plus.runs.process import this_process
print(json.dumps(this_process()), flush=True)
input()
"""
LISTENERS = """
import json, sys, time
from pathlib import Path
from raytrain_plus.controller.record.listeners_actor import ListenersActor
from tests.support.listeners import listened
folder, pid, identity = sys.argv[1:]
made = ListenersActor(listened(Path(folder)), 0, {}, None, int(pid), json.loads(identity))
print("begun", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def running(*program: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a Python program; yield it and the first line that it prints."""
    made = subprocess.Popen([sys.executable, "-c", *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with made:
        assert made.stdout is not None
        try:
            yield made, made.stdout.readline()
        finally:
            made.kill()


def test_the_process_ends_when_its_controller_is_dead(tmp_path: Path) -> None:
    with (
        running(CONTROLLER) as (controller, identity),
        running(LISTENERS, str(tmp_path), str(controller.pid), identity) as (listeners, line),
    ):
        assert line == "begun\n"
        time.sleep(2 * module.LOOK_S)
        assert listeners.poll() is None
        controller.kill()
        controller.wait()
        assert listeners.wait(20) == 0
