"""A world on NCCL, with a stand-in for it: members in threads, whose device ends a sum once all have started it.

The stand-in hangs as NCCL does: whose peer is gone waits for ever, until it aborts.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raytrain_plus.collective import nccl_world
from raytrain_plus.collective.nccl_world import NcclWorld
from raytrain_plus.collective.world import wait
from raytrain_plus.errors import Interrupted
from tests.unit.training.test_synchronous import Ring, RingWorld

ID = bytes(range(128))
NAME = "the id of NCCL's members"


class Device:
    """What the members of one NCCL world share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.here: set[int] = set()
        self.started: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor, str]]] = defaultdict(dict)
        self.ended: set[int] = set()

    def start(self, number: int, rank: int, tensor: torch.Tensor, into: torch.Tensor, what: str) -> None:
        with self.changed:
            parts = self.started[number]
            parts[rank] = tensor, into, what
            if len(parts) == self.size:
                self._compute(parts)
                self.ended.add(number)
            self.changed.notify_all()

    def _compute(self, parts: dict[int, tuple[torch.Tensor, torch.Tensor, str]]) -> None:
        given = [parts[rank][0].clone() for rank in range(self.size)]
        for rank, (_, into, what) in parts.items():
            if what in ("sum", "max"):
                stacked = torch.stack(given)
                into.copy_(stacked.sum(0) if what == "sum" else stacked.amax(0))
            elif what == "gather":
                into.copy_(torch.cat(given))
            elif what == "exchange":
                into.copy_(torch.cat([one.chunk(self.size)[rank] for one in given]))
            else:
                into.copy_(torch.stack(given).sum(0).chunk(self.size)[rank])


