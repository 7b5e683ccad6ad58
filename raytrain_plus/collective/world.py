"""A world: a set of workers that can sum tensors together, for one generation. Never patched, never reused.

Implementations: `solo` (one worker), `horovod` (its ring), `torch` (torch.distributed with Gloo). All pass one contract
test. Operations are asynchronous, in place, and matched by name, so every member must submit the same names.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, Protocol

import torch

from raytrain_plus.errors import Interrupted, WaitExpired

Operation = Literal["sum", "max"]


class Work(Protocol):
    """One operation under way."""

    def done(self) -> bool:
        """Whether it has ended, well or not; never blocks. Raises `Interrupted` where the world itself is broken."""

    def finish(self) -> None:
        """Takes the result of an operation that is done. Raises `Interrupted` where it failed."""


class World(Protocol):
    """The members' side of a world."""

    rank: int
    size: int

    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Work:
        """Starts replacing `tensor` (contiguous; float32, float64 or int64) by its sum or maximum over the members."""

    def close(self) -> None:
        """Leaves the world and frees what it held. Safe to call after an error."""


class Transfer(Protocol):
    """A tensor on its way from one member to another."""

    def finish(self, what: str) -> None:
        """Waits until it has arrived. Raises `Interrupted`, saying `what` was waited for, where the world breaks."""


_SPIN_S = 0.002
"""For so long a wait yields between looks; later it sleeps longer and longer."""


def wait(work: Work, what: str, timeout_s: float, interrupted: Callable[[], bool] = lambda: False) -> None:
    """Waits for `work` by polling with short sleeps, so that an interrupt is seen at once.

    Raises `Interrupted` where the operation failed or `interrupted` says so, `WaitExpired` after `timeout_s`.
    """
    start = time.monotonic()
    while not work.done():
        waited = time.monotonic() - start
        if interrupted():
            raise Interrupted(f"left the wait for {what}")
        if waited > timeout_s:
            raise WaitExpired(f"{what} did not complete within {timeout_s:g} s: a worker is stuck or gone")
        time.sleep(0.00005 if waited < _SPIN_S else min(0.001, waited / 20))
    work.finish()
