"""The surroundings of a step: its world, the requests to its thread, and the limit of its waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from raytrain_plus.collective.world import Operation, Work, World, wait
from raytrain_plus.training.exchange.header import Flags
from raytrain_plus.training.exchange.thread_control import Control


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """Everything that the steps of one generation share, besides their batches."""

    world: World
    """The members that hold the same layers; sums run over it."""
    control: Control
    wait_s: float
    """Limit, in seconds, of one collective."""
    flags: Callable[[], Flags] = Flags
    """Returns the flags that this worker raises."""
    meanwhile: Callable[[], None] = lambda: None
    """Called once this worker's own part of a step is computed, before the wait for the others."""

    def wait(self, works: Sequence[Work], what: str) -> None:
        """Wait for collectives. Raises `Interrupted` if the world breaks, or `WaitExpired` after `wait_s` in one."""
        with self.control.within("exposed"):
            wait(works, what, self.wait_s, self.control.interrupted)

    def reduce(self, tensor: torch.Tensor, name: str, what: str, operation: Operation = "sum") -> None:
        """Replace `tensor` by its sum or maximum over the members; raises the errors of `wait`."""
        self.wait([self.world.reduce(tensor, name, operation)], what)
