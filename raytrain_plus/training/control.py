"""Between a worker's control calls and its training thread: wishes go one way, what the thread is doing the other."""

from __future__ import annotations

import time
from typing import Literal

from raytrain_plus.errors import Interrupted
from raytrain_plus.training.records import Activity

Doing = Literal["idle", "preparing", "joining", "data", "computing", "collective", "applying", "saving", "leaving"]
"""What a training thread can be doing; see `elastic.watch` for which of them wait for other members."""


class Control:
    """Set from any thread; the training thread looks at it at every microbatch, gradient, and wait.

    Wishes name the generation they are for, so one that comes early waits for its generation, and one that comes late
    has no effect.
    """

    def __init__(self) -> None:
        self._generation = -1
        self._pause_at = self._interrupt_at = self._save_at = -2
        self._limit_s = float("inf")
        self._doing: tuple[Doing, float, float] = ("idle", time.monotonic(), self._limit_s)

    @property
    def generation(self) -> int:
        """The generation that this worker is or was last in; -1 before any."""
        return self._generation

    def begin(self, generation: int) -> None:
        """A new generation begins."""
        self._generation = generation

    def pause(self, generation: int) -> None:
        """Wishes that the group stops at a step boundary."""
        self._pause_at = max(self._pause_at, generation)

    def save(self, generation: int) -> None:
        """Wishes that the group makes a checkpoint, once."""
        self._save_at = max(self._save_at, generation)

    def saving(self) -> bool:
        """Whether a checkpoint is wished for."""
        return self._save_at >= self._generation

    def saved(self) -> None:
        """The wish for a checkpoint is fulfilled."""
        self._save_at = -2

    def interrupt(self, generation: int) -> None:
        """Wishes that this worker leaves its world at once."""
        self._interrupt_at = max(self._interrupt_at, generation)

    def pausing(self) -> bool:
        """Whether a pause is wished for."""
        return self._pause_at >= self._generation

    def interrupted(self) -> bool:
        """Whether this worker is to leave its world."""
        return self._interrupt_at >= self._generation

    def over(self, generation: int) -> bool:
        """Whether there is nothing more to do in that generation, which may not have begun here."""
        return self._interrupt_at >= generation or self._generation > generation

    def check(self) -> None:
        """Raises `Interrupted` where this worker is to leave its world."""
        if self.interrupted():
            raise Interrupted("the group changes")

    def patience(self, limit_s: float) -> None:
        """From now on, nothing that the thread does should last longer than so many seconds."""
        self._limit_s = limit_s

    def enter(self, doing: Doing) -> None:
        """Says what the training thread does from now on."""
        self._doing = (doing, time.monotonic(), self._limit_s)

    def activity(self) -> Activity:
        """What the training thread does, since when, and for how long it may."""
        doing, since, limit_s = self._doing
        return Activity(doing=doing, since_s=time.monotonic() - since, limit_s=limit_s)
