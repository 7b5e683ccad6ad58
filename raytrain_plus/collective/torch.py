"""A world on torch.distributed's Gloo: what `collective: auto` takes where Horovod is not built."""

# torch ships no complete annotations for what its C++ side exports.
# mypy: disable-error-code="attr-defined,name-defined,assignment"

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist

from raytrain_plus.collective.formation import Formation
from raytrain_plus.collective.world import Operation, Work
from raytrain_plus.errors import Interrupted


def open_store(address: str, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """The store through which members find each other, listening on `address` alone; and its port."""
    # A listener of our own, because a TCPStore that makes one listens on every interface.
    listener = socket.create_server((address, 0))
    port = int(listener.getsockname()[1])
    store = dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
        use_libuv=False,
    )
    return store, port


class TorchWorld:
    """A Gloo process group of its own, never torch's default one."""

    def __init__(self, formation: Formation, store: dist.TCPStore | None = None) -> None:
        """Joins the world; `store` is for the member that opened it. Raises `Interrupted` where one does not come."""
        self.rank = formation.rank
        self.size = formation.size
        timeout = timedelta(seconds=formation.timeout_s)
        try:
            if store is None:
                store = dist.TCPStore(*formation.server, is_master=False, timeout=timeout, use_libuv=False)
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=formation.address)]
            options._timeout = timeout
            prefix = dist.PrefixStore(f"{formation.generation}/{formation.name}", store)
            self._store = store
            self._group = dist.ProcessGroupGloo(prefix, formation.rank, formation.size, options)
        except Exception as error:
            raise Interrupted(
                f"world {formation.name} of generation {formation.generation} did not form: {error}"
            ) from error

    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Work:
        """Starts an in-place all-reduce. Members submit in the same order; `name` is for the reader."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX
        try:
            return _TorchWork(self._group.allreduce([tensor], options), name)
        except Exception as error:
            raise Interrupted(f"cannot start the all-reduce of {name}: {error}") from error

    def close(self) -> None:
        """Drops the group and its sockets."""
        del self._group, self._store


class _TorchWork:
    def __init__(self, work: dist.Work, name: str) -> None:
        self._work = work
        self._name = name

    def done(self) -> bool:
        return bool(self._work.is_completed())

    def finish(self) -> None:
        try:
            self._work.wait()
        except Exception as error:
            raise Interrupted(f"the all-reduce of {self._name} failed: {error}") from error
