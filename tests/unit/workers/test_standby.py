"""Standbys: where they wait, and what becomes of them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

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
        self.live, self.load = Method(), Method()

    def die(self) -> None:
        self.live.answer.set_exception(RuntimeError("gone"))


def kept() -> tuple[Standbys, list[Actor], list[Actor]]:
    """Return standbys, the actors started so far, and those ended so far."""
    started: list[Actor] = []
    ended: list[Actor] = []

    def start(node: str) -> Actor:
        started.append(Actor(node))
        return started[-1]

    return Standbys(start, ended.append, IMPORTS), started, ended


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


def test_one_that_is_taken_is_not_ended_and_is_replaced() -> None:
    standbys, started, ended = kept()
    standbys.keep(["x"])
    assert standbys.take("x") is started[0]
    assert not standbys.waits("x")
    standbys.keep(["x"])
    assert len(started) == 2
    assert not ended
