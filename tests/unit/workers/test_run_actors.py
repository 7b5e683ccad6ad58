"""Questions to the actors of a run's workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from raytrain_plus.workers import run_actors as module
from raytrain_plus.workers.run_actors import WRITE_S, hear, leave, wait_for_writers


def worker(answer: Any) -> Any:
    return SimpleNamespace(hears=SimpleNamespace(remote=lambda: answer))


def get(answer: Any) -> bool:
    if answer == "dead":
        raise ActorDiedError
    return bool(answer)


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([], False),
        ([False, False], False),
        ([False, True], True),
        (["dead", True], True),
        (["dead", False], False),
        (["late"], False),
    ],
)
def test_one_worker_that_hears_a_controller_is_enough(
    monkeypatch: pytest.MonkeyPatch, answers: list[Any], found: bool
) -> None:
    def wait(asked: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert num_returns == len(asked)
        return [one for one in asked if one != "late"], []

    monkeypatch.setattr(module, "ray", SimpleNamespace(wait=wait, get=get))
    assert hear([worker(answer) for answer in answers]) == found


@pytest.mark.parametrize(("still", "waited_s"), [(False, 2000), (True, WRITE_S)])
def test_workers_that_write_are_waited_for_while_there_is_progress(
    monkeypatch: pytest.MonkeyPatch, still: bool, waited_s: float
) -> None:
    now = [0.0]

    def wait(limit_s: float) -> bool:
        now[0] += limit_s
        return now[0] >= 2000

    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    wait_for_writers(wait, lambda: None if still else int(now[0] / 200))
    assert now == [waited_s]


class Writer:
    """An actor of a worker whose calls are named by itself and what was called."""

    def __init__(self, name: str) -> None:
        self.respond, self.leave, self.call = (
            SimpleNamespace(remote=lambda *_, what=what: (name, what)) for what in ("respond", "leave", "call")
        )


def test_only_workers_that_respond_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, looks = {("a", "respond"), ("b", "respond"), ("a", "call"), ("b", "call"), ("a", "leave")}, list[Any]()

    def wait(asked: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        looks.append(asked)
        if len(looks) > 6:
            ended.add(("b", "leave"))
        return [one for one in asked if one in ended], []

    monkeypatch.setattr(module, "ray", SimpleNamespace(wait=wait, get=lambda one: one))
    leave([Writer("a"), Writer("b"), Writer("stopped")])
    assert looks[0] == [("a", "respond"), ("b", "respond"), ("stopped", "respond")]
    assert [("a", "leave"), ("b", "leave")] in looks
    # The one that is ready is not asked again.
    assert looks[-1] == [("b", "leave")]
