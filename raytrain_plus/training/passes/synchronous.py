"""The passes of a stage, one step after the other: all stages of a model replica hold a step, or none does.

A replica computes all microbatches of its shards, in shard order, and sums their gradients before anything is sent
(gradient accumulation). Each chunk's sum over the replicas starts in its last backward pass. The stage with the last
chunk knows the shards' losses after the last forward pass. It then sends the header to the replica's other stages, so
that each stage's ring sums it with the stage's gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from typing_extensions import override

from raytrain_plus.collective.world import Work
from raytrain_plus.parallel.pipeline.timeline import Kind
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.passes.passes import Shards
from raytrain_plus.training.passes.shard_reports import ShardReports
from raytrain_plus.training.passes.stage import ReplicaStage, with_ledger
from raytrain_plus.training.passes.step_work import PassSums, StepWork, numbered
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
        self.expect_notes()
        self.handovers.expect_note("header", self.number, self.last)
        places, reports = numbered(step, shards), ShardReports()
        batches = self.pass_on_batches([with_ledger(place.microbatch) for place in places])
        sums, loss = _SumsOfStage(self, reports, context), partial(self.loss, reports=reports)
        work = StepWork(self.parts, places, batches, loss, sums, context.control, search, stage=self.number)
        self.bars = work.bars
        self.pipeline.run(work, len(places))
        sums.reduce_rest()
        self.finish()
        return sums.works


class _SumsOfStage(PassSums):
    """The sums of a step on one stage, which exchanges its header with the others."""

    def __init__(self, stage: ReplicaStage, reports: ShardReports, context: StepContext) -> None:
        self._stage = stage
        self._reports = reports
        """The shards' reports; known on the stage of the last chunk."""
        self._context = context
        self._unreduced = list(stage.parts)
        """The chunks whose sums are to start, the last one first: every replica must submit in one order."""
        self.works: list[Work] = []
        """The sums under way."""

    @override
    def reducing(self, chunk: int) -> AbstractContextManager[None]:
        return self._reduced(chunk) if self._unreduced[-1] == chunk else nullcontext()

    @override
    def passed(self, kind: Kind, chunk: int, *, last: bool) -> None:
        stage = self._stage
        # It may wait for another stage.
        self._context.control.enter("collective", "stages")
        if kind != "F" or not last:
            return
        stage.parts[chunk].buffers.check_refused()
        if chunk == stage.chunks[-1]:
            # As late as possible: a request made during this step is seen at its end.
            stage.send_flags(self._context.flags())
        if chunk == stage.last_chunk:
            stage.share_header(0, self._reports, stage.take_flags())

    def reduce_rest(self) -> None:
        """Start the sums that no backward pass has started."""
        while self._unreduced:
            with self._reduced(self._unreduced[-1]):
                pass

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
        with part.gradients.reducing(self._context.world, self._context.control.check) as works:
            yield
        self.works += works
