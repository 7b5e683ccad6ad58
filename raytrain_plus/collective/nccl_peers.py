"""The workers of a model replica, which send one another the tensors of their GPUs by NCCL: `transport.Peers`.

NCCL matches what one member sends and another receives by their order alone, and a send occupies its communicator until
its receiver has taken it. So each direction of each pair that exchanges tensors has a communicator of its own, a link.
The sender announces the tag and the length of each tensor in the world of the host, in the same order. A receiver that
waits for one tensor takes all that were sent before it, too: each into its place, or into memory of its own until
somebody asks for it. So no order of sending and receiving can make two members wait for each other.

Until all links have formed on all members, everything passes through the host's memory; see `World.forming`.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import Self, override

from raytrain_plus.collective.nccl import Communicator, Event, Library, as_bytes, on_host, reached, settle, started
from raytrain_plus.collective.nccl_forming import Forming, Wanted, new_id, shared_ids
from raytrain_plus.collective.world import LOOK_S, SwitchableTransport, Transfer
from raytrain_plus.errors import Interrupted

ANNOUNCED = (1 << 31) - 1
"""The tag of announcements; those of transfers are smaller (`transport`)."""
Direction = tuple[int, int]
"""Who sends to whom, by rank."""


class NcclPeers(SwitchableTransport):
    """See the module docstring."""

    def __init__(
        self,
        host: Any,
        directions: Iterable[Direction],
        limit_s: float,
        interrupted: Callable[[], bool],
    ) -> None:
        """Prepare links in these directions, the same on all members.

        `host`: a world with `send` and `receive`, left with this one. `limit_s`: that of each wait. `interrupted`:
        whether this member is to leave.
        """
        self.rank: int = host.rank
        self.size: int = host.size
        self._host = host
        self._limit_s = limit_s
        self._interrupted = interrupted
        self._own = [one for one in sorted(set(directions)) if self.rank in one]
        self._bytes: list[torch.Tensor] = []
        """The first byte of each link."""
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._forming: Forming
        """Since `join`."""

    def join(self, library: Library) -> Self:
        """Begin to form the links; return this world.

        Raises `Interrupted` if a member does not answer in time, or if this one is to leave; `host` is left then.
        """
        to = {receiver for sender, receiver in self._own if sender == self.rank}
        own = [new_id(library) if rank in to else b"" for rank in range(self.size)]
        ids = shared_ids(self._host, own, self._limit_s, self._interrupted)
        wanted = [Wanted(ids[sender][receiver], int(receiver == self.rank), 2) for sender, receiver in self._own]
        self._forming = Forming(library, wanted, self._limit_s, self._connect).start()
        return self

    def _connect(self, formed: Sequence[Communicator], left: Callable[[], bool]) -> None:
        """Send a byte over each link: NCCL connects two members at their first transfer, and waits for both."""
        for (sender, _), one in zip(self._own, formed, strict=True):
            byte = one.room(1)
            # Its memory may not be used for anything else before NCCL has, which begins once the other one is there.
            self._bytes.append(byte)
            if sender == self.rank:
                one.send(byte)
            else:
                one.receive(byte)
        for one in formed:
            settle(one, "NCCL to connect two workers", self._limit_s, left)

    @property
    @override
    def forming(self) -> bool:
        return bool(self._own) and not self.switched and not self._forming.ended

    @property
    @override
    def switched(self) -> bool:
        return bool(self._outgoing or self._incoming)

    @property
    @override
    def why_never(self) -> str:
        return self._forming.failure

    def use_formed(self) -> None:
        """See `World`. Nothing may be on its way."""
        if self.switched or not self._own:
            return
        for (sender, receiver), one in zip(self._own, self._forming.communicators(), strict=True):
            link = _Link(one, self._limit_s, self._interrupted)
            if sender == self.rank:
                self._outgoing[receiver] = _Outgoing(self._host, receiver, link)
            else:
                self._incoming[sender] = _Incoming(self._host, sender, link)

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Transfer:
        """Start to send a contiguous tensor; it must not change until it is sent."""
        link = None if _by_host(tensor) else self._outgoing.get(to)
        sent: Transfer = self._host.send(tensor, to, tag) if link is None else link.send(tensor, tag)
        return sent

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Transfer:
        """Start to receive into a contiguous tensor."""
        link = None if _by_host(tensor) else self._incoming.get(source)
        received: Transfer = self._host.receive(tensor, source, tag) if link is None else link.receive(tensor, tag)
        return received

    @override
    def begin_to_leave(self) -> None:
        self._forming.begin_to_leave()

    def close(self) -> None:
        """Abort the links and leave the world of the host."""
        self._forming.leave()
        self._host.close()


def _by_host(tensor: torch.Tensor) -> bool:
    return on_host(tensor) or not tensor.numel()


@dataclass(frozen=True, slots=True)
class _Link:
    """A direction of a pair, and how a member waits for it."""

    communicator: Communicator
    limit_s: float
    interrupted: Callable[[], bool]

    def start(self, start: Callable[[], None], what: str) -> Event:
        """Start an operation; see `nccl.started`."""
        return started(self.communicator, start, what, self.limit_s, self.interrupted)

    def end(self, event: Event, what: str) -> None:
        """Wait until the device has come so far. Raises `Interrupted` if it does not."""
        begun = time.monotonic()
        while not reached(self.communicator, event, what, LOOK_S):
            if self.interrupted():
                raise Interrupted(f"stopped waiting for {what}")
            if time.monotonic() - begun > self.limit_s:
                raise Interrupted(f"stopped waiting for {what}, after {self.limit_s:g} s")


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """A link to another member."""

    host: Any
    to: int
    link: _Link

    def send(self, tensor: torch.Tensor, tag: int) -> Transfer:
        data = as_bytes(tensor)
        event = self.link.start(lambda: self.link.communicator.send(data), f"the transfer to member {self.to}")
        announcement = torch.tensor([tag, data.numel()])
        announced = self.host.send(announcement, self.to, ANNOUNCED)
        return _Sent(self.link, event, announced, announcement)


@dataclass(frozen=True, slots=True)
class _Sent:
    link: _Link
    event: Event
    announced: Transfer
    announcement: torch.Tensor
    """It is read until it has arrived."""

    def finish(self, what: str) -> None:
        self.announced.finish(what)
        self.link.end(self.event, what)


class _Incoming:
    """A link from another member."""

    def __init__(self, host: Any, source: int, link: _Link) -> None:
        self._host = host
        self._source = source
        self.link = link
        self._expected: dict[int, deque[_Received]] = defaultdict(deque)
        """Tag -> the transfers that are not announced yet, in order."""
        self._early: dict[int, deque[tuple[torch.Tensor, Event]]] = defaultdict(deque)
        """Tag -> the tensors that came before anybody asked for them, in order."""
        self._announcements: deque[tuple[torch.Tensor, Transfer]] = deque()
        """The announcements that are on their way, in order."""

    def receive(self, tensor: torch.Tensor, tag: int) -> Transfer:
        received = _Received(self, tensor)
        if early := self._early[tag]:
            received.kept, received.event = early.popleft()
        else:
            self._expected[tag].append(received)
            self._await_announcement()
        return received

    def take_next(self, what: str) -> None:
        """Start to take the tensor that is announced next, into the memory of who expects it, if anybody does."""
        if not self._announcements:
            self._await_announcement()
        announcement, coming = self._announcements.popleft()
        coming.finish(what)
        tag, length = announcement.tolist()
        received = self._expected[tag].popleft() if self._expected[tag] else None
        communicator = self.link.communicator
        into = communicator.room(length) if received is None else as_bytes(received.into)
        assert into.numel() == length, f"{what} has {length} bytes, not {into.numel()}"
        event = self.link.start(lambda: communicator.receive(into), f"the transfer from member {self._source}")
        if received is None:
            self._early[tag].append((into, event))
        else:
            received.event = event

    def _await_announcement(self) -> None:
        announcement = torch.empty(2, dtype=torch.int64)
        self._announcements.append((announcement, self._host.receive(announcement, self._source, ANNOUNCED)))


class _Received:
    def __init__(self, incoming: _Incoming, into: torch.Tensor) -> None:
        self._incoming = incoming
        self.into = into
        self.kept: torch.Tensor | None = None
        """Where it lies, if it came before it was asked for."""
        self.event: Event | None = None
        """Where it ends, once it has started."""

    def finish(self, what: str) -> None:
        while self.event is None:
            self._incoming.take_next(what)
        link = self._incoming.link
        link.end(self.event, what)
        link.communicator.use(self.event)
        if self.kept is not None:
            as_bytes(self.into).copy_(self.kept)
