"""The work of a model replica in one step, whether its chunks are stages or layers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from typing_extensions import override

from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.parallel.pipeline.chunk import Objective, PassWork
from raytrain_plus.parallel.pipeline.timeline import Action, Bar, Kind
from raytrain_plus.parallel.weighting import Weight
from raytrain_plus.training.exchange.thread_control import Control, RowSpan
from raytrain_plus.training.model.randomness import MicrobatchKeys
from raytrain_plus.training.passes.passes import Shards
from raytrain_plus.training.update.fault_search import FaultSearch
from raytrain_plus.training.weights.model_part import ModelPart

Loss = Callable[[nn.Module, Any, RowSpan], Objective]
"""Returns what is backpropagated of a microbatch, given the model, what `PassWork.batch` returned, and its rows."""


class Place(NamedTuple):
    """A microbatch among those of all shards of a step."""

    span: RowSpan
    in_shard: int
    """Its number in its shard."""
    microbatch: Microbatch
    ends_shard: bool
    ends_step: bool


class PassSums(Protocol):
    """What becomes of a step's gradients as they are complete, and of its losses."""

    def reducing(self, chunk: int) -> AbstractContextManager[None]:
        """Return a context for the last backward pass of a chunk, in which its gradients may be submitted."""

    def passed(self, kind: Kind, chunk: int, *, last: bool) -> None:
        """Note that a pass of a chunk has run; `last`: whether it was the last microbatch of the step."""


def numbered(step: int, shards: Shards) -> list[Place]:
    """Return the microbatches of a step, shard after shard."""
    found = []
    for shard in sorted(shards):
        offset, last = 0, len(shards[shard]) - 1
        for index, one in enumerate(shards[shard]):
            found.append(Place(RowSpan(step, shard, offset, one.rows), index, one, index == last, ends_step=False))
            offset += one.rows
    if found:
        found[-1] = found[-1]._replace(ends_step=True)
    return found


class StepWork(PassWork):
    """The microbatches of a step, in sequence, with their buffers, random keys and gradients."""

    def __init__(
        self,
        parts: Mapping[int, ModelPart],
        places: Sequence[Place],
        batches: Sequence[Any],
        loss: Loss,
        sums: PassSums,
        control: Control,
        search: FaultSearch | None,
        *,
        stage: int = 0,
    ) -> None:
        """Prepare. `parts`: the chunks held here; `batches`: of each place; `search`: see `passes.Passes.run`."""
        self._parts = parts
        self._places = places
        self._batches = batches
        self._loss = loss
        self._sums = sums
        self._control = control
        self._search = search
        self._stage = stage
        self._before = {chunk: part.writes() for chunk, part in parts.items()}
        self._keyed: dict[tuple[int, int], MicrobatchKeys] = {}
        self._seen: dict[tuple[int, int], list[torch.Tensor | None]] = {}
        self.bars: list[Bar] = []
        """Its passes."""

    @override
    def rows(self, number: int) -> int:
        return self._places[number].span.rows

    @override
    def batch(self, number: int) -> Any:
        return self._batches[number]

    @override
    def loss(self, number: int, model: nn.Module, given: Any) -> Objective:
        return self._loss(model, given, self._places[number].span)

    @contextmanager
    @override
    def computing(self, kind: Kind, chunk: int, number: int, weight: Weight | None = None) -> Iterator[None]:
        part, place = self._parts[chunk], self._places[number]
        span, completes = place.span, kind in ("B", "W")
        # Gradients cannot be searched after they are submitted.
        submits = completes and place.ends_step and self._search is None
        reducing = self._sums.reducing(chunk) if submits else nullcontext()
        self._control.check()
        self._control.compute(span, "forward" if kind == "F" else "backward")
        start = time.perf_counter()
        if kind == "F":
            part.buffers.renew(committed=place.in_shard == 0)
            with part.forward(span.step, span.shard, place.in_shard, self._before[chunk]) as keyed:
                self._keyed[chunk, number] = keyed
                yield
            self._seen[chunk, number] = part.buffers.seen()
            if place.ends_shard:
                part.buffers.end_shard(span.shard, span.offset + span.rows)
        else:
            keyed = self._keyed[chunk, number]
            keyed.backward()
            if weight is not None:
                part.gradients.weigh(weight)
            with part.keys.opened(keyed), part.buffers.swapped(self._seen[chunk, number]), reducing:
                yield
            if completes:
                del self._keyed[chunk, number], self._seen[chunk, number]
                if place.ends_shard and self._search is not None:
                    self._search.shard_ended(span.shard, chunk, part.parameters)
                if place.ends_shard and not place.ends_step:
                    part.gradients.end_shard()
        end, taken = time.time(), time.perf_counter() - start
        self.bars.append(Bar(self._stage, Action(kind, chunk, number), end - taken, end))
        self._sums.passed(kind, chunk, last=place.ends_step)
