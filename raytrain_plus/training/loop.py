"""The training thread's loop: batch, step, tell, evaluate; until the last step, a wish to pause, or an interrupt.

Nobody is asked anything: what happens after a step is a function of the step's number and of the header.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from raytrain_plus.collective.world import World
from raytrain_plus.data.reader import StepBatches
from raytrain_plus.training.control import Control
from raytrain_plus.training.evaluation import ShardBatches, evaluate
from raytrain_plus.training.records import Evaluated, StepRecord
from raytrain_plus.training.step import Stepper


class Feed(Protocol):
    """Where the batches come from."""

    def get(self, step: int, timeout_s: float, check: Callable[[], None]) -> StepBatches:
        """The batches of `step`; steps are asked for in order. `check` is called while it waits, and may raise."""

    def more(self) -> None:
        """The training thread waits for others: a good moment to make batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """When to evaluate, and on what."""

    every_steps: int
    batches: ShardBatches


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long things may last, in seconds."""

    step_s: float
    """Any single thing that a step does without a sign of progress."""
    first_step_s: float
    """The same in a generation's first step, which compiles, warms caches up and opens files, and in an evaluation."""
    wait_s: float
    """One collective: long, because who waits is not at fault; the controller looks for who is."""


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
    evaluated: int,
    limits: Limits,
    tell: Callable[[StepRecord | Evaluated], None],
    control: Control,
) -> Literal["paused", "finished"]:
    """Trains from `first_step` up to `steps`, or to the boundary at which somebody wished to pause.

    `tell` is called with each applied step and each evaluation, in order, and must not block. Evaluations up to the
    one after step `evaluated` have been made; one that is due at `first_step` and is not among them is made first.
    Raises `Interrupted` where the group changes.
    """

    def evaluate_after(step: int) -> None:
        if evaluation is None or step <= evaluated:
            return
        if step in (-1, steps - 1) or (step + 1) % evaluation.every_steps == 0:
            control.patience(limits.first_step_s)
            control.enter("data")
            metrics = evaluate(
                stepper,
                evaluation.batches,
                hosted,
                world,
                shards=shards,
                step=step,
                control=control,
                wait_s=limits.wait_s,
            )
            tell(Evaluated(step=step, metrics=metrics))

    evaluate_after(first_step - 1)
    for step in range(first_step, steps):
        start = time.monotonic()
        limit_s = limits.first_step_s if step == first_step else limits.step_s
        control.patience(limit_s)
        control.enter("data")
        batches = feed.get(step, limit_s, control.check)
        applied = stepper.run(step, batches.shards, world, control=control, wait_s=limits.wait_s, meanwhile=feed.more)
        tell(
            StepRecord(
                step=step,
                rows=applied.rows,
                loss=applied.loss,
                seconds=time.monotonic() - start,
                waited_s=batches.waited_s,
                time=time.time(),
                notes=applied.notes,
            )
        )
        evaluate_after(step)
        if applied.pause and step + 1 < steps:
            return "paused"
    return "finished"
