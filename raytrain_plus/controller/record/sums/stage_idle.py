"""Measure how much of their time the stages of a replica wait for one another, and record one step to draw. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from raytrain_plus.membership.view import View
from raytrain_plus.parallel.pipeline.timeline import Bar
from raytrain_plus.training.exchange.step_records import StepRecord

Drawing = Mapping[tuple[int, int], tuple[Bar, ...]]
"""(replica, stage) -> its activities, with times in seconds since the first of them began."""


class Bubble:
    """Accumulates what the members of a run's views report."""

    def __init__(self) -> None:
        self._busy_s = 0.0
        self._whole_s = 0.0
        self._open: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
        """(step, replica) -> for each of its members that has reported: busy seconds, start, end."""
        self._per_replica = 1
        self._places: dict[str, tuple[int, int]] = {}
        self._drawn: set[str] = set()
        self._bars: dict[str, tuple[Bar, ...]] = {}
        self._step = -1

    def formed(self, view: View) -> None:
        """Set the members for the following reports."""
        self._places = {member.worker: (member.place.replica, member.place.stage) for member in view.members}
        # Those that share the slices of a stage make the same passes at the same time.
        self._drawn = {member.worker for member in view.members if not member.place.tensor_rank}
        self._per_replica = view.shape.size // view.shape.replicas if view.shape.stages > 1 else 1
        self._bars, self._open = {}, {}

    def report(self, worker: str, record: StepRecord, offset_s: float) -> Drawing | None:
        """Accept a member's step; return the step's drawing once it is complete.

        A replica in one stage waits for none. `offset_s` converts the member's clock to ours.
        """
        if worker not in self._places or record.passes is None or self._per_replica == 1:
            return None
        start, end = record.passes
        told = self._open.setdefault((record.step, self._places[worker][0]), [])
        told.append((record.busy_s, start + offset_s, end + offset_s))
        if len(told) == self._per_replica:
            del self._open[record.step, self._places[worker][0]]
            self._busy_s += sum(busy for busy, _, _ in told)
            self._whole_s += self._per_replica * (max(end for _, _, end in told) - min(start for _, start, _ in told))
        if not record.bars or worker not in self._drawn:
            return None
        if record.step != self._step:
            self._step, self._bars = record.step, {}
        self._bars[worker] = tuple(
            replace(bar, start=bar.start + offset_s, end=bar.end + offset_s) for bar in record.bars
        )
        if self._bars.keys() != self._drawn:
            return None
        began = min(bar.start for bars in self._bars.values() for bar in bars)
        return {
            self._places[worker]: tuple(replace(bar, start=bar.start - began, end=bar.end - began) for bar in bars)
            for worker, bars in sorted(self._bars.items(), key=lambda one: self._places[one[0]])
        }

    @property
    def share(self) -> float | None:
        """The share of the time from a replica's first pass of a step to its last in which its stages did not compute.

        None for a model without stages.
        """
        return max(0.0, 1.0 - self._busy_s / self._whole_s) if self._whole_s > 0 else None
