"""A world whose members sum the tensors of their GPUs by NCCL, beside a world of the host for everything else.

Each generation has a communicator of its own. Until that has formed, which takes seconds, and if it does not form, the
world of the host sums for the GPUs, too: it forms in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from typing_extensions import Self, override

from raytrain_plus.collective.nccl import Communicator, Event, Library, as_bytes, on_host, reached, settle, started
from raytrain_plus.collective.nccl_forming import Forming, Wanted, new_id, shared_ids
from raytrain_plus.collective.world import LOOK_S, Operation, Work, World

FIRST_SUM = 1 << 16
"""Elements of the larger one of the first sums."""


class NcclWorld(World):
    """See the module docstring."""

    def __init__(self, host: World, limit_s: float, interrupted: Callable[[], bool]) -> None:
        """Prepare to join the others of `host`, which sums meanwhile, and is left with this world.

        `limit_s`: that of each wait. `interrupted`: whether this member is to leave.
        """
        self.rank, self.size = host.rank, host.size
        self._host = host
        self._limit_s = limit_s
        self._interrupted = interrupted
        self._uses: Communicator | None = None
        self._forming: Forming
        """Since `join`."""

    def join(self, library: Library) -> Self:
        """Begin to join the others; return this world.

        Raises `Interrupted` if a member does not answer in time, or if this one is to leave; `host` is left then.
        """
        own = new_id(library) if self.rank == 0 else b""
        ids = shared_ids(self._host, [own], self._limit_s, self._interrupted)
        wanted = [Wanted(ids[0][0], self.rank, self.size)]
        self._forming = Forming(library, wanted, self._limit_s, self._connect).start()
        return self

    def _connect(self, formed: Sequence[Communicator], left: Callable[[], bool]) -> None:
        """Use each operation once: NCCL connects members and takes memory at the first use, and waits for all of them.

        Sums of few numbers and of many go different ways.
        """
        [one] = formed
        size = self.size
        for length in (size, FIRST_SUM):
            numbers, share = (one.room(4 * count).view(torch.float32).zero_() for count in (length, length // size))
            # What NCCL has not launched yet, it may still write: nothing of this is freed before.
            whole, into = (share.new_zeros(len(share) * size) for _ in range(2))
            for start in (
                lambda numbers=numbers: one.reduce(numbers, "sum"),
                lambda share=share, whole=whole: one.gather(as_bytes(share), as_bytes(whole)),
                lambda whole=whole, into=into: one.exchange(as_bytes(whole), as_bytes(into)),
                lambda share=share, whole=whole: one.reduce_scatter(whole, share),
            ):
                start()
                settle(one, "NCCL to connect the workers", self._limit_s, left)

    @property
    def forming(self) -> bool:
        """See `World`. A member on which NCCL does not form is never ready, so none uses it."""
        return self._uses is None and not self._forming.ended

    @property
    @override
    def switched(self) -> bool:
        return self._uses is not None

    @property
    @override
    def why_never(self) -> str:
        return self._forming.failure

    @override
    def use_formed(self) -> None:
        [self._uses] = self._forming.communicators()

    @override
    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Work:
        return self._started(tensor, name, lambda one: one.reduce(tensor, operation)) or self._host.reduce(
            tensor, name, operation
        )

    @override
    def gather(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        return self._started(
            tensor, name, lambda one: one.gather(as_bytes(tensor), as_bytes(into))
        ) or self._host.gather(tensor, into, name)

    @override
    def exchange(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        return self._started(
            tensor, name, lambda one: one.exchange(as_bytes(tensor), as_bytes(into))
        ) or self._host.exchange(tensor, into, name)

    @override
    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        return self._started(
            tensor, name, lambda one: one.reduce_scatter(tensor.view(-1), into.view(-1))
        ) or self._host.reduce_scatter(tensor, into, name)

    @override
    def begin_to_leave(self) -> None:
        self._forming.begin_to_leave()

    def close(self) -> None:
        """Abort NCCL's part and leave the other world."""
        self._forming.leave()
        self._host.close()

    def _started(self, tensor: torch.Tensor, name: str, start: Callable[[Communicator], None]) -> Work | None:
        """Start an operation of NCCL; return None if it is for the other world."""
        communicator = self._uses
        if communicator is None or on_host(tensor):
            return None
        what = f"the collective of {name}"
        event = started(communicator, lambda: start(communicator), what, self._limit_s, self._interrupted)
        return _NcclWork(communicator, event, what)


class _NcclWork:
    def __init__(self, communicator: Communicator, event: Event, what: str) -> None:
        self._communicator = communicator
        self._event = event
        self._what = what

    def ended(self, within_s: float) -> bool:
        return reached(self._communicator, self._event, self._what, min(within_s, LOOK_S))

    def finish(self) -> None:
        self._communicator.use(self._event)
