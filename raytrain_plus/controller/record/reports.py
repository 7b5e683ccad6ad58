"""Collect what workers report beside the steps that count: their clocks, readings, profiles and remarks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

from raytrain_plus.controller.record.journal import Journal
from raytrain_plus.controller.record.sums.pending_steps import PendingSteps
from raytrain_plus.controller.record.sums.stage_idle import Bubble, Drawing
from raytrain_plus.controller.roster.clocks import Clocks
from raytrain_plus.membership.view import View
from raytrain_plus.observe.expert_use import ExpertsReported, ExpertsUsed
from raytrain_plus.observe.gauges import Gauges
from raytrain_plus.observe.gpu_use import GpuUse, GpuUses
from raytrain_plus.observe.step_profile import Profiled, StepProfile
from raytrain_plus.observe.views.picture import svg, trace
from raytrain_plus.runs.folder import PICTURE, TRACE
from raytrain_plus.storage.interface import Folder
from raytrain_plus.training.exchange.step_records import Record, Remark, StepRecord
from raytrain_plus.workers.messages import WorkerLocation


class Reports:
    """What the workers of a run have reported."""

    def __init__(self, run: Folder, journal: Journal, gauges: Gauges) -> None:
        """Begin without any; a picture of a step goes to the run's folder, and remarks to the journal."""
        self._run, self._journal, self._gauges = run, journal, gauges
        self.locations: dict[str, WorkerLocation] = {}
        """Where the workers are, or were."""
        self.clocks = Clocks()
        self._bubble = Bubble()
        self._gathered = PendingSteps()
        self._gpus = GpuUses()
        self.experts = ExpertsReported()
        self._profile = StepProfile()
        self._remarked: set[str] = set()
        """The keys of the remarks that are reported."""
        self.noted: Set[str] = frozenset()
        """The texts of those that another controller of this start of the run has reported."""

    def joined(self, location: WorkerLocation) -> None:
        """Record that a worker's process has started."""
        self.locations[location.worker] = location
        self.clocks.record_start(location.worker)

    def on_our_clock(self, worker: str, time: float) -> float:
        """Return a time of that worker, in Unix seconds, by the controller's clock."""
        return time + self.clocks.offset(worker)

    def formed(self, view: View) -> None:
        """Record that a generation trains."""
        self._bubble.formed(view)

    def take(self, worker: str, records: Sequence[Record], committed: int) -> list[StepRecord]:
        """Record what a worker has reported; return its steps, with times by the controller's clock.

        `committed`: the highest step that is committed.
        """
        steps = [record for record in records if isinstance(record, StepRecord)]
        for one in records:
            if isinstance(one, Profiled):
                self._profile.add(worker, one)
            elif isinstance(one, Remark):
                self._remark(one)
            elif isinstance(one, GpuUse):
                self._gauges.gpu(worker, one)
                self._gpus.add(worker, one)
            elif isinstance(one, ExpertsUsed):
                self.experts.add(one)
        for record in steps:
            self._gauges.worked(worker, record)
            for remark in record.remarks:
                self._remark(remark)
            if record.step > committed:
                self._gathered.add(record)
            drawing = self._bubble.report(worker, record, self.clocks.offset(worker))
            if drawing is not None:
                self._draw(record.step, drawing)
        return [self.clocks.ours(worker, record) for record in steps]

    def whole(self, record: StepRecord) -> StepRecord:
        """Return the record of a committed step with what several workers have reported of it."""
        return self._gathered.whole(record)

    def forget_pending(self) -> None:
        """Forget what was reported of steps that are not committed."""
        self._gathered.clear()
        self.experts.clear()

    def gpu_fields(self, members: Sequence[str], now: float) -> Mapping[str, Any]:
        """Return the readings of these workers' GPUs as fields of an event, now and then."""
        return self._gpus.fields(members, now)

    def profile(self, committed: int) -> Mapping[str, Any] | None:
        """Return the profile of the committed steps; None if none was profiled."""
        return self._profile.to_json(committed)

    @property
    def bubble(self) -> float | None:
        """The share of their time in which stages were idle; None without stages."""
        return self._bubble.share

    def _remark(self, remark: Remark) -> None:
        """Report a remark, once."""
        if remark.key not in self._remarked:
            self._remarked.add(remark.key)
            if remark.text not in self.noted:
                self._journal.note(remark.text)

    def _draw(self, step: int, drawing: Drawing) -> None:
        title = f"step {step + 1}, generation {self._journal.generation}"

        def draw() -> None:
            self._run.write(PICTURE, [svg(drawing, title).encode()])
            self._run.write(TRACE, [json.dumps(trace(drawing)).encode() + b"\n"])

        self._journal.later(draw, "the picture of a step cannot be written")
