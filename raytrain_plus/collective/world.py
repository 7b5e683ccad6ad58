"""A world: a set of workers that can sum tensors together, for one generation. Never patched, never reused.

Implementations: `solo` (one worker), `horovod_world` (its ring), `torch_world` (torch.distributed with Gloo); for the
tensors of GPUs `staged` and `nccl_world`, beside one of these. All pass one contract test. Operations are asynchronous
and in place. Some match them by name and some by order, so every member must submit the same names in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch

from raytrain_plus.errors import Interrupted, WaitExpired

Operation = Literal["sum", "max"]


class Work(Protocol):
    """One operation under way."""

    def ended(self, within_s: float) -> bool:
        """Return whether it has ended, successfully or not, after waiting for at most `within_s` seconds.

        Raises `Interrupted` if the world itself is broken.
        """

    def finish(self) -> Work | None:
        """Take the result of an operation that has ended; start and return the one that follows it, if any.

        Raises `Interrupted` if it failed.
        """


class SwitchableTransport(Protocol):
    """A world that may later use another way, which all its members begin at once."""

    @property
    def forming(self) -> bool:
        """Whether the other way is not ready here yet, which all members are to use from the same step on."""

    def use_formed(self) -> None:
        """Use the other way from now on, if there is one; it is ready on all members."""

    def begin_to_leave(self) -> None:
        """Begin to end what a GPU does here, whatever others do. It is then left by `close`, and not used before."""

    @property
    def switched(self) -> bool:
        """Whether the other way is used."""

    @property
    def why_never(self) -> str:
        """Why the other way will never be ready here; empty if it will, or is."""


class World(SwitchableTransport, Protocol):
    """A member's interface to a world."""

    rank: int
    size: int

    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Work:
        """Start to replace `tensor` (contiguous; float32, float64 or int64) by its sum or maximum over the members."""

    def gather(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        """Start to fill `into` with every member's `tensor`, by rank. Both are contiguous, of any dtype."""

    def exchange(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        """Start to send each member its part of `tensor`, by rank, and to fill `into` with the parts for this one.

        `tensor` and `into` consist of `size` equal parts; both are contiguous, of any dtype.
        """

    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        """Start to fill `into` with this member's part of the sum of every member's `tensor`.

        `tensor` consists of `size` parts like `into`; both are contiguous, and float32 or float64.
        """

    def close(self) -> None:
        """Leave the world and free its resources. Safe to call after an error."""


class FixedTransport:
    """A `SwitchableTransport` that never switches."""

    forming = switched = False
    why_never = ""

    def use_formed(self) -> None:
        """Do nothing: there is no other way."""

    def begin_to_leave(self) -> None:
        """Do nothing: the GPU does nothing here."""


class Transfer(Protocol):
    """A tensor on its way from one member to another."""

    def finish(self, what: str) -> None:
        """Wait until it has arrived. Raises `Interrupted`, naming `what`, if the world breaks."""


LOOK_S = 0.02
"""Seconds for which a wait sleeps before it looks for an interrupt again; the end of the operation wakes it."""


def wait(works: Sequence[Work], what: str, timeout_s: float, interrupted: Callable[[], bool] = lambda: False) -> None:
    """Wait for `works`, then for those that follow them, each in order: every member starts them in the same order.

    `what` describes them. Raises `Interrupted` if an operation failed or `interrupted` returns True, `WaitExpired`
    after `timeout_s` seconds in one operation.
    """
    while works:
        following = []
        for work in works:
            _await(work, what, timeout_s, interrupted)
            following.append(work.finish())
        works = [work for work in following if work is not None]


def _await(work: Work, what: str, timeout_s: float, interrupted: Callable[[], bool]) -> None:
    start = time.monotonic()
    while not work.ended(LOOK_S):
        if interrupted():
            raise Interrupted(f"stopped waiting for {what}")
        if time.monotonic() - start > timeout_s:
            raise WaitExpired(f"{what} did not complete within {timeout_s:g} s: a worker is stuck or gone")
