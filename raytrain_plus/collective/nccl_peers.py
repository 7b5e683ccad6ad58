"""The workers of a model replica, which send one another the tensors of their GPUs by NCCL: `transport.Peers`.

NCCL matches what one member sends and another receives by their order alone, and a send occupies its communicator until
its receiver has taken it. So each direction of each pair that exchanges tensors has a communicator of its own, a link.
What a link carries is announced in the world of the host, in the same order: the tag and the length. A receiver that
waits for one tensor takes whatever was sent before it, each into its place, or into memory of its own until somebody
asks for it. So no order of sending and receiving can make two members wait for each other.

Until all links have formed on all members, everything goes through the host's memory. What others have told of a step
says so; see `World.forming`.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from raytrain_plus.collective.nccl import Communicator, Event, Library, as_bytes, on_host, reached, refused, settle
from raytrain_plus.collective.nccl_forming import Forming, Wanted, new_id, shared_ids
from raytrain_plus.collective.world import LOOK_S, Transfer
from raytrain_plus.errors import Interrupted

ANNOUNCED = (1 << 31) - 1
"""The tag of announcements; those of transfers are smaller (`transport`)."""
Direction = tuple[int, int]
"""Who sends to whom, by rank."""


class NcclPeers:
    """See the module docstring."""

    def __init__(
        self,
        host: Any,
        library: Library,
        directions: Iterable[Direction],
        limit_s: float,
        interrupted: Callable[[], bool],
    ) -> None:
        """Begin to form links in these directions, the same on all members.

        `host`: a world with `send` and `receive`, left with this one. Raises `Interrupted` if a member does not answer
        within `limit_s`, the limit of each wait, or `interrupted` returns True; `host` is left then.
        """
        self.rank: int = host.rank
        self.size: int = host.size
        self._host = host
        self._waits = _Waits(limit_s, interrupted)
        self._own = [one for one in sorted(set(directions)) if self.rank in one]
        to = {receiver for sender, receiver in self._own if sender == self.rank}
        ids = shared_ids(
            host, [new_id(library) if rank in to else b"" for rank in range(self.size)], limit_s, interrupted
        )
        wanted = [Wanted(ids[sender][receiver], int(receiver == self.rank), 2) for sender, receiver in self._own]
        self._bytes: list[torch.Tensor] = []
        """What has gone over each link first."""
        self._forming = Forming(library, wanted, limit_s, self._connect)
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._used = not self._own

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
            settle(one, "NCCL to connect two workers", self._waits.limit_s, left)

    @property
    def forming(self) -> bool:
        """See `World`."""
        return not self._used and not self._forming.ended

    @property
    def switched(self) -> bool:
        """See `World`."""
        return self._used and bool(self._own)

    @property
    def why_never(self) -> str:
        """See `World`."""
        return self._forming.failure

    def use_formed(self) -> None:
        """See `World`. Nothing may be on its way."""
        if self._used:
            return
        for (sender, receiver), one in zip(self._own, self._forming.communicators(), strict=True):
            if sender == self.rank:
                self._outgoing[receiver] = _Outgoing(self._host, receiver, one, self._waits)
            else:
                self._incoming[sender] = _Incoming(self._host, sender, one, self._waits)
        self._used = True

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

    def begin_to_leave(self) -> None:
        """See `World`."""
        self._forming.begin_to_leave()

    def close(self) -> None:
        """Abort the links and leave the world of the host."""
        self._forming.leave()
        self._host.close()


def _by_host(tensor: torch.Tensor) -> bool:
    return on_host(tensor) or not tensor.numel()


class _Waits:
    """How a member waits."""

    def __init__(self, limit_s: float, interrupted: Callable[[], bool]) -> None:
        self.limit_s = limit_s
        self.interrupted = interrupted

    def start(self, communicator: Communicator, start: Callable[[], None], what: str) -> Event:
        """Start an operation; return where it ends."""
        try:
            start()
        except Exception as error:
            raise refused(communicator, f"to start {what}", error) from error
        settle(communicator, f"NCCL to start {what}", self.limit_s, self.interrupted)
        return communicator.mark()

    def end(self, communicator: Communicator, event: Event, what: str) -> None:
        """Wait until the device has come so far. Raises `Interrupted` if it does not."""
        begun = time.monotonic()
        while not reached(communicator, event, what, LOOK_S):
            if self.interrupted():
                raise Interrupted(f"stopped waiting for {what}")
            if time.monotonic() - begun > self.limit_s:
                raise Interrupted(f"stopped waiting for {what}, after {self.limit_s:g} s")


class _Outgoing:
    """A link to another member."""

    def __init__(self, host: Any, to: int, communicator: Communicator, waits: _Waits) -> None:
        self._host = host
        self._to = to
        self._communicator = communicator
        self._waits = waits

    def send(self, tensor: torch.Tensor, tag: int) -> Transfer:
        data, one = as_bytes(tensor), self._communicator
        event = self._waits.start(one, lambda: one.send(data), f"to send to member {self._to}")
        announcement = torch.tensor([tag, data.numel()])
        announced = self._host.send(announcement, self._to, ANNOUNCED)
        return _Sent(one, event, self._waits, announced, announcement)


class _Sent:
    def __init__(
        self, communicator: Communicator, event: Event, waits: _Waits, announced: Transfer, announcement: torch.Tensor
    ) -> None:
        self._communicator = communicator
        self._event = event
        self._waits = waits
        self._announced = announced
        # It is read until it has arrived.
        self._announcement = announcement

    def finish(self, what: str) -> None:
        self._announced.finish(what)
        self._waits.end(self._communicator, self._event, what)


class _Incoming:
    """A link from another member."""

    def __init__(self, host: Any, source: int, communicator: Communicator, waits: _Waits) -> None:
        self._host = host
        self._source = source
        self.communicator = communicator
        self.waits = waits
        self._expected: dict[int, deque[_Received]] = defaultdict(deque)
        """Tag -> the transfers that are not announced yet, in order."""
        self._early: dict[int, deque[tuple[torch.Tensor, Event]]] = defaultdict(deque)
        """Tag -> what came before anybody asked for it, in order."""
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
        """Start to take what is announced next, into the memory of who expects it, if anybody does."""
        if not self._announcements:
            self._await_announcement()
        announcement, coming = self._announcements.popleft()
        coming.finish(what)
        tag, length = announcement.tolist()
        received = self._expected[tag].popleft() if self._expected[tag] else None
        into = self.communicator.room(length) if received is None else as_bytes(received.into)
        assert into.numel() == length, f"{what} has {length} bytes, not {into.numel()}"
        event = self.waits.start(self.communicator, lambda: self.communicator.receive(into), f"to receive {what}")
        if received is None:
            self._early[tag].append((into, event))
        else:
            received.event = event

    def _await_announcement(self) -> None:
        announcement = torch.empty(2, dtype=torch.int64)
        self._announcements.append((announcement, self._host.receive(announcement, self._source, ANNOUNCED)))


class _Received:
    def __init__(self, link: _Incoming, into: torch.Tensor) -> None:
        self._link = link
        self.into = into
        self.kept: torch.Tensor | None = None
        """Where it lies, if it came before it was asked for."""
        self.event: Event | None = None
        """Where it ends, once it has started."""

    def finish(self, what: str) -> None:
        link = self._link
        while self.event is None:
            link.take_next(what)
        link.waits.end(link.communicator, self.event, what)
        link.communicator.use(self.event)
        if self.kept is not None:
            as_bytes(self.into).copy_(self.kept)
