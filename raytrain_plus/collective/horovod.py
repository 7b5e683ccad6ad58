"""A world on Horovod's ring all-reduce. The only module of the package, `install` aside, that imports horovod.

Only its collectives are used: never its elastic mode, runner or executors, and no process sets (with any of them one
dead peer aborts every survivor).
"""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch

from raytrain_plus.collective.formation import Formation
from raytrain_plus.collective.world import Operation, Work
from raytrain_plus.errors import Interrupted


def load_horovod() -> None:
    """Imports it, which takes a moment that a forming world should not have to wait for."""
    import horovod.torch  # noqa: F401


class HorovodWorld:
    """A Horovod world of this process; there is at most one at a time."""

    def __init__(self, formation: Formation) -> None:
        """Joins the world; blocks until all members are there. Raises `Interrupted` where one does not come."""
        import horovod.torch as hvd

        self.rank = formation.rank
        self.size = formation.size
        self._hvd = hvd
        os.environ.update(_environment(formation))
        try:
            hvd.init()
        except Exception as error:
            hvd.shutdown()
            raise Interrupted(
                f"world {formation.name} of generation {formation.generation} did not form: {error}"
            ) from error

    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Work:
        """Starts an in-place ring all-reduce."""
        op = self._hvd.Sum if operation == "sum" else self._hvd.Max
        try:
            return _HorovodWork(self._hvd, self._hvd.allreduce_async_(tensor, op=op, name=name))
        except Exception as error:
            raise Interrupted(f"cannot start the all-reduce of {name}: {error}") from error

    def close(self) -> None:
        """Shuts Horovod down in this process; it can be initialised again."""
        # What nobody synchronised, Horovod forgets at its next `init`.
        self._hvd.shutdown()


class _HorovodWork:
    def __init__(self, hvd: Any, handle: int) -> None:
        self._hvd = hvd
        self._handle = handle

    def done(self) -> bool:
        try:
            return bool(self._hvd.poll(self._handle))
        except Exception as error:
            # Horovod's own thread has given up, because a peer is gone: it knows no handles any more.
            raise Interrupted(f"the world is broken: {error}") from error

    def finish(self) -> None:
        try:
            self._hvd.synchronize(self._handle)
        except Exception as error:
            raise Interrupted(f"an all-reduce failed: {error}") from error


def _environment(formation: Formation) -> dict[str, str]:
    """Horovod reads its membership from the environment, once at each `init`.

    One member a host, by its own account (LOCAL_SIZE = CROSS_SIZE = 1 and a hostname each), skips two of the three
    connection meshes it would form; the collectives used here need only the first.
    """
    values = {
        "RANK": formation.rank,
        "SIZE": formation.size,
        "LOCAL_RANK": 0,
        "LOCAL_SIZE": 1,
        "CROSS_RANK": 0,
        "CROSS_SIZE": 1,
        "HOSTNAME": f"{formation.name}-{formation.rank}",
        "GLOO_RENDEZVOUS_ADDR": formation.server[0],
        "GLOO_RENDEZVOUS_PORT": formation.server[1],
        "GLOO_IFACE": interface_of(formation.address),
        "GLOO_TIMEOUT_SECONDS": max(1, round(formation.timeout_s)),
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
        "STALL_CHECK_DISABLE": 1,
        "LOG_LEVEL": "fatal",
    }
    return {f"HOROVOD_{key}": str(value) for key, value in values.items()}


def interface_of(address: str) -> str:
    """The name of the network interface that carries `address`. Raises `Interrupted` where none does."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    raise Interrupted(f"no network interface of this node has the address {address}")
