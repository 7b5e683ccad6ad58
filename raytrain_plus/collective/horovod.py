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

_SAME = {
    # One member a host, by its own account, skips two of the three connection meshes that Horovod would form; the
    # collectives used here need only the first.
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "1",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
    "HOROVOD_STALL_CHECK_DISABLE": "1",
    "HOROVOD_LOG_LEVEL": "fatal",
}
"""What Horovod reads from the environment at each `init`, and is the same for every world."""
_OF_A_WORLD = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_HOSTNAME",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HOROVOD_GLOO_IFACE",
    "HOROVOD_GLOO_TIMEOUT_SECONDS",
    "HOROVOD_GLOO_RENDEZVOUS_TOKEN",
    "HOROVOD_GLOO_LINK_KEYS",
)
"""What each world sets for itself. The last two are read by our edits of Horovod's source (`install.fixes`)."""
_SECRETS = _OF_A_WORLD[-2:]


def load_horovod() -> None:
    """Imports it, which takes a moment that a forming world should not have to wait for.

    To be called before other threads work. Every world sets variables of the environment: to change one is safe, but
    to add one moves the C library's table (glibc before 2.41), and a thread that looks a name up meanwhile, as Arrow's
    do while they decode, ends the process. So all of them are there from here on.
    """
    import horovod.torch  # noqa: F401

    os.environ.update(_SAME)
    for name in _OF_A_WORLD:
        os.environ.setdefault(name, "")


class HorovodWorld:
    """A Horovod world of this process; there is at most one at a time."""

    def __init__(self, formation: Formation) -> None:
        """Joins the world; blocks until all members are there. Raises `Interrupted` where one does not come.

        `load_horovod` has been called.
        """
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
        finally:
            # Horovod reads them while it forms the world; processes that the task starts later do not inherit them.
            os.environ.update(dict.fromkeys(_SECRETS, ""))

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
    values = (
        formation.rank,
        formation.size,
        f"{formation.name}-{formation.rank}",
        *formation.server,
        interface_of(formation.address),
        max(1, round(formation.timeout_s)),
        formation.credentials.token,
        ",".join(formation.credentials.link_keys),
    )
    return dict(zip(_OF_A_WORLD, map(str, values), strict=True))


def interface_of(address: str) -> str:
    """The name of the network interface that carries `address`. Raises `Interrupted` where none does."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    raise Interrupted(f"no network interface of this node has the address {address}")
