"""A world of the host for tensors of a device: the order of operations, late copies, errors, and how it is left."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from raytrain_plus.collective.staged import StagedWorld
from raytrain_plus.collective.world import wait
from raytrain_plus.device_copies import HostCopies
from raytrain_plus.errors import Interrupted
from tests.late_copies import LateCopies
from tests.support.worlds import Doubling


def slower_first() -> Callable[[], float]:
    """Seconds of copies, of which the first ones take longest."""
    seconds = itertools.chain([0.2, 0.1], itertools.repeat(0.0))
    return lambda: next(seconds)


def test_operations_start_in_the_order_of_their_requests_with_complete_copies() -> None:
    inner = Doubling()
    world = StagedWorld(inner, LateCopies(slower_first())).start()
    tensors = [torch.full((3,), float(number)) for number in range(4)]
    works = [world.reduce(tensor, f"sum {number}") for number, tensor in enumerate(tensors)]
    assert inner.started == []
    wait(works, "a test", 5)
    assert inner.started == [f"sum {number}" for number in range(4)]
    assert [tensor.tolist() for tensor in tensors] == [[2.0 * number] * 3 for number in range(4)]
    world.close()
    assert inner.closed


def test_a_result_elsewhere_and_a_tensor_on_the_host() -> None:
    world = StagedWorld(Doubling(), LateCopies()).start()
    into = torch.zeros(4)
    wait([world.gather(torch.tensor([1.0, 2.0]), into, "gather")], "a test", 5)
    assert into.tolist() == [1, 2, 1, 2]
    on_host = StagedWorld(Doubling(), HostCopies(torch.device("cpu"))).start()
    tensor = torch.ones(2)
    wait([on_host.reduce(tensor, "sum")], "a test", 5)
    assert tensor.tolist() == [2, 2]


def test_what_is_sent_is_complete() -> None:
    inner = Doubling()
    world = StagedWorld(inner, LateCopies(lambda: 0.05)).start()
    world.send(torch.tensor([5.0]), 1, 7).finish("a member")
    into = torch.zeros(1)
    world.receive(into, 1, 7).finish("a member")
    assert into.tolist() == [5.0]


def test_an_error_of_the_device_ends_the_wait_and_what_follows_starts() -> None:
    class Broken(LateCopies):
        def to_host(self, tensor: torch.Tensor) -> Any:
            if tensor[0] == 13:

                def fail() -> None:
                    raise RuntimeError("an illegal memory access was encountered")

                return tensor.clone(), fail
            return super().to_host(tensor)

    world = StagedWorld(Doubling(), Broken()).start()
    bad, good = world.reduce(torch.tensor([13.0]), "bad"), world.reduce(torch.tensor([1.0]), "good")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        wait([bad], "a test", 5)
    wait([good], "a test", 5)


def test_a_world_that_is_left_starts_nothing_and_ends_every_wait() -> None:
    inner, copying = Doubling(), threading.Event()

    class Stuck(LateCopies):
        def to_host(self, tensor: torch.Tensor) -> Any:
            return tensor.clone(), lambda: copying.wait(10)

    world = StagedWorld(inner, Stuck()).start()
    works = [world.reduce(torch.ones(1), "first"), world.reduce(torch.ones(1), "second")]
    assert not works[0].ended(0.01)
    threading.Timer(0.05, copying.set).start()
    world.close()
    copying.set()
    for work in works:
        with pytest.raises(Interrupted, match="the world was left before the operation started"):
            wait([work], "a test", 5)
    assert inner.started == []
    late = world.send(torch.ones(1), 1, 7)
    with pytest.raises(Interrupted, match="the world was left before the operation started"):
        late.finish("a member")


def test_who_is_told_to_leave_does_not_wait_for_the_device() -> None:
    told, copying = threading.Event(), threading.Event()

    class Stuck(LateCopies):
        def to_host(self, tensor: torch.Tensor) -> Any:
            return tensor.clone(), lambda: copying.wait(10)

    world = StagedWorld(Doubling(), Stuck(), told.is_set).start()
    sent = world.send(torch.ones(1), 1, 7)
    threading.Timer(0.05, told.set).start()
    with pytest.raises(Interrupted, match="stopped waiting for a member"):
        sent.finish("a member")
    copying.set()
    world.close()
