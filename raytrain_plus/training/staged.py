"""The passes of a step on a worker that holds one stage: the model replica runs them together, by a schedule.

A replica computes all microbatches of its shards, in shard order, in one run of the schedule. The stage with the last
chunk knows the shards' losses after the last forward pass. It then sends the header to the replica's other stages, so
that each stage's ring sums it with the stage's gradients.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from raytrain_plus.collective.world import Work, World, wait
from raytrain_plus.data.reader import Microbatch
from raytrain_plus.job.settings import Schedule
from raytrain_plus.parallel.pipeline.chunk import Chunk
from raytrain_plus.parallel.pipeline.layout import holders, splits
from raytrain_plus.parallel.pipeline.message import KNOWN, Classes
from raytrain_plus.parallel.pipeline.schedule import Pipeline
from raytrain_plus.parallel.pipeline.timeline import Action, Bar, Kind
from raytrain_plus.parallel.pipeline.transport import Handovers, Peers
from raytrain_plus.task import Task
from raytrain_plus.training import header
from raytrain_plus.training.control import Control
from raytrain_plus.training.fault_search import FaultSearch
from raytrain_plus.training.metrics import Figures, ShardBatches, checked
from raytrain_plus.training.model import to_device
from raytrain_plus.training.passes import Part, nothing, on_device, put_header, weighed
from raytrain_plus.training.randomness import Keyed
from raytrain_plus.training.verdict import Said, from_plain, merged

AT_ONCE = 16
"""The most held-out microbatches in flight through the stages at once."""


class Staged:
    """See `passes.Passes`. Lives for one generation, as its model replica's world does."""

    def __init__(
        self,
        task: Task,
        parts: Sequence[Part],
        peers: Peers,
        *,
        schedule: Schedule,
        stages: int,
        device: torch.device,
        shards: int,
        classes: Classes = KNOWN,
        tied: Mapping[int, Collection[str]] = MappingProxyType({}),
    ) -> None:
        """Prepare the passes of the stage `peers.rank`.

        `parts`: the stage's chunks in order; `shards`: the job's number of shards; `classes`: the classes of the
        objects in batches; `tied`: for each stage, its parameters that are tied to parameters of other stages.
        """
        self._task = task
        self._stages = stages
        self._stage = peers.rank
        self._device = device
        self._shards = shards
        self._tied = tied
        self._handovers = Handovers(peers, device, classes)
        self.bars: list[Bar] = []
        where = holders(schedule, stages)
        own = [chunk for chunk, stage in enumerate(where) if stage == peers.rank]
        self.chunks = tuple(own)
        self._parts = dict(zip(own, parts, strict=True))
        self._last = where[-1]
        self._twice = where[0] == where[-1]
        """Whether the task's loss begins and ends on the same stage, with the same batch."""
        self._pipeline = Pipeline(
            schedule,
            [
                Chunk(part.module, chunk, where, self._handovers, splits(schedule))
                for chunk, part in self._parts.items()
            ],
        )

    def run(
        self,
        step: int,
        shards: Mapping[int, Sequence[Microbatch]],
        world: World,
        control: Control,
        flags: Callable[[], header.Flags],
        search: FaultSearch | None = None,
    ) -> list[Work]:
        """See `passes.Passes`. Only the first stage gets the microbatches' batches and
        ids; all stages know the rows.
        """
        # Until the first activations arrive, this stage waits for others.
        control.enter("collective")
        said_here = flags()
        work = _Cell(self, step, shards, control, search)
        self.bars = work.bars
        for stage in range(self._stages):
            self._handovers.expect_note("agreed", stage, stage)
            if self._stage == self._last:
                self._handovers.expect_note("flags", stage, stage)
        self._handovers.expect_note("header", self._stage, self._last)
        self._handovers.send_note("flags", self._stage, astuple(said_here), self._last)
        self._hand_on_batches(work)
        self._pipeline.run(work, len(work.places))
        if self._stage == self._last:
            said = [header.Flags(*self._handovers.take_note("flags", stage, stage)) for stage in range(self._stages)]
            encoded = header.encode(work.reports, self._shards, header.either(said))
            for stage in range(self._stages):
                self._handovers.send_note("header", stage, encoded, stage)
        put_header(self._first.gradients, self._handovers.take_note("header", self._stage, self._last))
        works = [
            one for part in self._parts.values() for one in part.gradients.reduce_during(nothing, world, control.check)
        ]
        self._handovers.finish()
        return works

    def figures(self, batches: ShardBatches, hosted: Sequence[int], control: Control) -> Figures:
        """See `passes.Passes`. Only the first stage gets the microbatches' batches; all stages know the rows."""
        found = Figures()
        for shard in hosted:
            found.begin(shard)
            numbered = enumerate(batches(shard))
            control.enter("data")
            while some := list(itertools.islice(numbered, AT_ONCE)):
                control.enter("collective")
                work = _HeldOut(self, shard, some, control)
                self._hand_on_batches(work)
                given = self._pipeline.forward(work, len(some))
                if self._stage == self._last:
                    for stage in range(self._stages):
                        self._handovers.send_note("figures", stage, [checked(one) for one in given], stage)
                told = self._handovers.take_note("figures", self._stage, self._last)
                for (_, microbatch), one in zip(some, told, strict=True):
                    found.add(shard, microbatch.rows, one)
                self._handovers.finish()
                control.enter("data")
        return found

    def tied(self, gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """See `passes.Passes`."""
        found = dict(gradients)
        if self._stage not in self._tied:
            return found
        # Frozen parameters have no gradient on any stage. Clone, because sending a view would send its whole base
        # tensor.
        own = {name: gradients[name].cpu().clone() for name in self._tied[self._stage] if name in gradients}
        for stage in self._tied:
            if stage != self._stage:
                self._handovers.send_note("tied", self._stage, own, stage)
        for stage in self._tied:
            if stage != self._stage:
                told = self._handovers.take_note("tied", stage, stage)
                found |= {name: value.to(self._device) for name, value in told.items()}
        self._handovers.finish()
        return found

    def agree(self, step: int, said: Said, world: World, control: Control, wait_s: float) -> Said:
        """See `passes.Passes`.

        One number goes around each stage's ring once its sums are complete, and then through the model replica. A stage
        that has heard from all stages of its replica knows that every member of every ring holds its sums.
        """
        work = world.reduce(torch.zeros(1), "summed")
        wait(work, f"the other replicas' gradient sums of step {step}", wait_s, control.interrupted)
        for stage in range(self._stages):
            self._handovers.send_note("agreed", self._stage, said.plain(), stage)
        told = [from_plain(self._handovers.take_note("agreed", stage, stage)) for stage in range(self._stages)]
        self._handovers.finish()
        return merged(told)

    def _hand_on_batches(self, work: _Cell | _HeldOut) -> None:
        """Pass the batches from the stage that reads the data to the stage that computes the loss."""
        if self._stage == 0:
            self._handovers.send_note("batch", 0, work.batches, self._last)
        if self._stage == self._last:
            work.batches = self._handovers.take_note("batch", 0, 0)

    @property
    def _first(self) -> Part:
        return next(iter(self._parts.values()))


class _Cell:
    """One step of a model replica, as `chunk.Work`: the microbatches of all its shards in sequence."""

    def __init__(
        self,
        staged: Staged,
        step: int,
        shards: Mapping[int, Sequence[Microbatch]],
        control: Control,
        search: FaultSearch | None,
    ) -> None:
        self.places = [(shard, index) for shard in sorted(shards) for index in range(len(shards[shard]))]
        self._of = staged
        self._step = step
        self._shards = shards
        self._control = control
        self._search = search
        microbatches = (self._microbatch(number) for number in range(len(self.places)))
        self.batches = [(one.batch, one.start, one.ids) for one in microbatches]
        self._before = {chunk: part.writes() for chunk, part in staged._parts.items()}
        self._keyed: dict[tuple[int, int], Keyed] = {}
        self._seen: dict[tuple[int, int], list[torch.Tensor | None]] = {}
        self.reports: dict[int, header.ShardReport] = {}
        """The shards' reports; known on the stage of the last chunk."""
        self.bars: list[Bar] = []

    def rows(self, number: int) -> int:
        """See `chunk.Work`."""
        return self._microbatch(number).rows

    def batch(self, number: int) -> Any:
        """See `chunk.Work`. The batch comes with the values for the ledger."""
        return self.batches[number]

    def loss(self, number: int, model: nn.Module, given: Any) -> torch.Tensor:
        """See `chunk.Work`."""
        batch, start, ids = given
        rows = self.rows(number)
        loss, weight = weighed(self._of._task, model, on_device(batch, self._of._device), rows)
        shard, _ = self.places[number]
        before = self.reports.get(shard) or header.ShardReport(start)
        self.reports[shard] = before.plus(rows, ids, weight, float(loss.detach()))
        return loss * weight

    @contextmanager
    def computing(self, kind: Kind, chunk: int, number: int) -> Iterator[None]:
        """See `chunk.Work`."""
        part, (shard, index) = self._of._parts[chunk], self.places[number]
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
        self.bars.append(Bar(self._of._stage, Action(kind, chunk, number), start, start + taken))
        self._control.enter("collective")

    def _microbatch(self, number: int) -> Microbatch:
        shard, index = self.places[number]
        return self._shards[shard][index]


class _HeldOut:
    """Some held-out microbatches of a shard, as `chunk.Work`: their metrics take the place of the loss."""

    def __init__(self, staged: Staged, shard: int, some: Sequence[tuple[int, Microbatch]], control: Control) -> None:
        self._of = staged
        self._shard = shard
        self._some = some
        self.batches = [microbatch.batch for _, microbatch in some]
        self._control = control

    def rows(self, number: int) -> int:
        """See `chunk.Work`."""
        return self._some[number][1].rows

    def batch(self, number: int) -> Any:
        """See `chunk.Work`."""
        return self.batches[number]

    def loss(self, number: int, model: nn.Module, given: Any) -> Any:
        """See `chunk.Work`."""
        batch = to_device(given, self._of._device, copy=self._of._twice)
        return self._of._task.evaluate(model, batch)

    @contextmanager
    def computing(self, kind: Kind, chunk: int, number: int) -> Iterator[None]:
        """See `chunk.Work`."""
        part = self._of._parts[chunk]
        self._control.check()
        self._control.enter("computing")
        if self._some[number][0] == 0:
            part.buffers.restore()
        with part.keys.microbatch("evaluate", self._shard, self._some[number][0]):
            yield
        self._control.enter("collective")
