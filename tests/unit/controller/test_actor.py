"""Decisions that the controller makes outside the state machine."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raytrain_plus import Data, Job, Parallel, Workers
from raytrain_plus.controller.actor import Controller
from raytrain_plus.data.sight import Sight
from raytrain_plus.errors import DataChanged, InputError
from raytrain_plus.membership import events as e
from raytrain_plus.membership.group import Group, Limits, Worker
from raytrain_plus.membership.hang_detection import Pulses
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.parallel.pipeline.partition import Layer
from raytrain_plus.workers.messages import Place, Plan, Ready


def test_a_message_of_another_generation_is_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    controller = object.__new__(Controller)
    controller._group = SimpleNamespace(generation=3)  # type: ignore[assignment]
    assert not controller._stale(3, "a report from worker-1")
    assert controller._stale(2, "a report from worker-1")
    assert caplog.messages == ["refused: a report from worker-1 in generation 2; the current one is 3"]


def test_a_notice_for_a_node_without_workers_is_logged_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    controller = object.__new__(Controller)
    controller._group = SimpleNamespace(workers={})  # type: ignore[assignment]
    controller._places, controller._draining = {}, {}
    controller._noticed({"abc": None})
    assert caplog.messages == ["node abc will leave; it hosts no worker of this run"]


def fitting(room: int, cuts: tuple[int, ...]) -> Controller:
    """Return a controller that knows two workers on one machine, which share `room` bytes."""
    controller = object.__new__(Controller)
    job = Job(
        name="x",
        task="t:T",
        data=Data(path="x", batch_size=8, shards=2),
        steps=1,
        workers=Workers(min=1, max=2),
        parallel=Parallel(pipeline=2),
    )
    controller._order = SimpleNamespace(plan=SimpleNamespace(job=job))  # type: ignore[assignment]
    limits = Limits(minimum=1, maximum=2, spares=0, shards=2, steps=1, max_failures=None, expected=2, cuts=cuts)
    controller._group = Group(limits=limits, workers={"a": Worker("up"), "b": Worker("up")})
    controller._round = None
    layers = (Layer("front", 1.0, 60), Layer("back", 1.0, 50))
    ready = Ready(parameters=1, state_bytes=1, layers=layers, room=room)
    # Another worker was lost before anything began.
    controller._ready = {"a": ready, "b": ready, "lost": ready}
    controller._places = {name: Place(worker=name, pid=1, node="n", address="h") for name in controller._ready}
    return controller


def test_partitions_that_do_not_fit_are_dropped_and_the_requested_one_raises() -> None:
    controller = fitting(400, (2, 1))
    controller._look_what_fits()
    assert controller._group.limits.cuts == (2, 1)
    controller = fitting(200, (2, 1))
    controller._look_what_fits()
    assert (controller._group.limits.cuts, controller._group.limits.minimum) == ((2,), 2)
    assert controller._layers(Stage(1, 2)).chunks == (("back",),)
    controller = fitting(100, (2, 1))
    with pytest.raises(InputError, match=r"stage 0 of 2 needs 60 bytes \(the layer 'front': 60 bytes\), .* 50 bytes"):
        controller._look_what_fits()


CHANGED = DataChanged("the file changed while the run used it: it was removed", where="a.parquet")


def training() -> tuple[Controller, list[object]]:
    """Return a controller whose group trains, and the events that its state machine is fed."""
    controller = object.__new__(Controller)
    fed: list[object] = []
    controller._errors, controller._round, controller._export = {}, None, None
    controller._stopping_since = None
    limits = Limits(minimum=1, maximum=1, spares=1, shards=1, steps=1, max_failures=None, expected=1)
    controller._group = Group(limits=limits, generation=0)
    controller._journal = SimpleNamespace(opened=True)  # type: ignore[assignment]
    controller._feed = fed.append  # type: ignore[assignment, method-assign]
    controller._finish = lambda status, error, export: (status, error)  # type: ignore[assignment, method-assign, return-value]
    return controller, fed


def answered(with_: object) -> Future[object]:
    future: Future[object] = Future()
    if isinstance(with_, Exception):
        future.set_exception(with_)
    else:
        future.set_result(with_)
    return future


@pytest.mark.parametrize("heard", [Controller._rehearsed, Controller._prepared])
def test_data_that_changed_when_a_newcomer_used_it_stops_the_run_and_fails_it(heard: Callable[..., None]) -> None:
    controller, fed = training()
    heard(controller, "spare", answered(CHANGED))
    assert fed == [e.Stop()]
    for status in ("stopped", "finished"):
        controller._end(e.End(status, ""))  # type: ignore[arg-type]
        assert controller._closing is not None
        assert (controller._closing.result, controller._closing.error) == (("failed", str(CHANGED)), CHANGED)


def test_later_workers_of_a_node_get_what_its_first_worker_saw_of_the_data() -> None:
    controller, _ = training()
    controller._sights, controller._ready, controller._draining = {}, {}, {}
    controller._places = {}
    asked: list[tuple[object, ...]] = []
    controller._pool = cast(Any, Pooled(asked))
    controller._pulses = Pulses()
    controller._plan = Plan(  # type: ignore[call-arg]
        **dict.fromkeys(["job", "pickled_task", "roots", "steps", "index", "held_out", "collective", "folder"])
    )
    controller._journal = SimpleNamespace(came=lambda place: None)  # type: ignore[assignment]
    seen = [{"data": (Sight(size=1, modified_ns=time, changed_ns=time, inode=1),)} for time in (1, 2, 3)]
    told = []
    for name, node, sights in (("a", "one", seen[0]), ("b", "two", seen[1]), ("c", "one", seen[2]), ("d", "one", {})):
        controller._came(name, answered(Place(worker=name, pid=1, node=node, address="h")))
        told.append(asked[-1][1].sights)  # type: ignore[attr-defined]
        controller._prepared(name, answered(Ready(parameters=1, state_bytes=1, sights=sights)))
    assert told == [{}, {}, seen[0], seen[0]]
    assert not any(ready.sights for ready in controller._ready.values())


class Pooled(dict[str, None]):
    """A pool of four workers that records its calls."""

    def __init__(self, asked: list[tuple[object, ...]]) -> None:
        super().__init__(dict.fromkeys("abcd"))
        self._asked = asked

    def ask(self, name: str, done: object, *arguments: object) -> None:
        self._asked.append(arguments)
