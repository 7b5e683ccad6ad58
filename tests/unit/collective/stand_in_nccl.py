"""A stand-in for NCCL: members in threads, whose device ends an operation once all have started it.

It hangs as NCCL does: whose peer is gone waits for ever, until it aborts. Two members that send to each other must
start in the same order, or wait for each other: an operation ends only once all before it have ended.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

import torch

ID = bytes(range(128))


class Device:
    """The device that the members of one NCCL world share."""

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
            elif what == "send":
                [receiver] = (one for one, _, kind in parts.values() if kind == "receive")
                receiver.copy_(into)
            elif what == "receive":
                pass
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

    def send(self, tensor: torch.Tensor) -> None:
        self._start(tensor, tensor, "send")

    def receive(self, into: torch.Tensor) -> None:
        self._start(into, into, "receive")

    def room(self, length: int) -> torch.Tensor:
        return torch.full((length,), 77, dtype=torch.uint8)

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


class Links:
    """Makes communicators of two members, each with a device of its own, for members that share it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.made: list[StandIn] = []
        self._devices: dict[bytes, Device] = {}
        self.broken: set[int] = set()
        """The members that none of theirs form on."""

    def of(self, member: int) -> LinksOf:
        return LinksOf(self, member)

    def device(self, shared_id: bytes) -> Device:
        with self.changed:
            return self._devices.setdefault(shared_id, Device(2))


class LinksOf:
    """The `Library` of one member."""

    def __init__(self, links: Links, member: int) -> None:
        self._links, self._member, self._ids = links, member, 0

    def new_id(self) -> bytes:
        self._ids += 1
        return bytes([1 + self._member, self._ids]) + bytes(126)

    def begin(self, shared_id: bytes, rank: int, size: int) -> Any:
        assert size == 2
        if self._member in self._links.broken:
            raise RuntimeError("ncclSystemError")
        made = StandIn(self._links.device(shared_id), rank, None)
        self._links.made.append(made)
        return made
