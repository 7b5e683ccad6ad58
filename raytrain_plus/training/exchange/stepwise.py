"""What a task implements that is told of each step: where the run stands, and what it remembers of the steps before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

Remembered = Mapping[str, Any]
"""Values of JSON. They are part of the training state, so they are the same on all workers."""


@runtime_checkable
class Stepwise(Protocol):
    """A task that is told of each step."""

    def remembers(self) -> bool:
        """Whether `remembered` ever returns anything; the same on all workers."""

    def begin_step(self, step: int, remembered: Remembered) -> None:
        """Hear that a step is computed, for the first time or again, or that the state before it is evaluated.

        `remembered`: after the step before.
        """

    def remembered(self, before: Remembered, metrics: Mapping[str, float]) -> Remembered:
        """Return what is remembered after a step with these means, which are the same on all workers.

        Called before anything of the step changes; what it raises leaves the state as it is.
        """

    def stops(self) -> bool:
        """Return whether the run is to stop, which was asked for in the last step."""
