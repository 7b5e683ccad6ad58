"""The passes of a step on a worker that has the weights of one layer at a time: `parallel.sharded: full`.

    forward     layer 1: all microbatches, layer 2: all microbatches, ...     then the header is summed
    backward    last layer: all microbatches, summed; the one before: ...     a layer's sums end a layer later

So each layer is gathered twice in a step, however many microbatches there are; the next one while a layer computes. All
workers gather and sum the layers in this one order, whatever they host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from raytrain_plus.collective.world import Transfer, Work
from raytrain_plus.device_copies import BatchCopies
from raytrain_plus.parallel.pipeline.chunk import Chunk
from raytrain_plus.parallel.pipeline.sequential import AroundChunks, InTurn
from raytrain_plus.parallel.pipeline.timeline import Kind
from raytrain_plus.parallel.pipeline.transport import Handovers
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.passes.metric_sums import MetricSums, ShardBatches
from raytrain_plus.training.passes.passes import Passes, Shards
from raytrain_plus.training.passes.stage import HeldOut, ReplicaStage
from raytrain_plus.training.passes.synchronous import ReplicaStep
from raytrain_plus.training.update.fault_search import FaultSearch
from raytrain_plus.training.update.layer_sums import LayerSums
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.gathered_layer import GatheredLayer
from raytrain_plus.training.weights.model_part import ModelPart


@dataclass(kw_only=True)
class ByLayer(ReplicaStage, Passes):
    """See `passes.Passes`: a replica of one stage, whose chunks are the layers."""

    gathered: GatheredLayer
    layer_sums: LayerSums
    weight: float | None = None
    unread = ()

    @override
    def run(self, step: int, shards: Shards, context: StepContext, search: FaultSearch | None = None) -> list[Work]:
        work = _LayerStep(self, step, shards, context, search)
        self.bars = work.bars
        work.take_batches()
        self.pipeline.run(work, len(work.places))
        work.end_last()
        self.handovers.finish()
        return []

    def metric_sums(self, batches: ShardBatches, hosted: Sequence[int], context: StepContext) -> MetricSums:
        """See `passes.ReplicaPasses`. All workers gather equally often, whatever they host."""
        found = MetricSums()
        pending = self.held_out(batches, hosted, context.control)
        while True:
            shard, some = next(((shard, some) for shard, some in _begun(pending, found) if some), (0, []))
            more = torch.tensor([len(some)])
            context.reduce(more, "held out", "the other workers' held-out rows", "max")
            if not int(more):
                return found
            work = _HeldOutLayers(self, shard, some, context)
            if some:
                self.pass_held_out(work, found)
            else:
                self.pipeline.forward(work, 0)


def layer_passes(state: TrainState) -> ByLayer:
    """Return the passes of a state whose weights are to be gathered."""
    assert state.gathered is not None, "its weights are gathered"
    assert isinstance(state.sums, LayerSums), "its parts are layers"
    handovers, count = Handovers(_Alone(), state.device), len(state.parts)
    return ByLayer(
        task=state.task,
        number=0,
        stages=1,
        last=0,
        parts=dict(enumerate(state.parts)),
        pipeline=InTurn(
            [Chunk(part.module, number, [0] * count, handovers) for number, part in enumerate(state.parts)]
        ),
        handovers=handovers,
        agreement=handovers,
        sums=state.sums,
        device=state.device,
        on_device=BatchCopies(state.device),
        shards=state.shards,
        rules=state.rules,
        tied={},
        last_chunk=count - 1,
        gathered=state.gathered,
        layer_sums=state.sums,
    )


class _LayerStep(ReplicaStep, AroundChunks):
    """One step, as `chunk.PassWork` and `in_turn.AroundChunks`."""

    def __init__(
        self, stage: ByLayer, step: int, shards: Shards, context: StepContext, search: FaultSearch | None
    ) -> None:
        super().__init__(stage, step, shards, context, search)
        self._layers = stage
        self._header: list[Work] = []
        self._weight: float | None = None
        self._summing: tuple[int, list[Work]] | None = None
        """The layer whose sums are under way."""

    @contextmanager
    @override
    def around(self, chunk: int, *, backward: bool) -> Iterator[None]:
        last, gathered = self._layers.last_chunk, self._layers.gathered
        following = chunk - 1 if backward else chunk + 1
        if not backward and chunk == 0:
            gathered.begin(chunk, self._context)
        if not (backward and chunk == last):
            gathered.finish(chunk)
        if 0 <= following <= last:
            gathered.begin(following, self._context)
        if backward:
            self._layers.layer_sums.begin_layer(self._part(chunk))
        yield
        if backward:
            self._end_layer(chunk)
        elif chunk == last:
            # Its weights are needed for the backward pass next.
            self._send_header()
            return
        gathered.free(chunk)

    def end_last(self) -> None:
        """End the sums of the layer that was computed last."""
        if self._summing is not None:
            (chunk, works), self._summing = self._summing, None
            self._control.enter("collective")
            if self._weight is None:
                self._context.wait(self._header, f"the header of step {self._step}")
                self._weight = self._layers.layer_sums.weight()
            what = f"the gradient sums of layer {chunk + 1} in step {self._step}"
            self._layers.layer_sums.end_layer(self._part(chunk), works, self._weight, what, self._context)

    def _end_layer(self, chunk: int) -> None:
        """End the sums of the layer before, and start those of this one, if its last backward pass has not."""
        if chunk in self._unreduced:
            with self._reduced(chunk):
                pass
        works, self.works = self.works, []
        self.end_last()
        self._summing = chunk, works

    def _send_header(self) -> None:
        """Start to sum what is known once all forward passes have run."""
        stage, world = self._layers, self._context.world
        # A request made during this step is seen at its end.
        stage.send_flags(self._context.flags())
        stage.share_header(0, self._reports, stage.take_flags())
        stage.take_header(0)
        stage.rider.write_buffers(world.rank)
        self._header = stage.rider.submit_buffers(world)
        with stage.layer_sums.head.reducing(world, self._control.check) as works:
            pass
        self._header += works

    def _forward_ended(self, chunk: int) -> None:
        self._part(chunk).buffers.check_refused()

    def _between_passes(self) -> None:
        """No pass waits for another worker."""

    def _reducing(self, kind: Kind, chunk: int) -> AbstractContextManager[None]:
        if kind == "F":
            return nullcontext()
        self._backward_left[chunk] -= 1
        # Gradients cannot be searched after they are submitted.
        return nullcontext() if self._backward_left[chunk] or self._search is not None else self._reduced(chunk)

    def _reduced(self, chunk: int) -> AbstractContextManager[None]:
        self._unreduced.remove(chunk)
        return self._collecting(self._part(chunk))

    def _part(self, chunk: int) -> ModelPart:
        return self._layers.parts[chunk]


class _HeldOutLayers(HeldOut, AroundChunks):
    """Some held-out microbatches, as `chunk.PassWork` and `in_turn.AroundChunks`."""

    def __init__(self, stage: ByLayer, shard: int, some: Sequence[Any], context: StepContext) -> None:
        super().__init__(stage, shard, some, context)
        self._layers = stage
        self._context = context

    @contextmanager
    @override
    def around(self, chunk: int, *, backward: bool) -> Iterator[None]:
        gathered = self._layers.gathered
        if chunk == 0:
            gathered.begin(chunk, self._context)
        gathered.finish(chunk)
        if chunk < self._layers.last_chunk:
            gathered.begin(chunk + 1, self._context)
        yield
        gathered.free(chunk)


class _Alone:
    """The `transport.Peers` of a replica of one stage."""

    rank = 0

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Transfer:
        """Fail: there are no others."""
        raise AssertionError("a replica of one stage sends nothing")

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Transfer:
        """Fail: there are no others."""
        raise AssertionError("a replica of one stage receives nothing")


def _begun(pending: Iterator[tuple[int, Any]], found: MetricSums) -> Iterator[tuple[int, Any]]:
    """Yield the same, and begin each shard in what is found."""
    for shard, some in pending:
        found.begin(shard)
        yield shard, some
