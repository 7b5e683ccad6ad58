"""Measure what a shard costs beside its passes, and which number of shards keeps that small."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.device_copies import BatchCopies
from raytrain_plus.job.settings import Job
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.passes.task_loss import task_loss
from raytrain_plus.training.step.step import SynchronousSteps

MOST = 0.2
"""The largest share of its passes that a shard's own cost should be."""
LONG_S = 0.02
"""Seconds of passes beside which no shard's own cost counts."""
TIMES = 7
"""How often a time is taken; the shortest counts, because other work on the machine only adds to it."""
ENOUGH_S = 0.5
"""Seconds after which it is not taken again."""


@dataclass(frozen=True, slots=True)
class ShardCost:
    """The cost of a shard on this machine."""

    shards: int
    rows: int
    """Rows of a shard in a step."""
    passes_s: float
    """Seconds of its forward and backward passes."""
    own_s: float
    """Seconds that it costs beside them."""
    fewer: int | None = None
    """The most shards whose own cost is small enough; None if even a single one's is not."""

    @property
    def small(self) -> bool:
        """Whether the shard's own cost is small beside its passes."""
        return self.own_s <= MOST * self.passes_s

    def remark(self) -> str:
        """Return what a user should know; empty if the cost is small."""
        if self.small:
            return ""
        what = (
            f"each of the {self.shards} shards costs {1000 * self.own_s:.2f} ms beside the {1000 * self.passes_s:.2f} "
            f"ms that the passes of its {self.rows:,} row{'s' * (self.rows != 1)} take, more than a fifth; "
        )
        if self.fewer is None:
            return what + "so it would with any number of them: a larger data.batch_size lowers that share"
        return what + f"with data.shards = {self.fewer} it would be less"


def measure_shard_cost(
    job: Job, steps: SynchronousSteps, context: StepContext, batch: Callable[[int], Microbatch]
) -> ShardCost:
    """Measure the shards of a job by some steps of a whole model, whose state changes.

    `batch` returns a microbatch of the given number of rows. If its passes take long, nothing else is measured.
    """
    batch_size, shards, microbatches = job.data.batch_size, job.data.shards, job.parallel.microbatches
    rows = batch_size // shards
    one = batch(rows // microbatches)
    passes_s = microbatches * _passes_s(steps, one)
    if passes_s > LONG_S:
        return ShardCost(shards, rows, passes_s, 0.0)

    def step_s(count: int) -> float:
        given = dict.fromkeys(range(count), [one] * microbatches)
        return _shortest_s(lambda: steps.run(0, given, context))

    # The difference leaves out the costs of a step as a whole.
    many = min(shards, 4)
    own_s = max(0.0, (step_s(many) - step_s(1)) / (many - 1) - passes_s) if shards > 1 else 0.0
    found = ShardCost(shards, rows, passes_s, own_s)
    if found.small:
        return found
    for fewer in _divisors_below(shards, batch_size // microbatches):
        passes_s = microbatches * _passes_s(steps, batch(batch_size // fewer // microbatches))
        if ShardCost(fewer, batch_size // fewer, passes_s, own_s).small:
            return ShardCost(shards, rows, found.passes_s, own_s, fewer)
    return found


def _divisors_below(shards: int, whole: int) -> Iterator[int]:
    """Yield the smaller numbers of shards that divide the rows, the largest one first."""
    return (number for number in range(shards - 1, 0, -1) if whole % number == 0)


def _passes_s(steps: SynchronousSteps, one: Microbatch) -> float:
    """Return the seconds of the forward and backward pass of a microbatch, as a plain loop makes them."""
    state = steps.state
    state.train()
    on_device = BatchCopies(state.device)

    def passes() -> None:
        with state.technique.precision.autocast():
            loss = task_loss(state.task, state.module, on_device(one.batch), one.rows).loss
        torch.autograd.backward(loss)

    return _shortest_s(passes)


def _shortest_s(make: Callable[[], object]) -> float:
    found = []
    for _ in range(TIMES):
        start = time.perf_counter()
        make()
        found.append(time.perf_counter() - start)
        if sum(found) > ENOUGH_S:
            break
    return min(found)
