"""NCCL as the worlds of `collective: nccl` reach it: communicators of a member, made and left without waiting.

NCCL is reached through `nccl4py`, whose communicator is a plain object, and not through torch's process groups: those
have watchdogs that end the process, and destroy what must be aborted. A member leaves a communicator by aborting it,
whether the others live or not: from NCCL 2.31 on, to destroy one waits for all others of the node, without a limit.

Nothing here waits in NCCL or in CUDA. Every wait looks whether the work of the GPU has ended, whether NCCL reports an
error, and whether the member is to leave; a GPU that works with members that are gone never ends it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from typing_extensions import override

from raytrain_plus.collective.world import Operation
from raytrain_plus.errors import Interrupted

ID_BYTES = 128
"""Length of the id by which the members of a communicator find each other."""
SUCCESS, IN_PROGRESS = 0, 7
"""Two of NCCL's results (`ncclResult_t`); every other one is an error."""
POLL_S = 0.001
"""The longest pause, in seconds, between two looks at the GPU."""

State = Literal["ready", "under way", "failed"]


class Event(Protocol):
    """A place in the work of a device: a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Return whether the device has come so far."""


class Communicator(Protocol):
    """A member's part in NCCL, on one device. Operations run on the device, in the order in which they were started.

    After each start nothing may follow until `state` is no longer "under way".
    """

    def state(self) -> State:
        """Return what NCCL says of it: whether it can be used, is occupied, or has failed."""

    def why(self) -> str:
        """Return NCCL's last error, in words. Raises the GPU's own error if that has failed."""

    def reduce(self, tensor: torch.Tensor, operation: Operation) -> None:
        """Start to replace a tensor by its sum or maximum, after what is computed now."""

    def gather(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """Start to gather bytes, after what is computed now."""

    def exchange(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """Start to exchange bytes, after what is computed now."""

    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """Start to sum parts, after what is computed now."""

    def send(self, tensor: torch.Tensor) -> None:
        """Start to send bytes to the other one of two members, after what is computed now."""

    def receive(self, into: torch.Tensor) -> None:
        """Start to receive bytes from the other one of two members, after what is computed now."""

    def room(self, length: int) -> torch.Tensor:
        """Return `length` bytes of the device's memory, with undefined values."""

    def mark(self) -> Event:
        """Return where all operations that were started have ended."""

    def use(self, event: Event) -> None:
        """Let what is computed from now on wait for this, on the device."""

    def abort(self) -> None:
        """End what is under way here, and free everything. May be called at any time, more than once."""


class Library(Protocol):
    """Makes communicators, as `Nccl` does."""

    def new_id(self) -> bytes:
        """Return an id for the members of one world, `ID_BYTES` long."""

    def begin(self, shared_id: bytes, rank: int, size: int) -> Communicator:
        """Begin to make a member's communicator, without waiting for the others."""


def set_up_nccl() -> None:
    """Set, unless the user has, what CUDA and NCCL read when they start in this process."""
    # Streams that share a queue of the GPU wait for each other; there are 8 otherwise.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # A sum must not wait until all members come to it for the first time.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")


def settle(communicator: Communicator, what: str, limit_s: float, left: Callable[[], bool]) -> None:
    """Wait until NCCL can be used. Raises `Interrupted` if it fails, after `limit_s`, or if this member leaves."""
    start = time.monotonic()
    while (state := state_of(communicator)) != "ready":
        if state == "failed":
            raise Interrupted(f"stopped waiting for {what}: {communicator.why()}")
        if left():
            raise Interrupted(f"stopped waiting for {what}")
        if time.monotonic() - start > limit_s:
            raise Interrupted(f"stopped waiting for {what}, after {limit_s:g} s")
        pause(start)


def reached(communicator: Communicator, event: Event, what: str, within_s: float) -> bool:
    """Return whether the device has reached an event, after waiting for at most `within_s` seconds.

    Raises `Interrupted` if NCCL fails meanwhile.
    """
    start = time.monotonic()
    while not event.query():
        # Asked only while the work is under way: what has ended is right, whatever fails later.
        if state_of(communicator) == "failed":
            raise Interrupted(f"{what} failed: {communicator.why()}")
        if time.monotonic() - start >= within_s:
            return False
        pause(start)
    return True


def started(
    communicator: Communicator, start: Callable[[], None], what: str, limit_s: float, left: Callable[[], bool]
) -> Event:
    """Start an operation, and return the place where it ends.

    Raises `Interrupted` if NCCL refuses it, after `limit_s`, or if this member leaves.
    """
    try:
        start()
    except (torch.AcceleratorError, TypeError, AttributeError, AssertionError):
        # The GPU or our own code is at fault.
        raise
    except Exception as error:
        # NCCL says of a GPU that has failed only that CUDA has raised an error, which this raises again.
        communicator.why()
        raise Interrupted(f"cannot start {what}: {error}") from error
    settle(communicator, f"NCCL to start {what}", limit_s, left)
    return communicator.mark()


def state_of(communicator: Communicator) -> State:
    """Return what NCCL says of a communicator. Raises `Interrupted` if it says nothing."""
    try:
        return communicator.state()
    except (TypeError, AttributeError, AssertionError):
        # Our own code is at fault.
        raise
    except Exception as error:
        raise Interrupted(f"NCCL does not say how it is: {error}") from error


def pause(start: float) -> None:
    """Sleep before the next look, briefly at first: most waits that began at `start` end within microseconds."""
    time.sleep(min(POLL_S, (time.monotonic() - start) / 8))


def on_host(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is not one of a GPU."""
    return tensor.device.type == "cpu"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a contiguous tensor's bytes, which NCCL moves whatever they mean."""
    return tensor.detach().view(-1).view(torch.uint8)


class Nccl(Library):
    """NCCL on one GPU of this process, as `Library`."""

    def __init__(self, device: torch.device) -> None:
        """Prepare for communicators on `device`. Raises `ImportError` without `nccl4py`."""
        import nccl.core

        self._nccl = nccl.core
        self._device = device

    @override
    def new_id(self) -> bytes:
        return bytes(self._nccl.get_unique_id())

    @override
    def begin(self, shared_id: bytes, rank: int, size: int) -> Communicator:
        nccl = self._nccl
        with torch.cuda.device(self._device):
            config = nccl.NCCLConfig(blocking=False)
            made = nccl.Communicator.init(size, rank, nccl.UniqueId.from_bytes(shared_id), config)
        return _OnGpu(nccl, made, rank, self._device)


class _OnGpu:
    """A communicator of `nccl4py`, with a stream of its own."""

    def __init__(self, nccl: Any, communicator: Any, rank: int, device: torch.device) -> None:
        self._nccl = nccl
        self._communicator = communicator
        self._other = 1 - rank
        self._device = device
        # Streams of the usual priority are handed out in turns, so that it could be the stream of some copies, too.
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._aborted = False

    def state(self) -> State:
        if self._aborted:
            return "failed"
        # A plain number, although nccl4py's annotation promises a member of its enumeration.
        found = int(self._communicator.get_async_error())
        return "ready" if found == SUCCESS else "under way" if found == IN_PROGRESS else "failed"

    def why(self) -> str:
        torch.cuda.current_stream(self._device).query()
        return "it was left" if self._aborted else str(self._communicator.get_last_error())

    def reduce(self, tensor: torch.Tensor, operation: Operation) -> None:
        op = self._nccl.SUM if operation == "sum" else self._nccl.MAX
        self._start(lambda stream: self._communicator.allreduce(tensor, tensor, op, stream=stream), tensor)

    def gather(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        self._start(lambda stream: self._communicator.allgather(tensor, into, stream=stream), tensor, into)

    def exchange(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        self._start(lambda stream: self._communicator.alltoall(tensor, into, stream=stream), tensor, into)

    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        total = self._nccl.SUM
        self._start(lambda stream: self._communicator.reduce_scatter(tensor, into, total, stream=stream), tensor, into)

    def send(self, tensor: torch.Tensor) -> None:
        self._start(lambda stream: self._communicator.send(tensor, self._other, stream=stream), tensor)

    def receive(self, into: torch.Tensor) -> None:
        self._start(lambda stream: self._communicator.recv(into, self._other, stream=stream), into)

    def room(self, length: int) -> torch.Tensor:
        return torch.empty(length, dtype=torch.uint8, device=self._device)

    def mark(self) -> Event:
        event: Event = self._stream.record_event()
        return event

    def use(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def abort(self) -> None:
        if not self._aborted:
            self._aborted = True
            self._communicator.abort()

    def _start(self, start: Callable[[int], None], *tensors: torch.Tensor) -> None:
        """Start an operation on the communicator's stream, after what is computed now."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device):
            start(stream.cuda_stream)
        for tensor in tensors:
            # Its memory is not used again before the operation has ended.
            tensor.record_stream(stream)
