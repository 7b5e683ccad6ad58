"""A world on Horovod's ring all-reduce: the only module of the package, except `install`, that imports horovod.

Only Horovod's collectives are used: never its elastic mode, runner or executors, and no process sets. With any process
set, one dead peer aborts every survivor.
"""

from __future__ import annotations

import os
from typing import Any

import psutil
import torch

from raytrain_plus.collective.invitation import Invitation
from raytrain_plus.collective.world import FixedTransport, Operation, Work
from raytrain_plus.errors import Interrupted

_SAME = {
    # Claiming one member per host skips two of the three connection meshes that Horovod would form; the collectives
    # used here need only the first.
    "HOROVOD_LOCAL_RANK": "0",
    "HOROVOD_LOCAL_SIZE": "1",
    "HOROVOD_CROSS_RANK": "0",
    "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo",
    "HOROVOD_STALL_CHECK_DISABLE": "1",
    "HOROVOD_LOG_LEVEL": "fatal",
}
"""Environment variables that Horovod reads at each `init`, the same for every world."""
_OF_A_WORLD = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_HOSTNAME",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HOROVOD_GLOO_IFACE",
    "HOROVOD_GLOO_TIMEOUT_SECONDS",
    "HOROVOD_FUSION_THRESHOLD",
    "HOROVOD_GLOO_RENDEZVOUS_TOKEN",
    "HOROVOD_GLOO_LINK_KEYS",
)
"""Environment variables that each world sets. Our edits of Horovod's source (`install.fixes`) read the last two."""
_SECRETS = _OF_A_WORLD[-2:]
FUSED_BYTES = 128 << 20
"""Bytes of tensors that Horovod sums together if they are ready at the same time: its own default."""


def load_horovod() -> None:
    """Import Horovod, so that a forming world does not wait for the import.

    Must be called before other threads work. Every world sets environment variables. To change one is safe. To add one
    moves the C library's table (glibc before 2.41), and a thread that looks up a name meanwhile, as Arrow's do while
    they decode, crashes the process. So all of them exist from here on.
    """
    import horovod.torch  # noqa: F401

    os.environ.update(_SAME)
    for name in _OF_A_WORLD:
        os.environ.setdefault(name, "")


class HorovodWorld(FixedTransport):
    """A Horovod world of this process; at most one exists at a time."""

    def __init__(self, formation: Invitation, *, fuses: bool = True) -> None:
        """Join the world; block until all members have joined. Raises `Interrupted` if a member does not join.

        `fuses`: sum tensors together that are ready at the same time. The order in which a ring adds the parts of a
        tensor then depends on the moment, so two worlds that sum the same values can differ in the last bit.
        `load_horovod` must have been called.
        """
        import horovod.torch as hvd

        self.rank = formation.rank
        self.size = formation.size
        self._hvd = hvd
        os.environ.update(_environment(formation, FUSED_BYTES if fuses else 0))
        try:
            hvd.init()
        except Exception as error:
            hvd.shutdown()
            raise Interrupted(
                f"world {formation.name} of generation {formation.generation} did not form: {error}"
            ) from error
        finally:
            # Horovod reads them only while it forms the world; later processes of the task must not inherit them.
            os.environ.update(dict.fromkeys(_SECRETS, ""))

    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Work:
        """Start an in-place ring all-reduce. Raises `Interrupted` if it cannot start."""
        op = self._hvd.Sum if operation == "sum" else self._hvd.Max
        try:
            return _HorovodWork(self._hvd, self._hvd.allreduce_async_(tensor, op=op, name=name))
        except Exception as error:
            raise Interrupted(f"cannot start the all-reduce of {name}: {error}") from error

    def gather(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        """See `World`. Raises `Interrupted` if it cannot start."""
        return self._start("allgather", _bytes(tensor), _bytes(into), name)

    def exchange(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        """See `World`. Raises `Interrupted` if it cannot start."""
        return self._start("alltoall", _bytes(tensor), _bytes(into), name)

    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        """See `World`. Raises `Interrupted` if it cannot start."""
        return self._start("reducescatter", tensor.view(-1), into.view(-1), name, op=self._hvd.Sum)

    def _start(self, what: str, tensor: torch.Tensor, into: torch.Tensor, name: str, **options: Any) -> Work:
        try:
            return _HorovodWork(self._hvd, getattr(self._hvd, f"{what}_async")(tensor, name=name, **options), into)
        except Exception as error:
            raise Interrupted(f"cannot start the {what} of {name}: {error}") from error

    def close(self) -> None:
        """Shut Horovod down in this process; it can be initialised again."""
        # Horovod discards operations that were never synchronised at its next `init`.
        self._hvd.shutdown()


class _HorovodWork:
    def __init__(self, hvd: Any, handle: int, into: torch.Tensor | None = None) -> None:
        """Follow the operation of this handle; copy its result to `into`, if Horovod allocates the result."""
        self._hvd = hvd
        self._handle = handle
        self._into = into

    def ended(self, within_s: float) -> bool:
        try:
            return bool(self._hvd.mpi_ops.mpi_lib.horovod_torch_wait(self._handle, within_s))
        except Exception as error:
            # Horovod's own thread has stopped because a peer is gone, and no longer knows any handles.
            raise Interrupted(f"the world is broken: {error}") from error

    def finish(self) -> None:
        try:
            found = self._hvd.synchronize(self._handle)
        except Exception as error:
            raise Interrupted(f"a collective failed: {error}") from error
        if self._into is not None:
            # Horovod's alltoall also returns the number of rows from each member.
            self._into.copy_(found[0] if isinstance(found, tuple) else found)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor's bytes, which Horovod moves whatever they mean."""
    return tensor.view(-1).view(torch.uint8)


def _environment(formation: Invitation, fused_bytes: int) -> dict[str, str]:
    values = (
        formation.rank,
        formation.size,
        f"{formation.name}-{formation.rank}",
        *formation.server,
        interface_of(formation.address),
        max(1, round(formation.timeout_s)),
        fused_bytes,
        formation.credentials.token,
        ",".join(formation.credentials.link_keys),
    )
    return dict(zip(_OF_A_WORLD, map(str, values), strict=True))


def interface_of(address: str) -> str:
    """Return the name of the network interface that has `address`. Raises `Interrupted` if none has."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    raise Interrupted(f"no network interface of this node has the address {address}")
