"""Link between a worker's control calls and its training thread: requests in, current activity out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple, Protocol

from raytrain_plus.errors import Interrupted
from raytrain_plus.observe.step_profile import Phase
from raytrain_plus.training.exchange.step_records import Activity

Doing = Literal["idle", "preparing", "joining", "data", "computing", "collective", "applying", "saving", "leaving"]
"""Activities of a training thread. `membership.hang_detection` says which of them wait for other members."""


class RowSpan(NamedTuple):
    """The rows of a microbatch."""

    step: int
    shard: int
    offset: int
    """The number of the shard's rows of that step before them."""
    rows: int


class Watch(Protocol):
    """The watch of a step that is profiled."""

    @property
    def phase(self) -> Phase:
        """The current phase."""

    def enter(self, phase: Phase) -> None:
        """Begin a phase of the step."""

    def look(self) -> None:
        """Record which sums have ended by now."""


class Control:
    """Requests to the training thread, set from any thread; it checks them at every microbatch, gradient and wait.

    A request names its generation. A request that comes early waits for its generation; one that comes late has no
    effect.
    """

    def __init__(self) -> None:
        self._generation = -1
        self._pause_at = self._interrupt_at = self._save_at = -2
        self._limit_s = float("inf")
        self._doing: tuple[Doing, float, float] = ("idle", time.monotonic(), self._limit_s)
        self.place: RowSpan | None = None
        """The rows that the training thread computes with; None if it does something else."""
        self.watch: Watch | None = None
        """Hears of the training thread's phases while a step is profiled."""

    @property
    def generation(self) -> int:
        """The current or last generation of this worker; -1 before any."""
        return self._generation

    def begin(self, generation: int) -> None:
        """Enter a new generation."""
        self._generation = generation

    def pause(self, generation: int) -> None:
        """Request that the group stops at a step boundary."""
        self._pause_at = max(self._pause_at, generation)

    def save(self, generation: int) -> None:
        """Request one checkpoint of the group."""
        self._save_at = max(self._save_at, generation)

    def save_requested(self) -> bool:
        """Return whether a checkpoint is requested."""
        return self._save_at >= self._generation

    def clear_save_request(self) -> None:
        """Clear the request for a checkpoint."""
        self._save_at = -2

    def interrupt(self, generation: int) -> None:
        """Request that this worker leaves its world at once."""
        self._interrupt_at = max(self._interrupt_at, generation)

    def pause_requested(self) -> bool:
        """Return whether a pause is requested."""
        return self._pause_at >= self._generation

    def interrupted(self) -> bool:
        """Return whether this worker must leave its world."""
        return self._interrupt_at >= self._generation

    def over(self, generation: int) -> bool:
        """Return whether nothing is left to do in that generation, which may not have begun here."""
        return self._interrupt_at >= generation or self._generation > generation

    def check(self) -> None:
        """Raise `Interrupted` if this worker must leave its world."""
        if self.interrupted():
            raise Interrupted("the group is changing")
        if self.watch is not None:
            self.watch.look()

    def set_limit(self, limit_s: float) -> None:
        """Set the limit, in seconds, of each following activity of the training thread."""
        self._limit_s = limit_s

    def enter(self, doing: Doing, phase: Phase = "rest") -> None:
        """Record the activity of the training thread from now on, and its phase in a step that is profiled."""
        self._doing = (doing, time.monotonic(), self._limit_s)
        self.place = None
        if self.watch is not None:
            self.watch.enter(phase)

    def compute(self, place: RowSpan, phase: Phase) -> None:
        """Record that the training thread computes with these rows from now on."""
        self.enter("computing", phase)
        self.place = place

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Open for a phase of a step that is profiled, after which the one before continues."""
        watch = self.watch
        if watch is None:
            yield
            return
        before = watch.phase
        watch.enter(phase)
        try:
            yield
        finally:
            watch.enter(before)

    def activity(self) -> Activity:
        """Return what the training thread does, for how long it has done so, and the limit."""
        doing, since, limit_s = self._doing
        return Activity(doing=doing, since_s=time.monotonic() - since, limit_s=limit_s)
