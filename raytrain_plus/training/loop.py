"""The training thread's loop: batch, step, tell, evaluate; until the last step, a wish to pause, or an interrupt.

Nobody is asked anything: what happens after a step is a function of the step's number and of the header.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from raytrain_plus.collective.world import World
from raytrain_plus.data.reader import StepBatches
from raytrain_plus.parallel.pipeline.timeline import Bar
from raytrain_plus.training.control import Control
from raytrain_plus.training.evaluation import evaluate
from raytrain_plus.training.header import Flags
from raytrain_plus.training.metrics import ShardBatches
from raytrain_plus.training.passes import Shards
from raytrain_plus.training.records import Evaluated, StepRecord
from raytrain_plus.training.step import Stepper

DRAWN = 3
"""Of each generation, the step that is drawn where the model is in stages: the first ones warm up."""


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
class Window:
    """Where steps overlap, and are committed some at a time."""

    every: int
    """Steps after which all come together."""
    counted: Callable[[int], Shards]
    """How many rows each microbatch of a step has."""


class Saving(Protocol):
    """Where checkpoints go."""

    def busy(self) -> bool:
        """Whether this worker still writes its share of an earlier one."""

    def check(self) -> None:
        """Raise `TrainingError` if a state that was to be kept is not finite."""

    def due(self, step: int, evaluated: bool) -> bool:
        """Whether the state after `step` is to be kept; the same for every member."""

    def copy(self, step: int, metrics: Mapping[str, float]) -> None:
        """Copies this worker's share of the state after `step`, with those figures, and writes it meanwhile."""


class Copying(Protocol):
    """Where copies of the state go that keep it, in memory, from being lost with this worker."""

    def ready(self) -> bool:
        """Whether this worker could make one now."""

    def due(self, step: int) -> bool:
        """Whether there is to be one of the state after `step`, if all can; the same for every member."""

    def copy(self, step: int, check: Callable[[], None]) -> None:
        """Copies the state after `step`, and sends it meanwhile. `check` is called while it waits, and may raise."""


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
    window: Window | None,
    evaluation: Evaluation | None,
    evaluated: int,
    limits: Limits,
    saving: Saving,
    copying: Copying,
    tell: Callable[[StepRecord | Evaluated], None],
    control: Control,
) -> Literal["paused", "finished"]:
    """Trains from `first_step` up to `steps`, or to the boundary at which somebody wished to pause.

    `tell` is called with each applied step and each evaluation, in order, and must not block. Evaluations up to the
    one after step `evaluated` have been made; one that is due at `first_step` and is not among them is made first.
    Raises `Interrupted` where the group changes.
    """

    def evaluate_after(step: int) -> dict[str, float]:
        if evaluation is None or step <= evaluated:
            return {}
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
            return metrics
        return {}

    def save_after(step: int, metrics: Mapping[str, float], flags: Flags) -> None:
        saving.check()
        if not (flags.save or saving.due(step, bool(metrics))):
            return
        if flags.busy:
            # All have heard it, and nobody begins: at the next boundary, or the one after.
            control.save(control.generation)
            return
        control.saved()
        control.enter("saving")
        saving.copy(step, metrics)

    def copy_after(step: int, able: bool) -> None:
        if able and copying.due(step):
            control.enter("saving")
            copying.copy(step, control.check)

    def flags() -> Flags:
        return Flags(pause=control.pausing(), save=control.saving(), busy=saving.busy(), uncopied=not copying.ready())

    copy_after(first_step - 1, copying.ready())
    evaluate_after(first_step - 1)
    step = first_step
    while step < steps:
        limit_s = limits.first_step_s if step == first_step else limits.step_s
        control.patience(limit_s)
        made = range(step, steps_end(step, steps, window, evaluation, saving) + 1)
        records, heard = _make(
            stepper,
            feed,
            world,
            made,
            window,
            drawn=first_step + DRAWN,
            control=control,
            flags=flags,
            limit_s=limit_s,
            wait_s=limits.wait_s,
        )
        for record in records:
            tell(record)
        step = made[-1]
        copy_after(step, not heard.uncopied)
        metrics = evaluate_after(step)
        if step + 1 < steps:
            # What a run ends with is kept when it ends.
            save_after(step, metrics, heard)
            if heard.pause:
                return "paused"
        step += 1
    return "finished"


def _make(
    stepper: Stepper,
    feed: Feed,
    world: World,
    steps: range,
    window: Window | None,
    *,
    drawn: int,
    control: Control,
    flags: Callable[[], Flags],
    limit_s: float,
    wait_s: float,
) -> tuple[list[StepRecord], Flags]:
    """Makes one step, or some that overlap; what is told of them, and what was wished for at their end."""
    start, waits_s = time.monotonic(), []

    def batches(step: int) -> Shards:
        control.enter("data")
        found = feed.get(step, limit_s, control.check)
        waits_s.append(found.waited_s)
        return found.shards

    if window is None:
        own = batches(steps[0])
        applied = [stepper.run(steps[0], own, world, control=control, wait_s=wait_s, meanwhile=feed.more, flags=flags)]
    else:
        applied = stepper.run_window(steps, window.counted, batches, world, control=control, wait_s=wait_s, flags=flags)
    seconds, now = time.monotonic() - start, time.time()
    records = [
        StepRecord(
            step=step,
            rows=one.rows,
            loss=one.loss,
            seconds=seconds / len(steps),
            waited_s=sum(waits_s) / len(steps),
            reduce_s=one.reduce_s,
            grad_norm=one.grad_norm,
            skipped=one.skipped,
            time=now - seconds * (steps[-1] - step) / len(steps),
            notes=one.notes,
            # Of steps that overlap, the passes of all are told with the last.
            **_pipelined(stepper.passes.bars if step == steps[-1] else (), drawn in steps),
        )
        for step, one in zip(steps, applied, strict=True)
    ]
    return records, applied[-1].flags


def steps_end(step: int, steps: int, window: Window | None, evaluation: Evaluation | None, saving: Saving) -> int:
    """The last of the steps, from `step` on, that are committed together; the same for every member."""
    if window is None:
        return step

    def ends(last: int) -> bool:
        evaluated = evaluation is not None and (last + 1) % evaluation.every_steps == 0
        whole = (last + 1) % window.every == 0 or last + 1 == steps
        return whole or evaluated or saving.due(last, evaluated)

    return next(last for last in range(step, steps) if ends(last))


def _pipelined(bars: Sequence[Bar], drawn: bool) -> dict[str, Any]:
    """What is told of a stage's passes; nothing where the model is in none."""
    if not bars:
        return {}
    return {
        "busy_s": sum(bar.end - bar.start for bar in bars),
        "passes": (bars[0].start, bars[-1].end),
        "bars": tuple(bars) if drawn else (),
    }
