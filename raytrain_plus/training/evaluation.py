"""Held-out evaluation: every row once, divided over shards; an exact mean over rows, a function of the state."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    names: list[str] | None = None
    stepper.module.eval()
    with torch.no_grad():
        for shard in sorted(hosted):
            stepper.restore_buffers()
            sums: dict[str, float] = {}
            rows = 0
            for index, microbatch in enumerate(batches(shard)):
                control.check()
                control.enter("computing")
                with stepper.parts[0].keys.microbatch("evaluate", shard, index):
                    figures = stepper.task.evaluate(stepper.module, to_device(microbatch.batch, stepper.device))
                given = _checked(figures)
                if names is not None:
                    _check_same(names, given)
                names = sorted(given)
                for name, value in given.items():
                    sums[name] = sums.get(name, 0.0) + value * microbatch.rows
                rows += microbatch.rows
            table[shard], rows_of[shard] = sums, rows
    stepper.restore_buffers()
    stepper.module.train()
    control.enter("collective")
    assert names is not None, "every worker has held-out rows"
    _agree(names, world, step, control, wait_s)
    flat = np.zeros((shards, len(names) + 1), dtype=np.float64)
    for shard, sums in table.items():
        flat[shard, 0] = rows_of[shard]
        flat[shard, 1:] = [sums.get(name, 0.0) for name in names]
    total = torch.from_numpy(flat)
    work = world.reduce(total, f"evaluation.{','.join(names)}")
    wait(work, f"the evaluation after step {step}", wait_s, control.interrupted)
    summed = [sum(column) for column in total.numpy().T.tolist()]
    return {name: value / summed[0] for name, value in zip(names, summed[1:], strict=True)}


def _check_same(names: Sequence[str], given: Mapping[str, float]) -> None:
    if sorted(given) != names:
        one, other = ", ".join(names) or "none", ", ".join(sorted(given)) or "none"
        raise TrainingError(f"evaluate gave other figures for other batches: {one}, and {other}")


def _agree(names: Sequence[str], world: World, step: int, control: Control, wait_s: float) -> None:
    """Raises `TrainingError` where another worker's batches gave other figures: no sum of theirs would match."""
    mine = zlib.crc32("\0".join(names).encode())
    seen = torch.tensor([mine, -mine])
    wait(
        world.reduce(seen, "evaluation.names", "max"), f"the evaluation after step {step}", wait_s, control.interrupted
    )
    if int(seen[0]) != -int(seen[1]):
        raise TrainingError(f"evaluate gave other figures for other batches; for some, {', '.join(names) or 'none'}")


def _checked(figures: Mapping[str, Any]) -> dict[str, float]:
    if not isinstance(figures, Mapping):
        raise TrainingError(
            f"evaluate returned {type(figures).__name__}; expected a dict of name -> mean over the batch"
        )
    try:
        return {str(name): float(value) for name, value in figures.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise TrainingError(f"evaluate returned a figure that is no single number: {error}") from error
