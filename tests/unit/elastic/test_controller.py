"""What the controller's thin code decides by itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from raytrain_plus import Data, Job, Parallel, Workers
from raytrain_plus.elastic.controller import Controller
from raytrain_plus.elastic.group import Group, Limits, Worker
from raytrain_plus.errors import InputError
from raytrain_plus.parallel.mesh import Stage
from raytrain_plus.parallel.pipeline.cut import Layer
from raytrain_plus.workers.plan import Place, Ready


def test_a_message_of_another_generation_is_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    controller = object.__new__(Controller)
    controller._group = SimpleNamespace(generation=3)  # type: ignore[assignment]
    assert not controller._stale(3, "a report of worker-1")
    assert controller._stale(2, "a report of worker-1")
    assert caplog.messages == ["refused: a report of worker-1 in generation 2; the present one is 3"]


def test_a_notice_for_a_node_that_hosts_nobody_is_logged_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    controller = object.__new__(Controller)
    controller._group = SimpleNamespace(workers={})  # type: ignore[assignment]
    controller._places, controller._draining = {}, {}
    controller._noticed({"abc": None})
    assert caplog.messages == ["node abc, which hosts no worker of this run, will leave"]


def fitting(room: int, cuts: tuple[int, ...]) -> Controller:
    """One that has heard of two workers on one machine, which share so many bytes."""
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
    layers = (Layer("front", 1.0, 60), Layer("back", 1.0, 50))
    ready = Ready(parameters=1, state_bytes=1, layers=layers, room=room)
    # One more was lost before anything began.
    controller._ready = {"a": ready, "b": ready, "lost": ready}
    controller._places = {name: Place(worker=name, pid=1, node="n", address="h") for name in controller._ready}
    return controller


def test_cuts_that_do_not_fit_are_left_out_and_where_it_is_the_wished_one_that_is_said() -> None:
    controller = fitting(400, (2, 1))
    controller._look_what_fits()
    assert controller._group.limits.cuts == (2, 1)
    controller = fitting(200, (2, 1))
    controller._look_what_fits()
    assert (controller._group.limits.cuts, controller._group.limits.minimum) == ((2,), 2)
    assert controller._layers(Stage(1, 2)).chunks == (("back",),)
    controller = fitting(100, (2, 1))
    with pytest.raises(
        InputError, match=r"stage 0 of 2 takes 60 bytes, of which the layer 'front' 60 bytes, .* 50 bytes"
    ):
        controller._look_what_fits()
