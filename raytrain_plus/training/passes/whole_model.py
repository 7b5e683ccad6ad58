"""The passes of a step on a worker that holds the whole model: the microbatches of its shards, one after the other.

The gradients of all hosted shards are summed before anything is sent (gradient accumulation). In the last backward pass
buckets are submitted as they fill.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from raytrain_plus.collective.world import Work
from raytrain_plus.data.values.collate import counts_tokens, default_weight
from raytrain_plus.device_copies import Numbers, read_together
from raytrain_plus.parallel.pipeline.timeline import Bar
from raytrain_plus.task import Task
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.header import ShardReport
from raytrain_plus.training.exchange.step_metrics import OwnMetrics
from raytrain_plus.training.exchange.thread_control import RowSpan
from raytrain_plus.training.exchange.verdict import SumStatus
from raytrain_plus.training.passes.metric_sums import MetricSums, ShardBatches, checked
from raytrain_plus.training.passes.microbatch_loss import MicrobatchLoss
from raytrain_plus.training.passes.passes import OneWorker, Passes, Shards
from raytrain_plus.training.passes.shard_reports import ShardReports
from raytrain_plus.training.update.fault_search import FaultSearch
from raytrain_plus.training.update.train_state import TrainState


class WholePasses(OneWorker, Passes):
    """See `passes.Passes`: the model is one chunk."""

    bars: Sequence[Bar] = ()
    chunks = (0,)

    def __init__(self, state: TrainState) -> None:
        """Prepare to run the whole model, which `state` is of."""
        self._state = state
        [self._part] = state.parts
        self._task, self._shards, self._rider = state.task, state.shards, state.sums.rider
        self._loss = MicrobatchLoss(state)
        self.metrics = OwnMetrics()
        self._reports = ShardReports()

    @property
    @override
    def weight(self) -> float | None:
        return self._reports.weight()

    @property
    @override
    def unread(self) -> list[Numbers]:
        return [*self._reports.unread, *self._part.buffers.unread]

    @override
    def run(self, step: int, shards: Shards, context: StepContext, search: FaultSearch | None = None) -> list[Work]:
        part, control, works = self._part, context.control, list[Work]()
        before, reports = part.writes(), ShardReports(_reports_of(shards))
        self._reports = reports
        # Microbatches without rows are passed over.
        places = [(shard, index) for shard in sorted(shards) for index, one in enumerate(shards[shard]) if one.rows]
        last_of = dict(places)
        first, passed, used = True, 0, 0
        for number, (shard, index) in enumerate(places, 1):
            one, ends_step = shards[shard][index], number == len(places)
            ends_shard = index == last_of[shard]
            place = RowSpan(step, shard, passed, one.rows + len(one.skipped))
            passed, used = passed + place.rows, used + one.rows
            control.check()
            control.compute(place, "forward")
            part.buffers.renew(committed=first)
            with part.forward(step, shard, index, before) as keyed:
                loss, weight = self._loss.objective(part.module, one, place, reports)
            if ends_shard:
                part.buffers.end_shard(shard, used)
                passed = used = 0
            first = ends_shard
            if ends_step:
                self._write_header(context)
            control.check()
            control.compute(place, "backward")
            keyed.backward()
            part.gradients.weigh(weight)
            with (
                part.keys.opened(keyed),
                # Nothing reads what a shard's last microbatch leaves in the buffers.
                nullcontext() if ends_shard else part.buffers.swapped(part.buffers.seen()),
                # Gradients cannot be searched after they are submitted.
                self._summing(works, context) if ends_step and search is None else nullcontext(),
            ):
                torch.autograd.backward(loss)
            if ends_shard and search is not None:
                search.shard_ended(shard, 0, part.parameters)
            if ends_shard and not ends_step:
                part.gradients.end_shard()
        if not places:
            self._write_header(context)
        if search is not None or not places:
            with self._summing(works, context):
                pass
        return works

    def _write_header(self, context: StepContext) -> None:
        """Write what is known after the last forward pass; a request made during the step is seen at its end."""
        self.metrics = OwnMetrics()
        if self._rider.alone:
            # The losses are read with all else that the step must know.
            self._rider.write_later(lambda: self._header(context), self.metrics)
        else:
            self._rider.write(self._header(context), self.metrics)
        self._rider.write_buffers(context.world.rank)

    def _header(self, context: StepContext) -> npt.NDArray[np.int64]:
        """Return the header, and fill the metrics that go with it. Raises `TrainingError` for a changed buffer."""
        read_together(self.unread)
        self._part.buffers.check_refused()
        encoded, own = self._reports.encoded(self._shards, context.flags())
        self.metrics.names, self.metrics.sums = own.names, own.sums
        return encoded

    @contextmanager
    def _summing(self, works: list[Work], context: StepContext) -> Iterator[None]:
        """Submit the buffers that do not travel with the header; while open, submit gradients as they are complete."""
        works += self._rider.submit_buffers(context.world)
        with self._part.gradients.reducing(context.world, context.control.check) as started:
            yield
        works += started

    @override
    def metric_sums(self, batches: ShardBatches, hosted: Sequence[int], context: StepContext) -> MetricSums:
        part, control, found = self._part, context.control, MetricSums()
        summarised = type(self._task).summarise is not Task.summarise
        for shard in hosted:
            found.begin(shard)
            control.enter("data")
            for index, one in enumerate(batches(shard)):
                control.check()
                found.skipped[shard] += len(one.skipped)
                if not one.rows:
                    continue
                control.enter("computing")
                if not found.rows[shard]:
                    part.buffers.restore()
                weight = default_weight(self._task, one.batch, one.rows)
                with part.evaluating(shard, index):
                    given = self._loss.metrics(part.module, one.batch, one.rows)
                means, outputs = checked(given, one.rows, summarised, weight, counts_tokens(self._task))
                found.outputs.setdefault(shard, []).append(outputs)
                found.add(shard, one.rows, means)
                control.enter("data")
        return found

    def agree(self, step: int, status: SumStatus, context: StepContext) -> SumStatus:
        """See `passes.ReplicaPasses`.

        Other replicas can copy a step that this one has applied, unless each changes rows of its own.
        """
        if self._state.exchange is not None:
            context.reduce(torch.zeros(1), "summed", f"the other workers' gradient sums of step {step}")
        return status


def _reports_of(shards: Shards) -> dict[int, ShardReport]:
    """Return the reports of shards without the rows that are left out, before any forward pass."""
    skipped = {shard: sum(len(one.skipped) for one in found) for shard, found in shards.items()}
    return {shard: ShardReport(shards[shard][0].start, skipped=count) for shard, count in skipped.items() if count}
