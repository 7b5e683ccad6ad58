"""The passes of a step on a worker that holds one stage: the model replica runs them together, by a schedule.

A replica computes all microbatches of its shards, in shard order, in one run of the schedule. The stage with the last
chunk knows the shards' losses after the last forward pass. It then sends the header to the replica's other stages, so
that each stage's ring sums it with the stage's gradients.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from raytrain_plus.collective.world import Work
from raytrain_plus.data.reader import Microbatch
from raytrain_plus.parallel.pipeline.timeline import Action, Bar, Kind
from raytrain_plus.training.context import StepContext
from raytrain_plus.training.fault_search import FaultSearch
from raytrain_plus.training.header import ShardReport
from raytrain_plus.training.passes import Shards, no_backward
from raytrain_plus.training.randomness import MicrobatchKeys
from raytrain_plus.training.replica import ReplicaStage, StagePasses


class Staged(StagePasses):
    """See `passes.Passes`. Lives for one generation, as its model replica's world does."""

    def run(self, step: int, shards: Shards, context: StepContext, search: FaultSearch | None = None) -> list[Work]:
        """See `passes.Passes`. Only the first stage gets the microbatches' batches and
        ids; all stages know the rows.
        """
        stage, control = self.stage, context.control
        # Until the first activations arrive, this stage waits for others.
        control.enter("collective")
        flags = context.flags()
        work = _ReplicaStep(stage, step, shards, context, search)
        self.bars = work.bars
        stage.expect_notes()
        stage.handovers.expect_note("header", stage.number, stage.last)
        stage.send_flags(flags)
        work.batches = stage.pass_on_batches(work.batches)
        stage.pipeline.run(work, len(work.places))
        if stage.is_last:
            stage.share_header(0, work.reports, stage.take_flags())
        stage.take_header(0)
        works = [
            one
            for part in stage.parts.values()
            for one in part.gradients.reduce_during(no_backward, context.world, control.check)
        ]
        stage.handovers.finish()
        return works


class _ReplicaStep:
    """One step of a model replica, as `chunk.PassWork`: the microbatches of all its shards in sequence."""

    def __init__(
        self, stage: ReplicaStage, step: int, shards: Shards, context: StepContext, search: FaultSearch | None
    ) -> None:
        self.places = [(shard, index) for shard in sorted(shards) for index in range(len(shards[shard]))]
        self._stage = stage
        self._step = step
        self._shards = shards
        self._control = context.control
        self._search = search
        microbatches = (self._microbatch(number) for number in range(len(self.places)))
        self.batches: list[Any] = [(one.batch, one.start, one.ids) for one in microbatches]
        self._before = {chunk: part.writes() for chunk, part in stage.parts.items()}
        self._keyed: dict[tuple[int, int], MicrobatchKeys] = {}
        self._seen: dict[tuple[int, int], list[torch.Tensor | None]] = {}
        self.reports: dict[int, ShardReport] = {}
        """The shards' reports; known on the stage of the last chunk."""
        self.bars: list[Bar] = []

    def rows(self, number: int) -> int:
        """See `chunk.PassWork`."""
        return self._microbatch(number).rows

    def batch(self, number: int) -> Any:
        """See `chunk.PassWork`. The batch comes with the values for the ledger."""
        return self.batches[number]

    def loss(self, number: int, model: nn.Module, given: Any) -> torch.Tensor:
        """See `chunk.PassWork`."""
        shard, _ = self.places[number]
        return self._stage.loss(model, given, self.rows(number), shard, self.reports)

    @contextmanager
    def computing(self, kind: Kind, chunk: int, number: int) -> Iterator[None]:
        """See `chunk.PassWork`."""
        part, (shard, index) = self._stage.parts[chunk], self.places[number]
        last_of_shard = index + 1 == len(self._shards[shard])
        self._control.check()
        self._control.enter("computing")
        start, timed = time.time(), time.perf_counter()
        if kind == "F":
            part.buffers.renew(committed=index == 0)
            with part.keys.microbatch(self._step, shard, index) as self._keyed[chunk, number]:
                yield
            part.check_unchanged(self._before[chunk])
            self._seen[chunk, number] = part.buffers.seen()
            if last_of_shard:
                part.buffers.end_shard(shard, sum(one.rows for one in self._shards[shard]))
        else:
            keyed = self._keyed[chunk, number]
            keyed.backward()
            with keyed.open(), part.buffers.swapped(self._seen[chunk, number]):
                yield
            if kind in ("B", "W"):
                del self._keyed[chunk, number], self._seen[chunk, number]
                if last_of_shard and self._search is not None:
                    self._search.shard_ended(shard, chunk, part.parameters)
                if last_of_shard and number + 1 < len(self.places):
                    part.gradients.end_shard()
        taken = time.perf_counter() - timed
        self.bars.append(Bar(self._stage.number, Action(kind, chunk, number), start, start + taken))
        self._control.enter("collective")

    def _microbatch(self, number: int) -> Microbatch:
        shard, index = self.places[number]
        return self._shards[shard][index]
