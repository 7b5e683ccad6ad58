"""Standbys: where they wait, and what becomes of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from raytrain_plus.membership.timeouts import ANSWER_S, LOAD_S
from raytrain_plus.workers.imports import Imports
from raytrain_plus.workers.standby import Standbys

IMPORTS = Imports(("json",), (".",))


class Method:
    """A method of an actor, whose calls are recorded."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answer: Future[Any] = Future()

    def remote(self, *arguments: Any) -> Method:
        self.calls.append(arguments)
        return self

    def future(self) -> Future[Any]:
        return self.answer


class Actor:
    def __init__(self, node: str) -> None:
        self.node = node
        self.live, self.load, self.respond = Method(), Method(), Method()

    def die(self) -> None:
        self.live.answer.set_exception(RuntimeError("gone"))


def kept(clock: Callable[[], float] = time.monotonic) -> tuple[Standbys, list[Actor], list[Actor]]:
    """Return standbys, the actors started so far, and those ended so far."""
    started: list[Actor] = []
    ended: list[Actor] = []

    def start(node: str) -> tuple[Actor, Future[Any]]:
        started.append(Actor(node))
        return started[-1], started[-1].live.answer

    return Standbys(start, ended.append, IMPORTS, clock), started, ended


def test_each_node_has_one_that_imports_what_a_worker_needs() -> None:
    standbys, started, ended = kept()
    standbys.keep(["x", "y"])
    standbys.keep(["x", "y"])
    assert [actor.node for actor in started] == ["x", "y"]
    assert [actor.load.calls for actor in started] == [[(IMPORTS,)]] * 2
    assert standbys.waits("x")
    assert not standbys.waits("z")
    assert not ended


def test_a_node_that_is_left_keeps_none() -> None:
    standbys, started, ended = kept()
    standbys.keep(["x", "y"])
    standbys.keep(["y"])
    assert ended == started[:1]
    assert not standbys.waits("x")
    standbys.close()
    assert ended == started


def test_one_that_died_is_not_taken_and_is_replaced() -> None:
    standbys, started, _ = kept()
    standbys.keep(["x"])
    started[0].die()
    assert not standbys.waits("x")
    standbys.keep(["x"])
    assert standbys.waits("x")
    assert len(started) == 2


def taken(standbys: Standbys) -> Actor | None:
    standby = standbys.take("x")
    return None if standby is None else standby.actor


@pytest.mark.parametrize("answers", [True, False])
def test_one_that_has_imported_all_is_asked_and_ended_if_it_does_not_answer(answers: bool) -> None:
    now = 0.0
    standbys, started, ended = kept(lambda: now)
    standbys.keep(["x"])
    started[0].load.answer.set_result(None)
    now = 1000.0
    assert standbys.waits("x")
    standbys.ask("x")
    now += 0.5
    standbys.ask("x")
    assert len(started[0].respond.calls) == 1
    if answers:
        started[0].respond.answer.set_result(None)
    now += ANSWER_S - 0.5
    assert standbys.waits("x") == answers
    assert taken(standbys) is (started[0] if answers else None)
    assert ended == ([] if answers else started)
    assert not standbys.waits("x")


def test_one_that_does_not_respond_is_replaced() -> None:
    now = 0.0
    standbys, started, ended = kept(lambda: now)
    standbys.keep(["x"])
    started[0].load.answer.set_result(None)
    standbys.ask("x")
    now = ANSWER_S
    standbys.keep(["x"])
    assert (ended, len(started)) == (started[:1], 2)


def test_one_that_imports_is_not_asked_and_has_the_limit_of_its_start() -> None:
    now = 0.0
    standbys, started, ended = kept(lambda: now)
    standbys.keep(["x"])
    now = LOAD_S - 1
    standbys.ask("x")
    assert not started[0].respond.calls
    assert standbys.waits("x")
    now = LOAD_S
    assert not standbys.waits("x")
    assert taken(standbys) is None
    assert ended == started


def test_one_that_is_taken_while_it_owes_an_answer_has_the_rest_of_its_time() -> None:
    now = 0.0
    standbys, started, _ = kept(lambda: now)
    standbys.keep(["x"])
    started[0].load.answer.set_result(None)
    standbys.ask("x")
    now = 0.25
    standby = standbys.take("x")
    assert standby is not None
    assert standby.left_s(now) == ANSWER_S - 0.25
    started[0].respond.answer.set_result(None)
    assert standby.left_s(1e9) == float("inf")


def test_one_that_is_taken_is_not_ended_and_is_replaced() -> None:
    standbys, started, ended = kept()
    standbys.keep(["x"])
    assert taken(standbys) is started[0]
    assert not standbys.waits("x")
    standbys.keep(["x"])
    assert len(started) == 2
    assert not ended
