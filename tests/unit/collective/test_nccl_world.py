"""A world on NCCL, with a stand-in for it: members in threads, whose device ends a sum once all have started it.

The stand-in hangs as NCCL does: whose peer is gone waits for ever, until it aborts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytrain_plus.collective import nccl, nccl_world
from raytrain_plus.collective.nccl_forming import NAME
from raytrain_plus.collective.nccl_world import NcclWorld
from raytrain_plus.collective.world import wait
from raytrain_plus.errors import Interrupted
from tests.support.stages import Ring, RingWorld
from tests.unit.collective.stand_in_nccl import ID, Device, Library

FIRST_USES = 8
"""Operations by which members connect as they form."""


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of floating numbers count as those of the device."""
    monkeypatch.setattr(nccl_world, "on_host", lambda tensor: not tensor.is_floating_point())


def switched(world: NcclWorld) -> NcclWorld:
    """The world, once NCCL has formed and is used."""
    until = time.monotonic() + 5
    while world.forming:
        assert time.monotonic() < until
        time.sleep(0.001)
    world.use_formed()
    return world


def together(size: int, each: Callable[[NcclWorld], Any], **changes: Any) -> list[Any]:
    """What each member's work returns, in a world of so many."""
    ring, device = Ring(size), Device(size)

    def member(rank: int) -> Any:
        world = NcclWorld(RingWorld(rank, ring), 5, lambda: False).join(Library(device, **changes))
        try:
            return each(switched(world))
        finally:
            world.close()

    with ThreadPoolExecutor(size) as pool:
        return [one.result() for one in [pool.submit(member, rank) for rank in range(size)]]


def test_the_contract_of_worlds() -> None:
    def each(world: NcclWorld) -> Any:
        rank, size = world.rank, world.size
        total, most = torch.full((4,), rank + 1.0), torch.full((4,), rank + 1.0)
        into, parts, own = torch.empty(2 * size), torch.empty(size), torch.empty(2)
        counted = torch.tensor([rank])
        works = [
            world.reduce(total, "sum"),
            world.reduce(most, "max", "max"),
            world.reduce(counted, "a sum of the host"),
            world.gather(torch.tensor([rank, rank + 0.5]), into, "gather"),
            world.exchange(torch.arange(float(size)) + 10 * rank, parts, "exchange"),
            world.reduce_scatter(torch.arange(2.0 * size), own, "scatter"),
        ]
        wait(works, "a test", 5)
        return [one.tolist() for one in (total, most, counted, into, parts, own)]

    found = together(3, each)
    for rank, (total, most, counted, into, parts, own) in enumerate(found):
        assert (total, most, counted) == ([6.0] * 4, [3.0] * 4, [3])
        assert into == [0, 0.5, 1, 1.5, 2, 2.5]
        assert parts == [rank, 10 + rank, 20 + rank]
        assert own == [3 * 2 * rank, 3 * (2 * rank + 1)]


def test_all_members_have_the_id_of_the_first_one_and_abort() -> None:
    made: list[Library] = []
    ring, device = Ring(2), Device(2)

    def member(rank: int) -> None:
        library = Library(device)
        made.append(library)
        switched(NcclWorld(RingWorld(rank, ring), 5, lambda: False).join(library)).close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(member, range(2)))
    assert [one.ids for one in made] == [[ID]] * 2
    assert [one.made[0].aborted for one in made] == [1, 1]


def test_the_other_world_sums_until_all_use_nccl() -> None:
    def each(rank: int) -> list[Any]:
        library = Library(device)
        library.slow = gate
        world = NcclWorld(RingWorld(rank, ring), 5, lambda: False).join(library)
        tensor = torch.ones(2)
        wait([world.reduce(tensor, "before")], "a test", 5)
        found = [world.forming, tensor.tolist(), dict(device.started)]
        looked.wait()
        gate.set()
        wait([switched(world).reduce(tensor, "after")], "a test", 5)
        world.close()
        return [*found, world.forming, tensor.tolist()]

    ring, device, gate, looked = Ring(2), Device(2), threading.Event(), threading.Barrier(2, timeout=5)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(each, range(2)))
    assert found == [[True, [2.0, 2.0], {}, False, [4.0, 4.0]]] * 2
    assert len(device.ended) == FIRST_USES + 1


def test_a_member_whose_peer_is_gone_leaves_when_it_is_told_to() -> None:
    told = threading.Event()
    ring, device = Ring(2), Device(2)

    def survivor() -> str:
        world = switched(NcclWorld(RingWorld(0, ring), 5, told.is_set).join(Library(device)))
        work = world.reduce(torch.ones(3), "gradients")
        start = time.monotonic()
        threading.Timer(0.2, told.set).start()
        with pytest.raises(Interrupted, match="stopped waiting for the sums"):
            wait([work], "the sums", 5, told.is_set)
        assert time.monotonic() - start < 0.4
        world.close()
        return "left"

    def dies() -> None:
        NcclWorld(RingWorld(1, ring), 5, lambda: False).join(Library(device))

    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(survivor)
        pool.submit(dies).result()
        assert waiting.result() == "left"


def test_an_error_that_nccl_reports_ends_the_wait() -> None:
    def each(world: NcclWorld) -> str:
        if world.rank:
            return ""
        with pytest.raises(Interrupted, match=r"gradients.*unhandled system error"):
            wait([world.reduce(torch.ones(3), "gradients")], "a test", 5)
        return "told"

    assert together(2, each, fails_after=FIRST_USES) == ["told", ""]


