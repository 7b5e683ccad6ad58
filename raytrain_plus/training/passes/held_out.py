"""Held-out microbatches on their way through the chunks of a model replica."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from typing_extensions import override

from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.data.values.collate import counts_tokens, default_weight
from raytrain_plus.parallel.pipeline.chunk import PassWork
from raytrain_plus.parallel.pipeline.timeline import Kind
from raytrain_plus.parallel.weighting import Weight
from raytrain_plus.task import Task
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.passes.metric_sums import Means, MetricSums, Outputs, ShardBatches, checked
from raytrain_plus.training.weights.model_part import ModelPart

AT_ONCE = 16
"""The most held-out microbatches in flight through the chunks at once."""
Numbered = Sequence[tuple[int, Microbatch]]
"""Some microbatches of a shard, with their numbers in it."""


def held_out(
    batches: ShardBatches, hosted: Sequence[int], control: Control, found: MetricSums
) -> Iterator[tuple[int, Numbered]]:
    """Yield the held-out microbatches of each shard, in lists of as many as pass at once; begin each in `found`."""
    for shard in hosted:
        found.begin(shard)
        numbered = enumerate(batches(shard))
        while True:
            control.enter("data")
            some = list(itertools.islice(numbered, AT_ONCE))
            control.enter("collective")
            if not some:
                break
            yield shard, some


def checked_each(task: Task, returned: Sequence[Any], some: Numbered) -> list[tuple[Means, Outputs]]:
    """Return the means of each microbatch and the values of its rows, given what `evaluate` returned for it."""
    summarised, by_token = type(task).summarise is not Task.summarise, counts_tokens(task)
    return [
        checked(given, one.rows, summarised, default_weight(task, one.batch, one.rows), by_token)
        for given, (_, one) in zip(returned, some, strict=True)
    ]


class HeldOut(PassWork):
    """Some held-out microbatches of a shard: their metrics take the place of the loss."""

    def __init__(
        self,
        parts: Mapping[int, ModelPart],
        shard: int,
        some: Numbered,
        batches: Sequence[Any],
        metrics: Callable[[nn.Module, Any, int], Any],
        control: Control,
    ) -> None:
        """Prepare. `metrics`: returns what `evaluate` returns for a batch of so many rows."""
        self._parts = parts
        self._shard = shard
        self._some = some
        self._batches = batches
        self._metrics = metrics
        self._control = control

    @override
    def rows(self, number: int) -> int:
        return self._some[number][1].rows

    @override
    def batch(self, number: int) -> Any:
        return self._batches[number]

    @override
    def loss(self, number: int, model: nn.Module, given: Any) -> Any:
        return self._metrics(model, given, self.rows(number))

    @contextmanager
    @override
    def computing(self, kind: Kind, chunk: int, number: int, weight: Weight | None = None) -> Iterator[None]:
        part, (index, _) = self._parts[chunk], self._some[number]
        self._control.check()
        self._control.enter("computing")
        if index == 0:
            part.buffers.restore()
        with part.evaluating(self._shard, index):
            yield
        self._control.enter("collective")
