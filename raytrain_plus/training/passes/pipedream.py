"""Pipeline passes without a bubble between steps: stages begin a step before the previous one has ended everywhere.

Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN Training", SOSP 2019. Each stage alternates forward
and backward passes, and changes its weights as soon as its own backward passes of a step are done. So a stage can have
newer weights at a microbatch's backward pass than at its forward pass. The backward pass gets the weights of the
forward pass, of which copies are kept until then (weight stashing).

The stages synchronise at the end of a window of steps. Only then does one consistent state exist, and the steps are
committed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from raytrain_plus.collective.world import Work
from raytrain_plus.parallel.pipeline.chunk import Objective, PassWork
from raytrain_plus.parallel.pipeline.timeline import Action, Bar, Kind
from raytrain_plus.parallel.weighting import Weight
from raytrain_plus.parallel.wire import Named
from raytrain_plus.torch_compat import keep_write_counts
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.header import Flags
from raytrain_plus.training.model.randomness import MicrobatchKeys
from raytrain_plus.training.passes.passes import Ended, Overlapping, Shards
from raytrain_plus.training.passes.shard_reports import ShardReports
from raytrain_plus.training.passes.stage import ReplicaStage, with_ledger
from raytrain_plus.training.passes.step_work import numbered
from raytrain_plus.training.update.fault_search import FaultSearch


class PipeDream(ReplicaStage, Overlapping):
    """See `passes.Overlapping`. Lives for one generation, as its model replica's world does."""

    @functools.cached_property
    def weights(self) -> WeightVersions:
        """The versions of the stage's weights."""
        return WeightVersions([value for part in self.parts.values() for _, value in part.parameters])

    @override
    def run_window(
        self,
        steps: range,
        counted: Callable[[int], Shards],
        batches: Callable[[int], Shards],
        context: StepContext,
        end: Ended,
    ) -> None:
        context.control.enter("collective", "stages")
        self.weights.forget()
        work = _WindowWork(self, self.weights, steps, counted, batches, context, end)
        self.bars = work.bars
        self.expect_notes()
        self.pipeline.run(work, len(work.places))
        work.end_due()
        self.handovers.finish()

    @override
    def updating(self) -> AbstractContextManager[None]:
        return self.weights.updating()


