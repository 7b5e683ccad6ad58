"""Held-out evaluation: every row once, divided over shards; an exact mean over rows, a function of the state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from raytrain_plus.collective.world import World, wait
from raytrain_plus.data.reader import Microbatch
from raytrain_plus.errors import TrainingError
from raytrain_plus.training.control import Control
from raytrain_plus.training.model import to_device
from raytrain_plus.training.step import Stepper

ShardBatches = Callable[[int], Iterable[Microbatch]]
"""The microbatches of one shard's span of the held-out rows, in order."""


def evaluate(
    stepper: Stepper,
    batches: ShardBatches,
    hosted: Iterable[int],
    world: World,
    *,
    shards: int,
    step: int,
    control: Control,
    wait_s: float,
) -> dict[str, float]:
    """The task's figures over all held-out rows, the same bits on every worker, whoever hosts what.

    Each shard's sums are kept apart through the reduction (one writer, float64) and added in shard order.
    """
    table: dict[int, dict[str, float]] = {}
    rows_of: dict[int, int] = {}
    stepper.buffers.restore()
    stepper.module.eval()
    with torch.no_grad():
        for shard in sorted(hosted):
            sums: dict[str, float] = {}
            rows = 0
            for index, microbatch in enumerate(batches(shard)):
                control.check()
                control.enter("computing")
                with stepper.keys.microbatch("evaluate", shard, index):
                    figures = stepper.task.evaluate(stepper.module, to_device(microbatch.batch, stepper.device))
                for name, value in _checked(figures).items():
                    sums[name] = sums.get(name, 0.0) + value * microbatch.rows
                rows += microbatch.rows
            table[shard], rows_of[shard] = sums, rows
    stepper.module.train()
    names = sorted({name for sums in table.values() for name in sums})
    flat = np.zeros((shards, len(names) + 1), dtype=np.float64)
    for shard, sums in table.items():
        flat[shard, 0] = rows_of[shard]
        flat[shard, 1:] = [sums.get(name, 0.0) for name in names]
    total = torch.from_numpy(flat)
    control.enter("collective")
    work = world.reduce(total, f"evaluation.{','.join(names)}")
    wait(work, f"the evaluation after step {step}", wait_s, control.interrupted)
    summed = [sum(column) for column in total.numpy().T.tolist()]
    return {name: value / summed[0] for name, value in zip(names, summed[1:], strict=True)}


def _checked(figures: Mapping[str, Any]) -> dict[str, float]:
    if not isinstance(figures, Mapping):
        raise TrainingError(
            f"evaluate returned {type(figures).__name__}; expected a dict of name -> mean over the batch"
        )
    try:
        return {str(name): float(value) for name, value in figures.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise TrainingError(f"evaluate returned a figure that is no single number: {error}") from error