class StandIn:
    """A member's part in the stand-in; `fails_after` so many operations NCCL reports an error."""

    def __init__(self, device: Device, rank: int, fails_after: int | None) -> None:
        self.device, self.rank, self.fails_after = device, rank, fails_after
        self.count = 0
        self.aborted = 0
        self.used: list[Any] = []
        with device.changed:
            device.here.add(rank)

    def state(self) -> Any:
        if self.aborted or (self.fails_after is not None and self.count > self.fails_after):
            return "failed"
        return "ready" if len(self.device.here) == self.device.size else "under way"

    def why(self) -> str:
        return "unhandled system error"

    def reduce(self, tensor: torch.Tensor, operation: str) -> None:
        self._start(tensor, tensor, operation)

    def gather(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        self._start(tensor, into, "gather")

    def exchange(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        self._start(tensor, into, "exchange")

    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        self._start(tensor, into, "scatter")

    def _start(self, tensor: torch.Tensor, into: torch.Tensor, what: str) -> None:
        self.device.start(self.count, self.rank, tensor, into, what)
        self.count += 1

    def mark(self) -> Any:
        number, device = self.count - 1, self.device

        class At:
            def query(self) -> bool:
                return number in device.ended

        return At()

    def use(self, event: Any) -> None:
        self.used.append(event)

    def abort(self) -> None:
        self.aborted += 1


class Library:
    def __init__(self, device: Device, fails_after: int | None = None) -> None:
        self.device, self.fails_after = device, fails_after
        self.made: list[StandIn] = []
        self.ids: list[bytes] = []
        self.slow: threading.Event | None = None

    def new_id(self) -> bytes:
        return ID

    def begin(self, shared_id: bytes, rank: int, size: int) -> Any:
        self.ids.append(shared_id)
        if self.slow is not None:
            self.slow.wait(5)
        self.made.append(StandIn(self.device, rank, self.fails_after))
        return self.made[-1]


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of floating numbers count as those of the device."""
    monkeypatch.setattr(nccl_world, "_on_host", lambda tensor: not tensor.is_floating_point())


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
        world = NcclWorld(RingWorld(rank, ring), Library(device, **changes), 5, lambda: False)
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
        switched(NcclWorld(RingWorld(rank, ring), library, 5, lambda: False)).close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(member, range(2)))
    assert [one.ids for one in made] == [[ID]] * 2
    assert [one.made[0].aborted for one in made] == [1, 1]


def test_the_other_world_sums_until_all_use_nccl() -> None:
    def each(rank: int) -> list[Any]:
        library = Library(device)
        library.slow = gate
        world = NcclWorld(RingWorld(rank, ring), library, 5, lambda: False)
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
    assert len(device.ended) == 1


def test_a_member_whose_peer_is_gone_leaves_when_it_is_told_to() -> None:
    told = threading.Event()
    ring, device = Ring(2), Device(2)

    def survivor() -> str:
        world = switched(NcclWorld(RingWorld(0, ring), Library(device), 5, told.is_set))
        work = world.reduce(torch.ones(3), "gradients")
        start = time.monotonic()
        threading.Timer(0.2, told.set).start()
        with pytest.raises(Interrupted, match="stopped waiting for the sums"):
            wait([work], "the sums", 5, told.is_set)
        assert time.monotonic() - start < 0.4
        world.close()
        return "left"

    def dies() -> None:
        NcclWorld(RingWorld(1, ring), Library(device), 5, lambda: False)

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

    assert together(2, each, fails_after=0) == ["told", ""]


def test_a_peer_that_dies_while_nccl_forms(caplog: pytest.LogCaptureFixture) -> None:
    """Its id has come, itself does not: the other world goes on, and nothing is left when that is left."""
    device, library, ring = Device(2), Library(Device(2)), Ring(2)
    library.device = device
    with ThreadPoolExecutor(1) as pool:
        dies = pool.submit(lambda: RingWorld(1, ring).reduce(torch.zeros(128, dtype=torch.int64), NAME))
        world = NcclWorld(RingWorld(0, ring), library, 0.1, lambda: False)
        dies.result()
    time.sleep(0.3)
    assert world.forming
    assert (
        "NCCL did not form; sums stay in the host's memory: stopped waiting for NCCL to form, after 0.1 s"
        in caplog.text
    )
    assert library.made[0].aborted == 1
    world.close()
    assert world.forming


def test_a_world_that_is_left_while_nccl_forms_aborts_it() -> None:
    device, ring = Device(2), Ring(2)
    library = Library(device)
    with ThreadPoolExecutor(1) as pool:
        dies = pool.submit(lambda: RingWorld(1, ring).reduce(torch.zeros(128, dtype=torch.int64), NAME))
        world = NcclWorld(RingWorld(0, ring), library, 60, lambda: False)
        dies.result()
    start = time.monotonic()
    world.close()
    assert time.monotonic() - start < 1
    assert library.made[0].aborted == 1


def test_who_is_told_to_leave_before_the_id_has_come_leaves_the_other_world() -> None:
    closed = threading.Event()
    host = RingWorld(1, Ring(2))
    host.close = closed.set  # type: ignore[method-assign]
    with pytest.raises(Interrupted, match="the id of NCCL's members"):
        NcclWorld(host, Library(Device(2)), 5, lambda: True)
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
        world = switched(NcclWorld(host, library, 5, lambda: False))

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
        world = switched(NcclWorld(RingWorld(rank, ring), library, 5, lambda: False))
        library.made[0].abort = lambda: hangs.wait(5)  # type: ignore[method-assign,assignment,return-value]
        start = time.monotonic()
        world.close()
        return time.monotonic() - start

    with ThreadPoolExecutor(2) as pool:
        assert max(pool.map(member, range(2))) < 1
    hangs.set()


def test_nccl_reports_its_state_as_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    reports = iter([7, 0, 6])
    communicator = SimpleNamespace(get_async_error=lambda: next(reports), get_last_error=lambda: "remote error")
    found = nccl_world._OnGpu(None, communicator, torch.device("cuda", 0))
    assert [found.state() for _ in range(3)] == ["under way", "ready", "failed"]
    assert found.why() == "remote error"
