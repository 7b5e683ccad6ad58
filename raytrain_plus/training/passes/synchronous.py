"""The passes of a stage, one step after the other: all stages of a model replica hold a step, or none does.

A replica computes all microbatches of its shards, in shard order, and sums their gradients before anything is sent
(gradient accumulation). Each chunk's sum over the replicas starts in its last backward pass. The stage with the last
chunk knows the shards' losses after the last forward pass. It then sends the header to the replica's other stages, so
that each stage's ring sums it with the stage's gradients.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from raytrain_plus.collective.world import Work
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.parallel.pipeline.chunk import Objective, PassWork
from raytrain_plus.parallel.pipeline.timeline import Action, Bar, Kind
from raytrain_plus.parallel.weighting import Weight
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.thread_control import RowSpan
from raytrain_plus.training.model.randomness import MicrobatchKeys
from raytrain_plus.training.passes.passes import Shards
from raytrain_plus.training.passes.shard_reports import ShardReports
from raytrain_plus.training.passes.stage import ReplicaStage
from raytrain_plus.training.update.fault_search import FaultSearch
from raytrain_plus.training.weights.model_part import ModelPart


class Synchronous(ReplicaStage):
    """See `passes.Passes`. Lives for one generation, as its model replica's world does."""

    weight = None
    unread = ()

    def run(self, step: int, shards: Shards, context: StepContext, search: FaultSearch | None = None) -> list[Work]:
        """See `passes.Passes`. Only the first stage receives batches; all stages know the row counts."""
        # Until the first activations arrive, this stage waits for others.
        context.control.enter("collective", "stages")
        work = ReplicaStep(self, step, shards, context, search)
        self.bars = work.bars
        self.expect_notes()
        self.handovers.expect_note("header", self.number, self.last)
        work.take_batches()
        self.pipeline.run(work, len(work.places))
        work.reduce_rest()
        self.finish()
        return work.works


class ReplicaStep(PassWork):
    """One step of a model replica, as `chunk.PassWork`: the microbatches of all its shards in sequence."""

    def __init__(
        self, stage: ReplicaStage, step: int, shards: Shards, context: StepContext, search: FaultSearch | None
    ) -> None:
        self.places = [(shard, index) for shard in sorted(shards) for index in range(len(shards[shard]))]
        self._stage = stage
        self._step = step
        self._shards = shards
        self._context = context
        self._control = context.control
        self._search = search
        microbatches = (self._microbatch(number) for number in range(len(self.places)))
        self._batches: list[Any] = [(one.batch, one.start, one.ids) for one in microbatches]
        self._before = {chunk: part.writes() for chunk, part in stage.parts.items()}
        self._keyed: dict[tuple[int, int], MicrobatchKeys] = {}
        self._seen: dict[tuple[int, int], list[torch.Tensor | None]] = {}
        self._reports = ShardReports()
        """The shards' reports; known on the stage of the last chunk."""
        self._backward_left = dict.fromkeys(stage.parts, len(self.places))
        self._unreduced = list(stage.parts)
        """The chunks whose sums are to start, the last one first: every replica must submit in one order."""
        self.works: list[Work] = []
        """The sums under way."""
        self.bars: list[Bar] = []
        """Its passes."""

    def take_batches(self) -> None:
        """Pass the batches on to the stage that computes the loss, or receive them there."""
        self._batches = self._stage.pass_on_batches(self._batches)

    @override
    def rows(self, number: int) -> int:
        return self._microbatch(number).rows

    def batch(self, number: int) -> Any:
        """See `chunk.PassWork`. The batch comes with the values for the ledger."""
        return self._batches[number]

    @override
    def loss(self, number: int, model: nn.Module, given: Any) -> Objective:
        return self._stage.loss(model, given, self._place(number), self._reports)

    @contextmanager
    @override
    def computing(self, kind: Kind, chunk: int, number: int, weight: Weight | None = None) -> Iterator[None]:
        part, (shard, index) = self._stage.parts[chunk], self.places[number]
        last_of_shard = index + 1 == len(self._shards[shard])
        reducing = self._reducing(kind, chunk)
        self._control.check()
        self._control.compute(self._place(number), "forward" if kind == "F" else "backward")
        start = time.perf_counter()
        if kind == "F":
            part.buffers.renew(committed=index == 0)
            with part.forward(self._step, shard, index, self._before[chunk]) as keyed:
                self._keyed[chunk, number] = keyed
                yield
            self._seen[chunk, number] = part.buffers.seen()
            if last_of_shard:
                part.buffers.end_shard(shard, sum(one.rows for one in self._shards[shard]))
        else:
            keyed = self._keyed[chunk, number]
            keyed.backward()
            if weight is not None:
                part.gradients.weigh(weight)
            with part.keys.opened(keyed), part.buffers.swapped(self._seen[chunk, number]), reducing:
                yield
            if kind in ("B", "W"):
                del self._keyed[chunk, number], self._seen[chunk, number]
                if last_of_shard and self._search is not None:
                    self._search.shard_ended(shard, chunk, part.parameters)
                if last_of_shard and number + 1 < len(self.places):
                    part.gradients.end_shard()
        end, taken = time.time(), time.perf_counter() - start
        self.bars.append(Bar(self._stage.number, Action(kind, chunk, number), end - taken, end))
        self._between_passes()
        if kind == "F" and number + 1 == len(self.places):
            self._forward_ended(chunk)

    def _between_passes(self) -> None:
        """Note what the thread does between two passes: it may wait for another stage."""
        self._control.enter("collective", "stages")

    def reduce_rest(self) -> None:
        """Start the sums that no backward pass has started."""
        while self._unreduced:
            with self._reduced(self._unreduced[-1]):
                pass

    def _forward_ended(self, chunk: int) -> None:
        """Send what is known once the last forward pass of a chunk has run."""
        stage = self._stage
        stage.parts[chunk].buffers.check_refused()
        if chunk == stage.chunks[-1]:
            # As late as possible: a request made during this step is seen at its end.
            stage.send_flags(self._context.flags())
        if chunk == stage.last_chunk:
            stage.share_header(0, self._reports, stage.take_flags())

    def _reducing(self, kind: Kind, chunk: int) -> AbstractContextManager[None]:
        """Return a context for a pass: that of the sums if it is the chunk's last backward pass and its turn."""
        if kind not in ("B", "W"):
            return nullcontext()
        self._backward_left[chunk] -= 1
        # Gradients cannot be searched after they are submitted.
        if self._backward_left[chunk] or self._search is not None or self._unreduced[-1] != chunk:
            return nullcontext()
        return self._reduced(chunk)

    def _reduced(self, chunk: int) -> AbstractContextManager[None]:
        """Return a context in which the gradients of a chunk are submitted as they become complete."""
        stage, world = self._stage, self._context.world
        if len(self._unreduced) == len(stage.parts):
            # All forward passes of this stage have run.
            self.works += stage.rider.submit_buffers(world)
        self._unreduced.remove(chunk)
        part = stage.parts[chunk]
        if part is stage.first_part:
            stage.take_header(0)
            stage.rider.write_buffers(world.rank)
        return self._collecting(part)

    @contextmanager
    def _collecting(self, part: ModelPart) -> Iterator[None]:
        with part.gradients.reducing(self._context.world, self._control.check) as works:
            yield
        self.works += works

    def _place(self, number: int) -> RowSpan:
        shard, index = self.places[number]
        return RowSpan(self._step, shard, sum(one.rows for one in self._shards[shard][:index]), self.rows(number))

    def _microbatch(self, number: int) -> Microbatch:
        shard, index = self.places[number]
        return self._shards[shard][index]
