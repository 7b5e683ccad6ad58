"""A world of the host for tensors of a GPU: each is copied to pinned memory, summed or sent from there, copied back.

No operation waits for the GPU on the training thread. A thread of the world waits until a copy to the host has ended
and starts the operation then, one after the other, so that all members start theirs in the order in which they were
requested. The world itself never sees a tensor of a GPU, so it is left when a peer dies, as on CPUs; Horovod and Gloo
have paths of their own for such tensors, which neither promises.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from typing_extensions import Self, override

from raytrain_plus.collective.world import LOOK_S, FixedTransport, Operation, Transfer, Work, World
from raytrain_plus.errors import Interrupted

LEAVE_S = 0.1
"""Limit, in seconds, of waiting for the thread to end, which may wait for a GPU that is broken."""


class Copies(Protocol):
    """Copies between a device and the host: `device_copies.HostCopies`."""

    def apart(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is not on the host."""

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Begin to copy a tensor to the host; return the copy, and what waits until it is complete."""

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory of the host of the same shape and dtype."""

    def back(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy from the host into a tensor, before what is computed with it from now on."""


class StagedWorld(FixedTransport, World):
    """See the module docstring: `World`, and `Peers` if the world of the host is one."""

    def __init__(self, world: Any, copies: Copies, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Stage the tensors of a device for this world, which it leaves with it.

        `interrupted`: whether this member is to leave, which ends a wait for something to be sent.
        """
        self.rank: int = world.rank
        self.size: int = world.size
        self._world = world
        self._copies = copies
        self._interrupted = interrupted
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._start_all, name="starts staged operations", daemon=True)

    def start(self) -> Self:
        """Begin to start operations, on a thread; return this world."""
        self._thread.start()
        return self

    @override
    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Work:
        return self._staged(tensor, tensor, lambda own, _: self._world.reduce(own, name, operation))

    @override
    def gather(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        return self._staged(tensor, into, lambda own, room: self._world.gather(own, room, name))

    @override
    def exchange(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        return self._staged(tensor, into, lambda own, room: self._world.exchange(own, room, name))

    @override
    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        return self._staged(tensor, into, lambda own, room: self._world.reduce_scatter(own, room, name))

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Transfer:
        """Start to send a contiguous tensor; it must not change until it is sent."""
        if not self._copies.apart(tensor):
            sent: Transfer = self._world.send(tensor, to, tag)
            return sent
        host, wait = self._copies.to_host(tensor)
        return _Sent(self._request(wait, lambda: self._world.send(host, to, tag)), self._interrupted)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Transfer:
        """Start to receive into a contiguous tensor."""
        if not self._copies.apart(tensor):
            received: Transfer = self._world.receive(tensor, source, tag)
            return received
        room = self._copies.room(tensor)
        return _Received(self._world.receive(room, source, tag), lambda: self._copies.back(room, tensor))

    def close(self) -> None:
        """Leave the world of the host. Operations that have not started fail."""
        self._left.set()
        self._requests.put(None)
        self._thread.join(LEAVE_S)
        self._world.close()

    def _staged(
        self, tensor: torch.Tensor, into: torch.Tensor, start: Callable[[torch.Tensor, torch.Tensor], Work]
    ) -> Work:
        """Request an operation of the host on a tensor, with its result in `into`."""
        own, wait = self._copies.to_host(tensor) if self._copies.apart(tensor) else (tensor, _nothing)
        if into is tensor:
            room = own
        else:
            room = self._copies.room(into) if self._copies.apart(into) else into
        back = (lambda: self._copies.back(room, into)) if room is not into else _nothing
        return _StagedWork(self._request(wait, lambda: start(own, room)), back)

    def _request(self, wait: Callable[[], None], start: Callable[[], Any]) -> _Request:
        request = _Request(wait, start, self._left)
        if self._left.is_set():
            # Nobody takes it from the queue.
            request.run()
        else:
            self._requests.put(request)
        return request

    def _start_all(self) -> None:
        while (request := self._requests.get()) is not None:
            request.run()
        while not self._requests.empty():
            if (request := self._requests.get()) is not None:
                request.run()


def _nothing() -> None:
    """Wait for nothing: the tensor is on the host."""


class _Request:
    """An operation that starts once its tensor is on the host."""

    def __init__(self, wait: Callable[[], None], start: Callable[[], Any], left: threading.Event) -> None:
        self._wait = wait
        self._start = start
        self._left = left
        self._ran = threading.Event()
        self._started: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Wait for the copy and start the operation, unless the world was left."""
        try:
            if not self._left.is_set():
                self._wait()
            if self._left.is_set():
                raise Interrupted("the world was left before the operation started")
            self._started = self._start()
        except Exception as error:
            self._error = error
        self._ran.set()

    def started(self, within_s: float | None = None) -> Any:
        """Return the operation under way; None if it has not started `within_s` seconds from now.

        Raises what prevented its start, such as an error of the GPU.
        """
        if not self._ran.wait(within_s):
            return None
        if self._error is not None:
            raise self._error
        return self._started


class _StagedWork:
    def __init__(self, request: _Request, back: Callable[[], None]) -> None:
        self._request = request
        self._back = back

    def ended(self, within_s: float) -> bool:
        begun = time.monotonic()
        started: Work | None = self._request.started(within_s)
        return started is not None and started.ended(max(0.0, within_s - (time.monotonic() - begun)))

    def finish(self) -> None:
        following = self._request.started().finish()
        assert following is None, "no operation of a world is followed by another"
        self._back()


class _Sent:
    def __init__(self, request: _Request, interrupted: Callable[[], bool]) -> None:
        self._request = request
        self._interrupted = interrupted

    def finish(self, what: str) -> None:
        # Until it has started, the world's sockets do not end this wait.
        while (started := self._request.started(LOOK_S)) is None:
            if self._interrupted():
                raise Interrupted(f"stopped waiting for {what}")
        started.finish(what)


class _Received:
    def __init__(self, transfer: Transfer, back: Callable[[], None]) -> None:
        self._transfer = transfer
        self._back = back

    def finish(self, what: str) -> None:
        self._transfer.finish(what)
        self._back()
