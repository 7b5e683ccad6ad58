"""The training thread's loop: batch, step, tell, evaluate; until the last step, a wish to stop, or an interrupt.

Nobody is asked anything: what happens after a step is a function of the step's number and of the header.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from raytrain_plus.collective.world import World
from raytrain_plus.data.reader import StepBatches
from raytrain_plus.training.evaluation import ShardBatches, evaluate
from raytrain_plus.training.records import Evaluated, StepRecord
from raytrain_plus.training.step import Stepper


class Feed(Protocol):
    """Where the batches come from."""

    def get(self, step: int, timeout_s: float) -> StepBatches:
        """The batches of `step`; steps are asked for in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """When to evaluate, and on what."""

    every_steps: int
    batches: ShardBatches


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of the loop's waits."""

    hang_timeout_s: float
    first_step_s: float
    """The first step compiles, warms caches up, and opens files."""


def train(
    stepper: Stepper,
    feed: Feed,
    world: World,
    *,
    hosted: Sequence[int],
    shards: int,
    first_step: int,
    steps: int,
    evaluation: Evaluation | None,
    limits: Limits,
    tell: Callable[[StepRecord | Evaluated], None],
    wishes_stop: Callable[[], bool],
    interrupted: Callable[[], bool],
) -> bool:
    """Trains from `first_step` up to `steps`; True where it stopped early because somebody wished so.

    `tell` is called with each applied step and each evaluation, in order, and must not block.
    """

    def figures(step: int) -> None:
        assert evaluation is not None
        metrics = evaluate(
            stepper,
            evaluation.batches,
            hosted,
            world,
            shards=shards,
            step=step,
            timeout_s=limits.first_step_s,
            interrupted=interrupted,
        )
        tell(Evaluated(step=step, metrics=metrics))

    if evaluation is not None and first_step == 0:
        figures(-1)
    for step in range(first_step, steps):
        start = time.monotonic()
        timeout_s = limits.first_step_s if step == first_step else limits.hang_timeout_s
        batches = feed.get(step, timeout_s)
        applied = stepper.run(
            step, batches.shards, world, wishes_stop=wishes_stop(), timeout_s=timeout_s, interrupted=interrupted
        )
        tell(
            StepRecord(
                step=step,
                rows=applied.rows,
                loss=applied.loss,
                seconds=time.monotonic() - start,
                waited_s=batches.waited_s,
                time=time.time(),
            )
        )
        ended = applied.stop or step + 1 == steps
        if evaluation is not None and ((step + 1) % evaluation.every_steps == 0 or ended):
            figures(step)
        if applied.stop:
            return True
    return False
