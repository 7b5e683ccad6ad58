"""Watch the phases of a profiled step, and its sums, from the training thread."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.profiler import record_function
from typing_extensions import override

from raytrain_plus.collective.world import FixedTransport, Operation, Work, World
from raytrain_plus.device_clock import Mark
from raytrain_plus.observe.step_profile import Change, Phase, Sum

PREFIX = "raytrain_plus."
"""How the names of phases begin in a trace."""


class PhaseWatch:
    """Records the phases of one step, also as ranges of a trace; see `thread_control.Watch`. One thread calls it."""

    def __init__(self, mark: Callable[[], Mark] = Mark, clock: Callable[[], float] = time.perf_counter):
        """Begin in the phase `rest`.

        `mark`: marks a moment of the device's work. `clock`: that of the host, which submits sums and sees their ends.
        """
        self._mark = mark
        self._clock = clock
        self._changes: list[tuple[Mark, Phase]] = [(mark(), "rest")]
        self._end: Mark | None = None
        self._open: list[WatchedWork] = []
        self.sums: list[Sum] = []
        """The sums that have ended."""
        self._range = self._named("rest")

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return self._changes[-1][1]

    def enter(self, phase: Phase) -> None:
        """Begin a phase."""
        if phase != self.phase:
            if self.phase == "backward":
                # What has ended by the end of a pass was hidden behind it.
                self.look()
            self._range.__exit__(None, None, None)
            self._changes.append((self._mark(), phase))
            self._range = self._named(phase)

    def look(self) -> None:
        """Record which sums have ended by now. Raises `Interrupted` if the world is broken."""
        for work in list(self._open):
            work.ended(0.0)

    def close(self) -> None:
        """End the last phase."""
        self._range.__exit__(None, None, None)
        self._end = self._mark()

    @property
    def end(self) -> Mark:
        """The end of the last phase."""
        assert self._end is not None, "it is closed"
        return self._end

    def times(self) -> tuple[list[Change], float]:
        """Return when each phase began on the device, and when the last one ended, on the host's clock.

        The device must be past the end.
        """
        first, _ = self._changes[0]
        # The optimizer begins when the host has read what it must know of the step: then both are at one place.
        meeting = next((mark for mark, phase in self._changes if phase == "optimizer"), first)
        begin = meeting.host - first.seconds_to(meeting)
        changes = [Change(begin + first.seconds_to(mark), phase) for mark, phase in self._changes]
        return changes, begin + first.seconds_to(self.end)

    def watched(self, work: Work) -> Work:
        """Return the same work, whose end is recorded."""
        self._open.append(found := WatchedWork(self, work, self._clock()))
        return found

    def ended(self, work: WatchedWork) -> None:
        """Record that a sum has ended."""
        if work in self._open:
            self._open.remove(work)
            self.sums.append(Sum(work.begin, self._clock()))

    def _named(self, phase: Phase) -> record_function:
        opened = record_function(f"{PREFIX}{phase}")
        opened.__enter__()
        return opened


class WatchedWork(Work):
    """A `world.Work` that tells a watch when it is seen to have ended."""

    def __init__(self, watch: PhaseWatch, work: Work, begin: float) -> None:
        self._watch = watch
        self._work = work
        self.begin = begin
        """When it was submitted."""

    @override
    def ended(self, within_s: float) -> bool:
        ended = self._work.ended(within_s)
        if ended:
            self._watch.ended(self)
        return ended

    @override
    def finish(self) -> Work | None:
        following = self._work.finish()
        self._watch.ended(self)
        return None if following is None else self._watch.watched(following)


class WatchedWorld(FixedTransport, World):
    """A world whose sums a watch records."""

    def __init__(self, world: World, watch: PhaseWatch) -> None:
        self._world = world
        self._watch = watch
        self.rank, self.size = world.rank, world.size

    @override
    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Work:
        return self._watch.watched(self._world.reduce(tensor, name, operation))

    @override
    def gather(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        return self._watch.watched(self._world.gather(tensor, into, name))

    @override
    def exchange(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        return self._watch.watched(self._world.exchange(tensor, into, name))

    @override
    def reduce_scatter(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Work:
        return self._watch.watched(self._world.reduce_scatter(tensor, into, name))

    @override
    def close(self) -> None:
        self._world.close()
