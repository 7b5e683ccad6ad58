"""A world on NCCL, with a stand-in for it: members in threads, whose device ends a sum once all have started it.

The stand-in hangs as NCCL does: whose peer is gone waits for ever, until it aborts.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from raytrain_plus.collective import nccl_world
from raytrain_plus.collective.nccl_world import NcclWorld
from raytrain_plus.collective.world import wait
from raytrain_plus.errors import Interrupted
from tests.unit.training.test_synchronous import Ring, RingWorld

ID = bytes(range(128))


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

    def new_id(self) -> bytes:
        return ID

    def begin(self, shared_id: bytes, rank: int, size: int) -> Any:
        self.ids.append(shared_id)
        self.made.append(StandIn(self.device, rank, self.fails_after))
        return self.made[-1]


@pytest.fixture(autouse=True)
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of floating numbers count as those of the device."""
    monkeypatch.setattr(nccl_world, "_on_host", lambda tensor: not tensor.is_floating_point())


def together(size: int, each: Callable[[NcclWorld], Any], **changes: Any) -> list[Any]:
    """What each member's work returns, in a world of so many."""
    ring, device = Ring(size), Device(size)

    def member(rank: int) -> Any:
        world = NcclWorld(RingWorld(rank, ring), Library(device, **changes), 5)
        try:
            return each(world)
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
        NcclWorld(RingWorld(rank, ring), library, 5).close()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(member, range(2)))
    assert [one.ids for one in made] == [[ID]] * 2
    assert [one.made[0].aborted for one in made] == [1, 1]


def test_a_member_whose_peer_is_gone_leaves_when_it_is_told_to() -> None:
    told = threading.Event()
    ring, device = Ring(2), Device(2)

    def survivor() -> str:
        world = NcclWorld(RingWorld(0, ring), Library(device), 5)
        work = world.reduce(torch.ones(3), "gradients")
        start = time.monotonic()
        threading.Timer(0.2, told.set).start()
        with pytest.raises(Interrupted, match="stopped waiting for the sums"):
            wait([work], "the sums", 5, told.is_set)
        assert time.monotonic() - start < 0.4
        world.close()
        return "left"

    def dies() -> None:
        NcclWorld(RingWorld(1, ring), Library(device), 5)

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


@pytest.mark.parametrize(("limit_s", "told", "said"), [(0.1, False, "after 0.1 s"), (5, True, "NCCL to form")])
def test_a_peer_that_dies_while_nccl_forms(limit_s: float, told: bool, said: str) -> None:
    """Its id has come, itself does not: the others leave and close the world of the host."""
    ring, device, library = Ring(2), Device(2), Library(Device(2))
    library.device = device
    host = RingWorld(0, ring)
    closed = threading.Event()
    host.close = closed.set  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as pool:
        dies = pool.submit(
            lambda: RingWorld(1, ring).reduce(torch.zeros(128, dtype=torch.int64), "the id of NCCL's members")
        )
        formed = time.monotonic() + 0.1
        interrupted: Callable[[], bool] = (lambda: time.monotonic() > formed) if told else lambda: False
        with pytest.raises(Interrupted, match=said):
            NcclWorld(host, library, limit_s, interrupted)
        dies.result()
    assert closed.is_set()
    assert library.made[0].aborted == 1


def test_an_operation_that_cannot_start_interrupts() -> None:
    def each(world: NcclWorld) -> str:
        def fails(*_: Any) -> None:
            raise RuntimeError("ncclInvalidUsage")

        world._made.reduce = fails  # type: ignore[method-assign]
        with pytest.raises(Interrupted, match=r"cannot start the collective of gradients: ncclInvalidUsage"):
            world.reduce(torch.ones(1), "gradients")
        return "told"

    assert together(2, each) == ["told"] * 2
