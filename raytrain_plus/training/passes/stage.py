"""One stage of a model replica: what a worker holds of it, and what the stages exchange besides activations."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn
from typing_extensions import override

from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.job.settings import Schedule
from raytrain_plus.parallel.pipeline.chunk import Chunk, Objective
from raytrain_plus.parallel.pipeline.layout import chunk_stages, splits
from raytrain_plus.parallel.pipeline.message import KNOWN, Classes
from raytrain_plus.parallel.pipeline.sequential import OneByOne, Runner
from raytrain_plus.parallel.pipeline.timeline import Bar
from raytrain_plus.parallel.pipeline.transport import Handovers, Peers, SameRank, swapped
from raytrain_plus.task import Task
from raytrain_plus.training.exchange import header
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.header import Flags
from raytrain_plus.training.exchange.step_metrics import OwnMetrics
from raytrain_plus.training.exchange.thread_control import Control, RowSpan
from raytrain_plus.training.exchange.verdict import SumStatus, from_plain, merged
from raytrain_plus.training.passes.held_out import HeldOut, Numbered, checked_each, held_out
from raytrain_plus.training.passes.metric_sums import Means, MetricSums, ShardBatches
from raytrain_plus.training.passes.microbatch_loss import MicrobatchLoss
from raytrain_plus.training.passes.passes import ReplicaPasses
from raytrain_plus.training.passes.shard_reports import ShardReports
from raytrain_plus.training.update.step_sums import StepSums
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.first_bucket import Rider
from raytrain_plus.training.weights.model_part import ModelPart


@dataclass(kw_only=True)
class ReplicaStage(ReplicaPasses):
    """A stage in one generation: `Synchronous` and `PipeDream` add its passes; see `passes.ReplicaPasses`."""

    task: Task
    number: int
    """The number of this stage."""
    index: int = 0
    """The index of this worker's position in the replica: see `mesh.Stage`."""
    stages: int
    ranks: int = 1
    """The workers that share the tensor slices of each stage; they make the same passes."""
    last: int
    """The stage that holds the last chunk, and so knows the losses."""
    parts: Mapping[int, ModelPart]
    """The chunks that this stage holds, in order, by their index in the model."""
    pipeline: Runner
    handovers: Handovers
    """Those between the stages, among workers of the same tensor rank."""
    agreement: Handovers
    """Those among all workers of the replica."""
    sums: StepSums
    device: torch.device
    microbatch_loss: MicrobatchLoss
    shards: int
    """The job's number of shards."""
    tied: Mapping[int, Collection[str]]
    """For each stage, its parameters that are tied to parameters of other stages."""
    last_chunk: int
    """The number of the model's last chunk."""
    metrics: OwnMetrics = field(default_factory=OwnMetrics)
    """The metrics of this replica's shards in the step whose header was taken last."""
    bars: Sequence[Bar] = ()
    """See `passes.ReplicaPasses`."""

    @property
    def rider(self) -> Rider:
        """It carries the header and the metrics, with the first part's first bucket."""
        return self.sums.rider

    @property
    def chunks(self) -> tuple[int, ...]:
        """The index in the model of each chunk that this stage holds."""
        return tuple(self.parts)

    @property
    def first_part(self) -> ModelPart:
        """The part that carries the header."""
        return next(iter(self.parts.values()))

    @property
    def is_last(self) -> bool:
        """Whether this stage holds the last chunk."""
        return self.number == self.last

    def expect_notes(self) -> None:
        """Start to receive what the other stages send once in every run of a schedule."""
        for member in self._members:
            self.agreement.expect_note("agreed", member, member)
            if self.is_last:
                self.agreement.expect_note("flags", member, member)

    @property
    def _members(self) -> range:
        """The indices of all positions of the replica."""
        return range(self.stages * self.ranks)

    def _of_stage(self, stage: int) -> range:
        """Return the indices of the positions of a stage."""
        return range(stage * self.ranks, (stage + 1) * self.ranks)

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        self.handovers.finish()
        self.agreement.finish()

    def send_flags(self, flags: Flags) -> None:
        """Send the flags that this worker raises to those of the last chunk."""
        for member in self._of_stage(self.last):
            self.agreement.send_note("flags", self.index, tuple(flags), member)

    def take_flags(self) -> Flags:
        """Return the flags that any worker of the replica raises; called on the stage of the last chunk."""
        sent = (self.agreement.take_note("flags", member, member) for member in self._members)
        return header.either(Flags(*one) for one in sent)

    def share_header(self, step: int, reports: ShardReports, flags: Flags) -> None:
        """Send the header to all stages; called on the stage of the last chunk.

        `step`: the step's number among those that run together.
        """
        encoded, own = reports.encoded(self.shards, flags)
        note = (encoded, own.names, own.sums) if own.names else encoded
        for stage in range(self.stages):
            self.handovers.send_note("header", step * self.stages + stage, note, stage)

    def take_header(self, step: int) -> None:
        """Put the header of that step, as numbered in `share_header`, and its metrics into the rider."""
        note = self.handovers.take_note("header", step * self.stages + self.number, self.last)
        encoded, *metrics = note if isinstance(note, tuple) else (note,)
        self.metrics.names, self.metrics.sums = metrics or ((), None)
        self.rider.write(encoded, self.metrics)

    def pass_on_batches(self, batches: list[Any]) -> list[Any]:
        """Pass the batches from the worker that reads the data to the first stage and to that which computes the loss.

        Returns the batches to use here.
        """
        takers = {*self._of_stage(0), *self._of_stage(self.last)} - {0}
        if self.index == 0:
            for member in sorted(takers):
                self.agreement.send_note("batch", 0, batches, member)
        return self.agreement.take_note("batch", 0, 0) if self.index in takers else batches

    def loss(self, model: nn.Module, given: Any, place: RowSpan, reports: ShardReports) -> Objective:
        """See `MicrobatchLoss.objective`. `given`: see `with_ledger`."""
        batch, start, ids = given
        return self.microbatch_loss.objective(model, Microbatch(batch, place.rows, start, ids), place, reports)

    def metric_sums(self, batches: ShardBatches, hosted: Sequence[int], context: StepContext) -> MetricSums:
        """See `passes.ReplicaPasses`. Only the first stage receives batches; all stages know the row counts."""
        found = MetricSums()
        for shard, some in held_out(batches, hosted, context.control, found):
            self._pass_held_out(shard, some, context.control, found)
        return found

    def _pass_held_out(self, shard: int, some: Numbered, control: Control, found: MetricSums) -> None:
        """Pass some microbatches of a shard through the model, and add their metrics to what is found."""
        batches = self.pass_on_batches([one.batch for _, one in some])
        # The task begins and ends on the same stage, with the same batch, if that has the first and the last chunk.
        copy = self.last_chunk > 0 and {0, self.last_chunk} <= self.parts.keys()
        metrics = partial(self.microbatch_loss.metrics, copy=copy)
        given = self.pipeline.forward(HeldOut(self.parts, shard, some, batches, metrics, control), len(some))
        if self.is_last:
            own = checked_each(self.task, given, some)
            found.outputs.setdefault(shard, []).extend(outputs for _, outputs in own)
            self._give_metrics([list(means) for means, _ in own])
        received = self._take_metrics()
        for (_, microbatch), one in zip(some, received, strict=True):
            found.add(shard, microbatch.rows, Means(*one))
        self.finish()

    @override
    def share_metrics(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        if self.is_last:
            self._give_metrics(dict(metrics))
        found: Mapping[str, float] = self._take_metrics()
        self.finish()
        return found

    def _give_metrics(self, metrics: Any) -> None:
        """Send metrics to the whole replica; of the workers that compute the loss, the first one does so."""
        if self.index == self._of_stage(self.last)[0]:
            for member in self._members:
                self.agreement.send_note("metrics", member, metrics, member)

    def _take_metrics(self) -> Any:
        return self.agreement.take_note("metrics", self.index, self._of_stage(self.last)[0])

    @override
    def exchange_tied(self, gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        found = dict(gradients)
        if self.number not in self.tied:
            return found
        # Frozen parameters have no gradient on any stage. Clone, because sending a view would send its whole base
        # tensor.
        own = {name: gradients[name].cpu().clone() for name in self.tied[self.number] if name in gradients}
        others = [stage for stage in self.tied if stage != self.number]
        for stage in others:
            self.handovers.send_note("tied", self.number, own, stage)
        for stage in others:
            received = self.handovers.take_note("tied", stage, stage)
            found |= {name: value.to(self.device) for name, value in received.items()}
        self.handovers.finish()
        return found

    def agree(self, step: int, status: SumStatus, context: StepContext) -> SumStatus:
        """See `passes.ReplicaPasses`.

        One number goes around each stage's ring once its sums are complete, and then through the model replica. A stage
        that has heard from all stages of its replica knows that every member of every ring holds its sums.
        """
        context.reduce(torch.zeros(1), "summed", f"the other replicas' gradient sums of step {step}")
        for member in self._members:
            self.agreement.send_note("agreed", self.index, status.plain(), member)
        received = [from_plain(self.agreement.take_note("agreed", member, member)) for member in self._members]
        self.finish()
        return merged(received)


def with_ledger(one: Microbatch) -> tuple[Any, int, int]:
    """Return a batch with the start position and the row ids for the ledger."""
    return one.batch, one.start, one.ids


Stage = TypeVar("Stage", bound=ReplicaStage)


def replica_stage(
    kind: type[Stage],
    state: TrainState,
    peers: Peers,
    *,
    schedule: Schedule,
    stages: int,
    classes: Classes = KNOWN,
    tied: Mapping[int, Collection[str]] = MappingProxyType({}),
) -> Stage:
    """Return the position `peers.rank` of a replica.

    `kind`: how it makes its passes; `state`: that of the stage's chunks; `classes`: the classes of the objects in
    batches.
    """
    link = state.link
    agreement = Handovers(peers, state.device, classes)
    same_rank: Peers = peers if link.ranks == 1 else SameRank(peers, link.ranks)
    handovers = agreement if link.ranks == 1 else Handovers(same_rank, state.device, classes)
    number = same_rank.rank
    link.exchange = lambda own, rank: swapped(peers, own, number * link.ranks + rank)
    where = chunk_stages(schedule, stages) if stages > 1 else [0]
    own = [chunk for chunk, stage in enumerate(where) if stage == number]
    held = dict(zip(own, state.parts, strict=True))
    chunks = [
        Chunk(part.module, chunk, where, handovers, splits(schedule), part.gradients.received)
        for chunk, part in held.items()
    ]
    return kind(
        task=state.task,
        number=number,
        index=peers.rank,
        stages=stages,
        ranks=link.ranks,
        last=where[-1],
        parts=held,
        pipeline=_runner(schedule, stages, chunks),
        handovers=handovers,
        agreement=agreement,
        sums=state.sums,
        device=state.device,
        microbatch_loss=MicrobatchLoss(state),
        shards=state.shards,
        tied=tied,
        last_chunk=len(where) - 1,
    )


def _runner(schedule: Schedule, stages: int, chunks: Sequence[Chunk]) -> Runner:
    if stages == 1:
        return OneByOne(chunks[0])
    # torch's schedules take a second to load; a model in one stage does without them.
    from raytrain_plus.parallel.pipeline.schedule import Pipeline

    return Pipeline(schedule, chunks)
