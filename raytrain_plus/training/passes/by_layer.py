"""The passes of a step on a worker that has the weights of one layer at a time: `parallel.sharded: full`.

    forward     layer 1: all microbatches, layer 2: all microbatches, ...     then the header is summed
    backward    last layer: all microbatches, summed; the one before: ...     a layer's sums end a layer later

So each layer is gathered twice in a step, however many microbatches there are; the next one while a layer computes. All
workers gather and sum the layers in this one order, whatever they host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from typing_extensions import override

from raytrain_plus.collective.world import Work
from raytrain_plus.parallel.pipeline.chunk import Chunk
from raytrain_plus.parallel.pipeline.sequential import InTurn
from raytrain_plus.parallel.pipeline.timeline import Bar, Kind
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.step_metrics import OwnMetrics
from raytrain_plus.training.exchange.verdict import SumStatus
from raytrain_plus.training.passes.held_out import HeldOut, checked_each, held_out
from raytrain_plus.training.passes.metric_sums import MetricSums, ShardBatches
from raytrain_plus.training.passes.microbatch_loss import MicrobatchLoss
from raytrain_plus.training.passes.passes import OneWorker, Passes, Shards
from raytrain_plus.training.passes.shard_reports import ShardReports
from raytrain_plus.training.passes.step_work import PassSums, StepWork, numbered
from raytrain_plus.training.update.fault_search import FaultSearch
from raytrain_plus.training.update.layer_sums import LayerSums
from raytrain_plus.training.update.train_state import TrainState


class ByLayer(OneWorker, Passes):
    """See `passes.Passes`: the chunks are the layers."""

    bars: Sequence[Bar] = ()
    chunks: Sequence[int] = ()
    weight = None
    unread = ()

    def __init__(self, state: TrainState) -> None:
        """Prepare to run the layers of a state whose weights are to be gathered."""
        assert state.gathered is not None, "its weights are gathered"
        assert isinstance(state.sums, LayerSums), "its parts are layers"
        self.metrics = OwnMetrics()
        self.gathered, self.layer_sums = state.gathered, state.sums
        self._task, self._shards, self._loss = state.task, state.shards, MicrobatchLoss(state)
        self.parts = dict(enumerate(state.parts))
        self.chunks = tuple(self.parts)
        stages = [0] * len(self.parts)
        self._layers = [Chunk(part.module, number, stages) for number, part in self.parts.items()]

    @override
    def run(self, step: int, shards: Shards, context: StepContext, search: FaultSearch | None = None) -> list[Work]:
        places, reports = numbered(step, shards), ShardReports()
        sums = _SumsInTurn(self, step, reports, context)
        loss, batches = partial(self._loss.objective, reports=reports), [place.microbatch for place in places]
        work = StepWork(self.parts, places, batches, loss, sums, context.control, search)
        self.bars = work.bars
        self.gathered.begin(0, context)
        InTurn(self._layers, sums.around).run(work, len(places))
        sums.end_last()
        return []

    def gather(self, layer: int, following: int, context: StepContext) -> None:
        """Wait for the weights of a layer, and begin to gather those of the following one, if there is one."""
        self.gathered.finish(layer)
        if following in self.parts:
            self.gathered.begin(following, context)

    def submit_header(self, reports: ShardReports, context: StepContext) -> list[Work]:
        """Start to sum what is known once all forward passes have run."""
        rider = self.layer_sums.rider
        # A request made during this step is seen at its end.
        encoded, self.metrics = reports.encoded(self._shards, context.flags())
        rider.write(encoded, self.metrics)
        rider.write_buffers(context.world.rank)
        submitted = rider.submit_buffers(context.world)
        with self.layer_sums.head.reducing(context.world, context.control.check) as works:
            pass
        return submitted + works

    @override
    def metric_sums(self, batches: ShardBatches, hosted: Sequence[int], context: StepContext) -> MetricSums:
        """See `passes.ReplicaPasses`. All workers gather equally often, whatever they host."""

        @contextmanager
        def around(kind: Kind, layer: int) -> Iterator[None]:
            self.gather(layer, layer + 1, context)
            yield
            self.gathered.free(layer)

        found = MetricSums()
        pending = held_out(batches, hosted, context.control, found)
        # With several layers, the task begins and ends with the same batch.
        metrics = partial(self._loss.metrics, copy=len(self.parts) > 1)
        while True:
            shard, some = next(pending, (0, []))
            more = torch.tensor([len(some)])
            context.reduce(more, "held out", "the other workers' held-out rows", "max")
            if not int(more):
                return found
            work = HeldOut(self.parts, shard, some, [one.batch for _, one in some], metrics, context.control)
            self.gathered.begin(0, context)
            given = InTurn(self._layers, around).forward(work, len(some))
            for (_, one), (means, outputs) in zip(some, checked_each(self._task, given, some), strict=True):
                found.outputs.setdefault(shard, []).append(outputs)
                found.add(shard, one.rows, means)

    def agree(self, step: int, status: SumStatus, context: StepContext) -> SumStatus:
        """See `passes.ReplicaPasses`. Each replica has rows of its own, which it changes once all have the sums."""
        context.reduce(torch.zeros(1), "summed", f"the other replicas' gradient sums of step {step}")
        return status


class _SumsInTurn(PassSums):
    """The sums of a step, layer after layer."""

    def __init__(self, passes: ByLayer, step: int, reports: ShardReports, context: StepContext) -> None:
        self._passes = passes
        self._step = step
        self._reports = reports
        self._context = context
        self._header: list[Work] = []
        self._weight: float | None = None
        self._submitted: dict[int, list[Work]] = {}
        """The sums of the layers whose gradients are submitted, until the layer has computed."""
        self._summing: tuple[int, list[Work]] | None = None
        """The layer whose sums are under way."""

    @contextmanager
    def around(self, kind: Kind, layer: int) -> Iterator[None]:
        """See `sequential.Around`."""
        passes, part = self._passes, self._passes.parts[layer]
        passes.gather(layer, layer + 1 if kind == "F" else layer - 1, self._context)
        if kind == "F":
            yield
            if layer == passes.chunks[-1]:
                # Its weights are needed for the backward pass next.
                self._header = passes.submit_header(self._reports, self._context)
                return
        else:
            passes.layer_sums.begin_layer(part)
            yield
            self._end_layer(layer)
        passes.gathered.free(layer)

    @contextmanager
    @override
    def reducing(self, chunk: int) -> Iterator[None]:
        context, gradients = self._context, self._passes.parts[chunk].gradients
        with gradients.reducing(context.world, context.control.check) as works:
            yield
        self._submitted[chunk] = works

    @override
    def passed(self, kind: Kind, chunk: int, *, last: bool) -> None:
        if kind == "F" and last:
            self._passes.parts[chunk].buffers.check_refused()

    def _end_layer(self, layer: int) -> None:
        """End the sums of the layer before, and start those of this one, if its last backward pass has not."""
        if layer not in self._submitted:
            with self.reducing(layer):
                pass
        works = self._submitted.pop(layer)
        self.end_last()
        self._summing = layer, works

    def end_last(self) -> None:
        """End the sums of the layer that was computed last."""
        if self._summing is None:
            return
        (layer, works), self._summing = self._summing, None
        context, sums = self._context, self._passes.layer_sums
        context.control.enter("collective")
        if self._weight is None:
            context.wait(self._header, f"the header of step {self._step}")
            self._weight = sums.weight()
        what = f"the gradient sums of layer {layer + 1} in step {self._step}"
        sums.end_layer(self._passes.parts[layer], works, self._weight, what, context)