class WeightVersions:
    """The weights of a stage: the current version, and older versions that backward passes still need."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._trained = tuple(value for value in parameters if value.requires_grad)
        self._version = 0
        self._used: dict[int, int] = {}
        """For each microbatch between its passes, the version that its forward pass used."""
        self._kept: dict[int, list[torch.Tensor]] = {}
        self.most_kept = 0
        """The largest number of older versions kept at once."""

    def forget(self) -> None:
        """Forget all passes: those under way were aborted."""
        self._used.clear()
        self._kept.clear()

    def forward(self, microbatch: int) -> None:
        """Record that a forward pass uses the current version."""
        self._used[microbatch] = self._version

    @contextmanager
    def backward(self, microbatch: int) -> Iterator[None]:
        """Put in place, while the context is open, the weights that the microbatch's forward pass used."""
        version = self._used[microbatch]
        now = [value.data for value in self._trained]
        if version != self._version:
            self._put(self._kept[version])
        try:
            yield
        finally:
            self._put(now)
            del self._used[microbatch]
            for old in self._kept.keys() - self._used.values():
                del self._kept[old]

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Allow in-place changes of the weights while the context is open; versions that passes still need are kept."""
        if self._version in self._used.values():
            self._kept[self._version] = [value.data for value in self._trained]
            self._put([value.data.clone() for value in self._trained])
            self.most_kept = max(self.most_kept, len(self._kept))
        self._version += 1
        # Backward passes would reject weights changed since their forward pass, but they get the right version.
        with keep_write_counts(self._trained):
            yield

    def _put(self, values: Sequence[torch.Tensor]) -> None:
        for parameter, value in zip(self._trained, values, strict=True):
            parameter.data = value


class _WindowWork(PassWork):
    """Several steps of a model replica, as `chunk.PassWork`: the microbatches of all their shards in sequence."""

    def __init__(
        self,
        stage: ReplicaStage,
        weights: WeightVersions,
        steps: range,
        counted: Callable[[int], Shards],
        batches: Callable[[int], Shards],
        context: StepContext,
        end: Ended,
    ) -> None:
        self._stage = stage
        self._part = stage.first_part
        self._weights = weights
        self._steps = steps
        self._batches = batches
        self._context = context
        self._control = context.control
        self._end = end
        self.places = [place for step in steps for place in numbered(step, counted(step))]
        self._open: dict[int, Mapping[tuple[int, int], Any]] = {}
        """For each step whose batches are here: by shard and microbatch, the batch, its
        start position and its row ids.
        """
        self._due: int | None = None
        """The step whose last backward pass has run here."""
        self._before = self._part.writes()
        self._keyed: dict[int, MicrobatchKeys] = {}
        self._search = FaultSearch()
        """The search of the step whose backward passes are running."""
        self._works: list[Work] = []
        """The sums of the step whose last backward pass has run."""
        self._reports: dict[int, ShardReports] = {}
        self.bars: list[Bar] = []

    @override
    def rows(self, number: int) -> int:
        return self.places[number].span.rows

    def batch(self, number: int) -> Any:
        """See `chunk.PassWork`. The batch comes with the values for the ledger."""
        place = self.places[number]
        step = place.span.step
        if step not in self._open:
            self._open[step] = self._batches_of(step)
        given = self._open[step][place.span.shard, place.in_shard]
        if place.ends_step:
            del self._open[step]
        return given

    @override
    def loss(self, number: int, model: nn.Module, given: Any) -> Objective:
        span = self.places[number].span
        return self._stage.loss(model, given, span, self._reports.setdefault(span.step, ShardReports()))

    @contextmanager
    @override
    def computing(self, kind: Kind, chunk: int, number: int, weight: Weight | None = None) -> Iterator[None]:
        self.end_due()
        part, place = self._part, self.places[number]
        step, shard, *_ = place.span
        self._control.check()
        self._control.compute(place.span, "forward" if kind == "F" else "backward")
        start, timed = time.time(), time.perf_counter()
        if kind == "F":
            self._weights.forward(number)
            with part.forward(step, shard, place.in_shard, self._before) as keyed:
                self._keyed[number] = keyed
                yield
            if number + 1 == len(self.places):
                # As late as possible: a request made during these steps is seen at their end.
                self._stage.send_flags(self._context.flags())
            if place.ends_step and self._stage.is_last:
                flags = self._stage.take_flags() if step == self._steps[-1] else Flags()
                self._stage.share_header(step - self._steps[0], self._reports.pop(step), flags)
        else:
            # The previous stage is past that microbatch, so it has received these gradients.
            self._stage.handovers.finish_one("backward", chunk - 1, number - 2)
            keyed = self._keyed.pop(number)
            keyed.backward()
            if weight is not None:
                part.gradients.weigh(weight)
            reducing = self._reducing(step, shard, chunk) if place.ends_step else nullcontext()
            with part.keys.opened(keyed), self._weights.backward(number), reducing:
                yield
            if place.ends_step:
                self._due = step
            elif place.ends_shard:
                # A step cannot be recomputed here because the weights have changed since; so each step is searched at
                # once.
                self._search.shard_ended(shard, chunk, part.parameters)
        taken = time.perf_counter() - timed
        self.bars.append(Bar(self._stage.number, Action(kind, chunk, number), start, start + taken))
        self._control.enter("collective", "stages")

    @contextmanager
    def _reducing(self, step: int, shard: int, chunk: int) -> Iterator[None]:
        """Submit a step's gradients as its last backward pass, of this shard, completes them, once they are searched.

        The stage with the loss has the header since its last forward pass of the step, and so have the others.
        """
        part = self._part
        self._stage.take_header(step - self._steps[0])

        def complete(named: Named) -> None:
            self._search.shard_ended(shard, chunk, reversed(named))

        with part.gradients.reducing(self._context.world, self._control.check, complete) as self._works:
            yield

    def end_due(self) -> None:
        """End the step whose last backward pass has run, once the gradients of its inputs are handed over."""
        step, self._due = self._due, None
        if step is None:
            return
        search, self._search = self._search, FaultSearch()
        self._end(step, search, self._works)

    def _batches_of(self, step: int) -> Mapping[tuple[int, int], Any]:
        """Return a step's batches with the values for the ledger: read on the first stage, received on the last."""
        stage, number = self._stage, step - self._steps[0]
        if stage.number:
            received: Mapping[tuple[int, int], Any] = stage.handovers.take_note("batch", number, 0)
            return received
        given = {
            (shard, index): with_ledger(one)
            for shard, microbatches in self._batches(step).items()
            for index, one in enumerate(microbatches)
        }
        stage.handovers.send_note("batch", number, given, stage.last)
        # Usually no stage is further behind than this, so these batches have been received.
        stage.handovers.finish_one("batch", 0, number - stage.stages - 1)
        self._control.enter("collective", "stages")
        return given
