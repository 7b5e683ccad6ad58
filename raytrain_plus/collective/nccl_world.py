"""A world whose members sum the tensors of their GPUs by NCCL, beside a world of the host for everything else.

NCCL is reached through `nccl4py`, whose communicator is a plain object, and not through torch's process groups: those
have watchdogs that end the process, and destroy what must be aborted. Each generation has a communicator of its own,
made without blocking. A member leaves it by aborting it, whether the others live or not: from NCCL 2.31 on, to destroy
one waits for all others of the node, without a limit.

Nothing here waits in NCCL or in CUDA. Every wait looks whether the work of the GPU has ended, whether NCCL reports an
error, and whether the member is to leave; a GPU that works on a sum whose other members are gone never ends it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, Protocol

import torch

from raytrain_plus.collective.world import LOOK_S, Operation, Work, World, wait
from raytrain_plus.errors import Interrupted, RaytrainError

log = logging.getLogger(__name__)

ID_BYTES = 128
"""Length of the id by which NCCL's members find each other."""
SUCCESS, IN_PROGRESS = 0, 7
"""Two of NCCL's results (`ncclResult_t`); every other one is an error."""
POLL_S = 0.001
"""Seconds between two looks at the GPU."""
LEAVE_S = 0.1
"""Limit, in seconds, of waiting for the thread that forms NCCL, which may be inside of it."""
ABORT_S = 0.5
"""Limit, in seconds, of waiting for an abort.

NCCL ends what is under way at once, and then frees everything, before the abort returns.
"""

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
        """Return NCCL's last error, in words."""

    def reduce(self, tensor: torch.Tensor, operation: Operation) -> None:
        """Start to replace a tensor by its sum or maximum, after what is computed now."""

    def gather(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """Start to gather bytes, after what is computed now."""

    def exchange(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """Start to exchange bytes, after what is computed now."""

    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        """Start to sum parts, after what is computed now."""

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


class NcclWorld:
    """See the module docstring. Until NCCL has formed, and if it does not form, another world sums for the GPU, too.

    NCCL takes seconds to form, on a thread of its own; the others form in a fraction of one.
    """

    def __init__(self, host: World, library: Library, limit_s: float, interrupted: Callable[[], bool]) -> None:
        """Begin to join the others of `host`, which sums meanwhile, and is left with this world.

        Raises `Interrupted` if a member does not answer within `limit_s`, the limit of each wait, or `interrupted`
        returns True; `host` is left then.
        """
        self.rank, self.size = host.rank, host.size
        self._host = host
        self._limit_s = limit_s
        self._interrupted = interrupted
        self._left = threading.Event()
        self._formed: Future[Communicator] = Future()
        self._uses: Communicator | None = None
        try:
            # Of the first member; the sum with zeros of the others.
            own = library.new_id() if self.rank == 0 else bytes(ID_BYTES)
            shared = torch.tensor(list(own), dtype=torch.int64)
            wait([host.reduce(shared, "the id of NCCL's members")], "the id of NCCL's members", limit_s, interrupted)
        except Exception as error:
            host.close()
            raise error if isinstance(error, RaytrainError) else Interrupted(f"NCCL has no id: {error}") from error
        arguments = library, bytes(shared.tolist())
        self._thread = threading.Thread(target=self._form, args=arguments, name="forms NCCL", daemon=True)
        self._thread.start()

    def _form(self, library: Library, shared_id: bytes) -> None:
        """Form NCCL with the others, unless this world is left first."""
        communicator = None
        try:
            communicator = library.begin(shared_id, self.rank, self.size)
            _settle(communicator, "NCCL to form", self._limit_s, self._left.is_set)
        except Exception as error:
            # The other world goes on.
            log.warning("NCCL did not form; sums stay in the host's memory: %s", error)
            if communicator is not None:
                communicator.abort()
            self._formed.set_exception(error)
            return
        self._formed.set_result(communicator)
        if self._left.is_set():
            communicator.abort()

    @property
    def forming(self) -> bool:
        """See `World`. A member on which NCCL does not form is never ready, so none uses it."""
        return self._uses is None and (not self._formed.done() or self._formed.exception() is not None)

    def use_formed(self) -> None:
        """See `World`."""
        self._uses = self._formed.result(0)

    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Work:
        """See `World`."""
        return self._started(tensor, name, lambda one: one.reduce(tensor, operation)) or self._host.reduce(
            tensor, name, operation
        )

    def gather(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        """See `World`."""
        return self._started(tensor, name, lambda one: one.gather(_bytes(tensor), _bytes(into))) or self._host.gather(
            tensor, into, name
        )

    def exchange(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        """See `World`."""
        return self._started(
            tensor, name, lambda one: one.exchange(_bytes(tensor), _bytes(into))
        ) or self._host.exchange(tensor, into, name)

    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        """See `World`."""
        return self._started(
            tensor, name, lambda one: one.reduce_scatter(tensor.view(-1), into.view(-1))
        ) or self._host.reduce_scatter(tensor, into, name)

    def close(self) -> None:
        """Abort NCCL's part and leave the other world."""
        self._left.set()
        self._thread.join(LEAVE_S)
        thread = threading.Thread(target=self._abort, name="leaves NCCL", daemon=True)
        thread.start()
        thread.join(ABORT_S)
        self._host.close()

    def _abort(self) -> None:
        try:
            if self._formed.done() and self._formed.exception() is None:
                self._formed.result().abort()
        except Exception as error:
            log.warning("NCCL's part could not be aborted: %s", error)

    def _started(self, tensor: torch.Tensor, name: str, start: Callable[[Communicator], None]) -> Work | None:
        """Start an operation of NCCL; return None if it is for the other world."""
        communicator = self._uses
        if communicator is None or _on_host(tensor):
            return None
        try:
            start(communicator)
        except torch.AcceleratorError:
            # The GPU has failed, not the others.
            raise
        except Exception as error:
            raise Interrupted(f"cannot start the collective of {name}: {error}") from error
        _settle(communicator, f"NCCL to start the collective of {name}", self._limit_s, self._interrupted)
        return _NcclWork(communicator, communicator.mark(), name)


def _settle(communicator: Communicator, what: str, limit_s: float, left: Callable[[], bool]) -> None:
    """Wait until NCCL can be used. Raises `Interrupted` if it fails, or this member leaves."""
    start = time.monotonic()
    while (state := _state(communicator)) != "ready":
        if state == "failed":
            raise Interrupted(f"stopped waiting for {what}: {communicator.why()}")
        if left():
            raise Interrupted(f"stopped waiting for {what}")
        if time.monotonic() - start > limit_s:
            raise Interrupted(f"stopped waiting for {what}, after {limit_s:g} s")
        time.sleep(POLL_S)


class _NcclWork:
    def __init__(self, communicator: Communicator, event: Event, name: str) -> None:
        self._communicator = communicator
        self._event = event
        self._name = name

    def ended(self, within_s: float) -> bool:
        until = time.monotonic() + min(within_s, LOOK_S)
        while not self._event.query():
            # Asked only while the sum is under way: one that has ended is right, whatever fails later.
            if _state(self._communicator) == "failed":
                raise Interrupted(f"the collective of {self._name} failed: {self._communicator.why()}")
            if time.monotonic() >= until:
                return False
            time.sleep(POLL_S)
        return True

    def finish(self) -> None:
        self._communicator.use(self._event)


def _state(communicator: Communicator) -> State:
    try:
        return communicator.state()
    except Exception as error:
        raise Interrupted(f"NCCL does not say how it is: {error}") from error


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor's bytes, which NCCL moves whatever they mean."""
    return tensor.view(-1).view(torch.uint8)


class Nccl:
    """NCCL on one GPU of this process, as `Library`."""

    def __init__(self, device: torch.device) -> None:
        """Prepare for communicators on `device`. Raises `ImportError` without `nccl4py`."""
        import nccl.core

        self._nccl = nccl.core
        self._device = device

    def new_id(self) -> bytes:
        """See `Library`."""
        return bytes(self._nccl.get_unique_id())

    def begin(self, shared_id: bytes, rank: int, size: int) -> Communicator:
        """See `Library`."""
        nccl = self._nccl
        with torch.cuda.device(self._device):
            config = nccl.NCCLConfig(blocking=False)
            made = nccl.Communicator.init(size, rank, nccl.UniqueId.from_bytes(shared_id), config)
        return _OnGpu(nccl, made, self._device)


class _OnGpu:
    """A communicator of `nccl4py`, with a stream of its own."""

    def __init__(self, nccl: Any, communicator: Any, device: torch.device) -> None:
        self._nccl = nccl
        self._communicator = communicator
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._aborted = False

    def state(self) -> State:
        if self._aborted:
            return "failed"
        # A plain number, although nccl4py's annotation promises a member of its enumeration.
        found = int(self._communicator.get_async_error())
        return "ready" if found == SUCCESS else "under way" if found == IN_PROGRESS else "failed"

    def why(self) -> str:
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
