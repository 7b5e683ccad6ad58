"""Define what a run's journal asks of those that listen to the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

Evaluations = Mapping[int, Mapping[str, float]]
"""Metrics of the evaluations that count, by step."""


class Listeners(Protocol):
    """The listeners of a run, as its journal sees them."""

    def begin(self, behind: int, evaluated: Callable[[], Evaluations]) -> None:
        """Start them. `behind`: where the log of this controller begins, see `trackers.bookmark`."""

    def news(self) -> Sequence[str]:
        """Return what is to be reported since the last call, as sentences."""

    def finish(self, status: str, meanwhile: Callable[[], None]) -> None:
        """Wait until they have heard of the whole log, but not too long, and end them: the run has this status.

        `meanwhile` is called about every second.
        """

    def abandon(self) -> None:
        """End them at once: the run belongs to another controller."""
