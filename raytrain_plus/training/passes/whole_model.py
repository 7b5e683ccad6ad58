"""The passes of a step on a worker that holds the whole model: the microbatches of its shards, one after the other.

The gradients of all hosted shards are summed before anything is sent (gradient accumulation). In the last backward pass
buckets are submitted as they fill.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import override

from raytrain_plus.collective.world import Work
from raytrain_plus.data.values.collate import counts_tokens, default_weight
from raytrain_plus.device_copies import BatchCopies, Numbers, read_together, to_device
from raytrain_plus.parallel.pipeline.timeline import Bar
from raytrain_plus.state.holding import MEAN_LOSS, WEIGHTED
from raytrain_plus.task import Task
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.header import ShardReport, encode
from raytrain_plus.training.exchange.step_metrics import OwnMetrics, own_metrics
from raytrain_plus.training.exchange.thread_control import RowSpan
from raytrain_plus.training.exchange.verdict import SumStatus
from raytrain_plus.training.passes.metric_sums import MetricSums, ShardBatches, checked
from raytrain_plus.training.passes.passes import Passes, Shards
from raytrain_plus.training.passes.shard_reports import ShardReports
from raytrain_plus.training.passes.task_loss import held_out_metrics, objective
from raytrain_plus.training.update.fault_search import FaultSearch
from raytrain_plus.training.update.train_state import TrainState


class WholePasses(Passes):
    """See `passes.Passes`: a model replica of one worker, which has nobody to exchange anything with."""

    bars: Sequence[Bar] = ()
    chunks = (0,)
    is_last = True

    def __init__(self, state: TrainState) -> None:
        """Prepare to run the whole model, which `state` is of."""
        self._state = state
        [self._part] = state.parts
        self._task, self._device, self._shards = state.task, state.device, state.shards
        self._sums, self._rider = state.sums, state.sums.rider
        self._on_device = BatchCopies(state.device)
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
                loss, weight = objective(
                    self._task,
                    part.module,
                    one,
                    place,
                    self._on_device,
                    reports,
                    self._sums.loss_factor,
                    mean=self._state.rules[MEAN_LOSS],
                )
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
        reports = self._reports.read()
        own = own_metrics({shard: report.metrics for shard, report in reports.items()}, self._shards)
        self.metrics.names, self.metrics.sums = own.names, own.sums
        return encode(reports, self._shards, context.flags())

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
                weight, batch = default_weight(self._task, one.batch, one.rows), to_device(one.batch, self._device)
                with part.evaluating(shard, index):
                    given = held_out_metrics(
                        self._task, part.module, batch, one.rows, weighted=self._state.rules[WEIGHTED]
                    )
                means, outputs = checked(given, one.rows, summarised, weight, counts_tokens(self._task))
                found.outputs.setdefault(shard, []).append(outputs)
                found.add(shard, one.rows, means)
                control.enter("data")
        return found

    @override
    def share_metrics(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        return metrics

    @override
    def exchange_tied(self, gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return gradients

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