def test_a_peer_that_dies_while_nccl_forms() -> None:
    """Its id has come, itself does not: the other world goes on, and nothing is left when that is left."""
    device, library, ring = Device(2), Library(Device(2)), Ring(2)
    library.device = device
    with ThreadPoolExecutor(1) as pool:
        dies = pool.submit(lambda: RingWorld(1, ring).reduce(torch.zeros(2, 1, 16, dtype=torch.int64), NAME))
        world = NcclWorld(RingWorld(0, ring), 0.1, lambda: False).join(library)
        dies.result()
    time.sleep(0.3)
    assert world.forming
    assert world.why_never == "stopped waiting for NCCL to form, after 0.1 s"
    assert library.made[0].aborted == 1
    world.close()
    assert world.forming


def test_a_world_that_is_left_while_nccl_forms_aborts_it() -> None:
    device, ring = Device(2), Ring(2)
    library = Library(device)
    with ThreadPoolExecutor(1) as pool:
        dies = pool.submit(lambda: RingWorld(1, ring).reduce(torch.zeros(2, 1, 16, dtype=torch.int64), NAME))
        world = NcclWorld(RingWorld(0, ring), 60, lambda: False).join(library)
        dies.result()
    start = time.monotonic()
    world.close()
    assert time.monotonic() - start < 1
    assert library.made[0].aborted == 1


def test_who_is_told_to_leave_before_the_id_has_come_leaves_the_other_world() -> None:
    closed = threading.Event()
    host = RingWorld(1, Ring(2))
    host.close = closed.set  # type: ignore[method-assign]
    with pytest.raises(Interrupted, match="the ids of NCCL's members"):
        NcclWorld(host, 5, lambda: True).join(Library(Device(2)))
    assert closed.is_set()


def test_an_operation_that_cannot_start_interrupts() -> None:
    def each(world: NcclWorld) -> str:
        def fails(*_: Any) -> None:
            raise RuntimeError("ncclInvalidUsage")

        assert world._uses is not None
        world._uses.reduce = fails  # type: ignore[method-assign]
        with pytest.raises(Interrupted, match=r"cannot start the collective of gradients: ncclInvalidUsage"):
            world.reduce(torch.ones(1), "gradients")
        return "told"

    assert together(2, each) == ["told"] * 2


def test_a_gpu_that_has_failed_is_no_interrupt() -> None:
    def each(world: NcclWorld) -> str:
        def fails(*_: Any) -> None:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

        assert world._uses is not None
        world._uses.reduce = fails  # type: ignore[method-assign]
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            world.reduce(torch.ones(1), "gradients")
        return "told"

    assert together(2, each) == ["told"] * 2


def test_a_communicator_that_cannot_be_aborted_keeps_nobody_in_the_other_world() -> None:
    ring, device, closed = Ring(2), Device(2), []

    def member(rank: int) -> None:
        host = RingWorld(rank, ring)
        host.close = lambda: closed.append(rank)  # type: ignore[method-assign]
        library = Library(device)
        world = switched(NcclWorld(host, 5, lambda: False).join(library))

        def fails() -> None:
            raise RuntimeError("ncclSystemError")

        library.made[0].abort = fails  # type: ignore[method-assign]
        world.close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(member, range(2)))
    assert sorted(closed) == [0, 1]


def test_an_abort_that_hangs_keeps_nobody_in_the_other_world() -> None:
    ring, device, hangs = Ring(2), Device(2), threading.Event()

    def member(rank: int) -> float:
        library = Library(device)
        world = switched(NcclWorld(RingWorld(rank, ring), 5, lambda: False).join(library))
        library.made[0].abort = lambda: hangs.wait(5)  # type: ignore[method-assign,assignment,return-value]
        start = time.monotonic()
        world.close()
        return time.monotonic() - start

    with ThreadPoolExecutor(2) as pool:
        assert max(pool.map(member, range(2))) < 1
    hangs.set()


def test_nccl_reports_its_state_as_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(query=lambda: True))
    reports = iter([7, 0, 6])
    communicator = SimpleNamespace(get_async_error=lambda: next(reports), get_last_error=lambda: "remote error")
    found = nccl._OnGpu(None, communicator, 0, torch.device("cuda", 0))
    assert [found.state() for _ in range(3)] == ["under way", "ready", "failed"]
    assert found.why() == "remote error"


def test_a_gpu_that_has_failed_is_seen_when_nccl_refuses_an_operation() -> None:
    """NCCL says only that CUDA has raised an error; the GPU, when it is asked, says which."""

    def each(world: NcclWorld) -> str:
        def fails(*_: Any) -> None:
            raise RuntimeError("ncclUnhandledCudaError")

        def says() -> str:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")

        assert world._uses is not None
        world._uses.reduce, world._uses.why = fails, says  # type: ignore[method-assign]
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            world.reduce(torch.ones(1), "gradients")
        return "told"

    assert together(2, each) == ["told"] * 2


def test_without_an_id_nccl_never_forms() -> None:
    ring, device = Ring(2), Device(2)

    def member(rank: int) -> tuple[bool, str]:
        def fails() -> bytes:
            raise RuntimeError("no socket interface found")

        library = Library(device)
        library.new_id = fails  # type: ignore[method-assign]
        world = NcclWorld(RingWorld(rank, ring), 5, lambda: False).join(library)
        until = time.monotonic() + 5
        while not world.why_never and time.monotonic() < until:
            time.sleep(0.001)
        found = world.forming, world.why_never
        world.close()
        return found

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(member, range(2)))
    assert found == [(True, "a worker could not give NCCL's members an id")] * 2
