"""Held-out evaluation: use every row once, divided over shards, and average exactly over rows, or summarise them.

Packed rows are averaged over their tokens, and batches with a weight over their weights. The result is a function of
the state.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from raytrain_plus.errors import TrainingError
from raytrain_plus.task import Task
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.passes.metric_sums import ShardBatches
from raytrain_plus.training.passes.outputs import forms, summarise
from raytrain_plus.training.passes.passes import ReplicaPasses
from raytrain_plus.training.update.train_state import TrainState

ROWS_SKIPPED = "rows_skipped"
"""The metric that counts the held-out rows that were left out (`data.on_error: skip`); missing if there are none."""


def evaluate(
    state: TrainState,
    passes: ReplicaPasses,
    batches: ShardBatches,
    hosted: Iterable[int],
    context: StepContext,
    *,
    shards: int,
    step: int,
) -> dict[str, float]:
    """Return the task's metrics over all held-out rows: the same bits on every worker, for any assignment of shards.

    Each shard's sums stay separate through the reduction (one writer, float64) and are added in shard order. If rows
    were left out, `ROWS_SKIPPED` is among the metrics. Raises `TrainingError` if workers have different metric names,
    or a worker has no row.
    """
    if state.stepwise is not None:
        # A worker that has just joined has heard of no step, and the others of the one before.
        state.stepwise.begin_step(step + 1, state.remembered)
    state.train(False)
    state.restore_buffers()
    with torch.no_grad(), state.averaged(context):
        sums = passes.metric_sums(batches, sorted(hosted), context)
    state.restore_buffers()
    state.train()
    names = sums.names
    context.control.enter("collective")
    if names is None:
        raise TrainingError(
            f"data.on_error: skip leaves no held-out row in the shards {', '.join(map(str, sorted(sums.rows)))}, so "
            "there is nothing to evaluate; correct the rows, or the function that cannot use them"
        )
    _agree(names, "names", step, context)
    flat = np.zeros((shards, 1 + 2 * len(names)), dtype=np.float64)
    for shard, of_shard in sums.by_shard.items():
        flat[shard, 0] = sums.skipped[shard]
        flat[shard, 1:] = [part for name in names for part in of_shard.get(name, (0.0, 0.0))]
    total = torch.from_numpy(flat)
    context.reduce(total, f"evaluation.{','.join(names)}", f"the evaluation after step {step}")
    summed = [sum(column) for column in total.numpy().T.tolist()]
    # If all that it is a mean of has the weight 0, a metric is undefined.
    found = {
        name: value / weight if weight else math.nan
        for name, value, weight in zip(names, summed[1::2], summed[2::2], strict=True)
    }
    if summed[0]:
        found[ROWS_SKIPPED] = summed[0]
    if type(state.task).summarise is Task.summarise:
        return found
    summary = dict[str, float]()
    if passes.is_last:
        _agree(forms(sums), "outputs", step, context)
        summary = summarise(state.task, sums, context, shards=shards, step=step)
        if both := sorted(summary.keys() & found.keys()):
            raise TrainingError(f"both evaluate and summarise returned '{both[0]}': give one of them another name")
    return {**found, **passes.share_metrics(summary)}


def _agree(names: Sequence[str], what: str, step: int, context: StepContext) -> None:
    """Raise `TrainingError` if another worker's batches gave other metric names: the sums would not match."""
    mine = zlib.crc32("\0".join(names).encode())
    seen = torch.tensor([mine, -mine])
    context.reduce(seen, f"evaluation.{what}", f"the evaluation after step {step}", "max")
    if int(seen[0]) != -int(seen[1]):
        raise TrainingError(
            f"evaluate returned different metrics for different batches; for some of them: {', '.join(names) or 'none'}"
        )
