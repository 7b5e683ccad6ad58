"""A stand-in for NCCL between processes without a GPU: `collective.nccl.Library` on a Gloo group of its own.

It forms on a thread, and hangs as NCCL does: an operation whose peer is gone never ends, until it is aborted.
"""

# torch has no complete annotations for its C++ exports.
# mypy: disable-error-code="attr-defined,name-defined,assignment"

from __future__ import annotations

import tempfile
import threading
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from raytrain_plus.collective.nccl import ID_BYTES, State
from raytrain_plus.collective.world import Operation
from raytrain_plus.torch_compat import gloo_options

LIMIT_S = 30.0


class HangingNccl:
    """Makes communicators; their id is the path of a file by which they find each other."""

    def new_id(self) -> bytes:
        return f"{tempfile.gettempdir()}/{uuid.uuid4().hex}".encode().ljust(ID_BYTES, b"\0")

    def begin(self, shared_id: bytes, rank: int, size: int) -> HangingCommunicator:
        return HangingCommunicator(shared_id.rstrip(b"\0").decode(), rank, size)


class HangingCommunicator:
    """A member's part: `collective.nccl.Communicator`."""

    def __init__(self, path: str, rank: int, size: int) -> None:
        self._path, self._rank, self._size = path, rank, size
        self._group: Any = None
        self._failed = ""
        self._works: list[Any] = []
        threading.Thread(target=self._form, name="forms a stand-in for NCCL", daemon=True).start()

    def _form(self) -> None:
        try:
            store = dist.FileStore(self._path, self._size)
            group = dist.ProcessGroupGloo(store, self._rank, self._size, gloo_options("127.0.0.1", LIMIT_S))
        except Exception as error:
            self._failed = str(error)
            return
        if not self._failed:
            self._group = group

    def state(self) -> State:
        return "failed" if self._failed else "under way" if self._group is None else "ready"

    def why(self) -> str:
        return self._failed

    def reduce(self, tensor: torch.Tensor, operation: Operation) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX
        self._works.append(self._group.allreduce([tensor], options))

    def gather(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        self._works.append(self._group.allgather([list(into.chunk(self._size))], [tensor]))

    def exchange(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        self._works.append(self._group.alltoall_base(into, tensor, [], []))

    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor) -> None:
        whole = tensor.clone()
        work = self._group.allreduce([whole])
        own = slice(self._rank * into.numel(), (self._rank + 1) * into.numel())
        self._works.append(_Then(work, lambda: into.copy_(whole[own])))

    def send(self, tensor: torch.Tensor) -> None:
        self._works.append(_Taken(self._group.send([tensor], 1 - self._rank, 0)))

    def receive(self, into: torch.Tensor) -> None:
        self._works.append(_Taken(self._group.recv([into], 1 - self._rank, 0)))

    def room(self, length: int) -> torch.Tensor:
        return torch.empty(length, dtype=torch.uint8)

    def mark(self) -> _At:
        return _At(self._works.pop())

    def use(self, event: Any) -> None:
        """Do nothing: what has ended is in the host's memory."""

    def abort(self) -> None:
        self._failed = self._failed or "it was left"
        last = [self._group, *self._works]
        self._group = None
        self._works.clear()
        # The group's threads are joined when it is dropped.
        threading.Thread(target=last.clear, name="leaves a stand-in for NCCL", daemon=True).start()


class _Then:
    """An operation that something follows once it has ended."""

    def __init__(self, work: Any, follows: Any) -> None:
        self._work, self._follows = work, follows

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def wait(self) -> None:
        self._work.wait()
        self._follows()


class _Taken:
    """A transfer: Gloo says that one has ended only to a thread that waits for it."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._done, self._failed = False, False
        threading.Thread(target=self._await, name="awaits a transfer", daemon=True).start()

    def _await(self) -> None:
        try:
            self._work.wait(timedelta(seconds=LIMIT_S))
        except RuntimeError:
            self._failed = True
        self._done = True

    def is_completed(self) -> bool:
        return self._done

    def wait(self) -> None:
        if self._failed:
            raise RuntimeError("the peer is gone")


class _At:
    """A place in the work of the stand-in's device: `collective.nccl.Event`."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._came = False

    def query(self) -> bool:
        if not self._came and self._work.is_completed():
            try:
                self._work.wait()
            except RuntimeError:
                # A peer is gone. A GPU does not notice.
                return False
            self._came = True
        return self._came
