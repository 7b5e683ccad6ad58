"""The training thread's loop: batch, step, report, evaluate, until the last step, a pause request or an interrupt.

The loop asks no other process: what happens after a step is a function of the step number and the header.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from raytrain_plus.collective.world import SwitchableTransport, World
from raytrain_plus.data.ledger.ledger import SKIPPED
from raytrain_plus.data.reading.microbatches import StepBatches
from raytrain_plus.observe.expert_use import ExpertsUsed
from raytrain_plus.parallel.pipeline.timeline import Bar
from raytrain_plus.training.exchange.applied import Applied
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.early_stop import Evaluations
from raytrain_plus.training.exchange.header import Flags
from raytrain_plus.training.exchange.remarks import row_skipped
from raytrain_plus.training.exchange.step_records import Evaluated, Remark, StepRecord
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.passes.evaluation import evaluate
from raytrain_plus.training.passes.metric_sums import ShardBatches
from raytrain_plus.training.passes.passes import ReplicaPasses, Shards
from raytrain_plus.training.step.nccl_switch import Switch
from raytrain_plus.training.update.train_state import TrainState

Ended = Literal["paused", "finished"]
LEFT = "left"
"""The name of the last sum of a generation that has used NCCL."""
DRAWN = 3
"""Offset, in a generation, of the step whose passes are drawn if the model has stages; the first steps warm up."""


class Feed(Protocol):
    """The source of the batches."""

    def get(self, step: int, timeout_s: float, check: Callable[[], None]) -> StepBatches:
        """Return the batches of `step`; steps are requested in order.

        `check` is called during the wait and may raise.
        """

    def more(self) -> None:
        """Make batches while the training thread waits for other workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """When to evaluate, and on which batches."""

    every_steps: int
    batches: ShardBatches
    made: int = -2
    """The evaluations up to the one after this step have been made; -1 is the one before the first step."""


class Steps(Protocol):
    """The steps of one generation: `step.SynchronousSteps`, or `window.OverlappingSteps`."""

    state: TrainState
    """The state that they change."""
    every: int
    """Number of steps after which all stages hold one state."""
    begun: int
    """The step that was begun last; of overlapping steps, the first."""

    @property
    def passes(self) -> ReplicaPasses:
        """Their passes."""

    def make(self, steps: range, batches: Callable[[int], Shards], context: StepContext) -> list[Applied]:
        """Compute and apply these steps; `batches` returns the microbatches of one."""

    def complete(self, context: StepContext) -> None:
        """Bring the weights here that other members changed in the steps, if each changes some of them."""


class CheckpointWriter(Protocol):
    """The writer of checkpoints."""

    def busy(self) -> bool:
        """Return whether an earlier checkpoint is in progress."""

    def wait(self, check: Callable[[], None]) -> None:
        """Wait until no checkpoint is in progress; `check` is called meanwhile, and may raise."""

    def check(self) -> None:
        """Raise `TrainingError` if a state that was to be saved is not finite."""

    def due(self, step: int, evaluated: bool) -> bool:
        """Return whether the state after `step` must be saved; the same for every member."""

    def copy(self, step: int, metrics: Mapping[str, float]) -> None:
        """Copy this worker's share of the state after `step`, with those metrics, and write it in the background."""


class Copying(Protocol):
    """The sender of in-memory copies of the state that survive the loss of this worker."""

    def ready(self) -> bool:
        """Return whether this worker could make a copy now."""

    def due(self, step: int) -> bool:
        """Return whether the state after `step` is to be copied if all members can; the same for every member."""

    def copy(self, step: int, check: Callable[[], None]) -> None:
        """Copy the state after `step` and send it in the background.

        `check` is called during the wait and may raise.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimeouts:
    """Time limits in seconds."""

    step_s: float
    """Limit of any single action of a step without a sign of progress."""
    first_step_s: float
    """The same in an evaluation and in a generation's first step, which compiles, warms caches and opens files."""
    wait_s: float
    """Limit of one collective. It is long because a worker that waits is not at fault; the controller finds the
    culprit.
    """


Profiling = Callable[[range, StepContext], AbstractContextManager[StepContext]]
"""Opens while steps are made that may be profiled."""


def not_profiled(steps: range, context: StepContext) -> AbstractContextManager[StepContext]:
    """Profile nothing; see `Profiling`."""
    return nullcontext(context)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The steps of a generation, and what a member computes in them."""

    first_step: int
    end: int
    """One more than the last step of the job."""
    hosted: Sequence[int]
    """The shards that this member computes."""
    shards: int
    """The number of all shards."""
    incomplete: bool = False
    """Whether some member lacks weights that others changed in the step before `first_step`."""
    saved: bool = False
    """Whether a complete checkpoint has the state before `first_step` with its metrics.

    Otherwise it is saved first if it is the best so far.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Companions:
    """What serves the training thread: it gives batches, and takes records, copies and checkpoints."""

    feed: Feed
    saving: CheckpointWriter
    copying: Copying
    tell: Callable[[StepRecord | Evaluated | ExpertsUsed], None]
    """Called with each applied step, how it has used experts, and each evaluation, in order; must not block."""
    profiling: Profiling = not_profiled
    """Opens around steps, and returns the context to make them in."""


def train(
    steps: Steps,
    span: Span,
    worlds: tuple[World, SwitchableTransport | None],
    companions: Companions,
    *,
    evaluation: Evaluation | None,
    evaluations: Evaluations,
    timeouts: StepTimeouts,
    control: Control,
) -> Ended:
    """Make `steps`, up to the end of the span or to the boundary of a requested pause.

    `worlds`: that of the gradients' sums, and that of this model replica, if it has several workers. If the evaluation
    that is due before the first step has not been made, it is made first. `evaluations` has those that have, and ends
    the training early: all members know the same metrics, so they end together. Raises `Interrupted` if the group
    changes.
    """
    world, peers = worlds
    switch = Switch([world] if peers is None else [world, peers])
    context = _context_of(world, control, timeouts, companions, switch)
    training = _Training(steps, span, companions, context, switch, evaluation, evaluations, timeouts)
    if span.incomplete:
        steps.complete(context)
    return training.run()


def _context_of(
    world: World, control: Control, timeouts: StepTimeouts, companions: Companions, switch: Switch
) -> StepContext:
    """Return the context of a generation's steps."""

    def flags() -> Flags:
        return Flags(
            pause=control.pause_requested(),
            save=control.save_requested(),
            busy=companions.saving.busy(),
            uncopied=not companions.copying.ready(),
            forming=switch.forming,
        )

    meanwhile = companions.feed.more
    return StepContext(world=world, control=control, wait_s=timeouts.wait_s, flags=flags, meanwhile=meanwhile)


@dataclass(frozen=True, slots=True)
class _Training:
    """The steps of a generation, and what happens between them: copies, evaluations, checkpoints. See `train`."""

    steps: Steps
    span: Span
    companions: Companions
    context: StepContext
    switch: Switch
    evaluation: Evaluation | None
    evaluations: Evaluations
    timeouts: StepTimeouts

    def run(self) -> Ended:
        """Do what is due before the first step, and make the steps from it on."""
        steps, context, control, evaluations = self.steps, self.context, self.context.control, self.evaluations
        first_step, end, beside = self.span.first_step, self.span.end, self.companions
        self.copy(first_step - 1, beside.copying.ready())
        evaluations.reach(first_step - 1, self.evaluate(first_step - 1))
        if not self.span.saved and not self.ends_after(first_step - 1) and evaluations.is_best(first_step - 1):
            # Evaluated here, or a writer of its checkpoint was lost.
            self.keep(first_step - 1)
        step, spread_s, noticed = first_step, 0.0, tuple[Remark, ...]()
        while step < end and not evaluations.over:
            limit_s = self.timeouts.first_step_s if step == first_step else self.timeouts.step_s
            together = range(step, last_together(step, end, steps.every, self.evaluation, beside.saving) + 1)
            with beside.profiling(together, context) as watched:
                control.set_limit(limit_s)
                data, start = _Data(beside.feed, control, limit_s), time.monotonic()
                applied = steps.make(together, data.batches, watched)
                seconds = spread_s + time.monotonic() - start
            bars, drawn = steps.passes.bars, first_step + DRAWN in together
            data.remarks.setdefault(step, []).extend(noticed)
            for at, one in zip(together, applied, strict=True):
                if one.experts:
                    beside.tell(ExpertsUsed(step=at, layers=one.experts))
            for record in _records(together, applied, seconds, data.waited_s, bars, data.remarks, drawn=drawn):
                beside.tell(record)
            # Reported first: the step is applied, whether or not others live to send what they have changed. The time
            # counts in the next step.
            start = time.monotonic()
            steps.complete(context)
            spread_s = time.monotonic() - start
            step, flags = together[-1], applied[-1].flags
            noticed = self.switch.made(step, flags, seconds / len(together))
            self.copy(step, not flags.uncopied)
            evaluations.reach(step, self.evaluate(step))
            if not self.ends_after(step):
                # The final state is saved when the run ends.
                self.save(step, flags)
                if flags.pause:
                    return self.left("paused")
            step += 1
        return self.left("finished")

    def ends_after(self, step: int) -> bool:
        """Return whether no step follows this one."""
        return step + 1 >= self.span.end or self.evaluations.over

    def left(self, why: Ended) -> Ended:
        """Return why the training ends, once nobody needs this member's part of the last sums any more."""
        if self.switch.used:
            # With NCCL a member can finish first; leaving then would abort sums that its peers still wait for.
            self.context.reduce(torch.zeros(1, dtype=torch.int64), LEFT, "the others to have their sums")
        return why

    def copy(self, step: int, able: bool) -> None:
        """Copy the state after `step` if a copy is due and all members are `able` to make one."""
        control = self.context.control
        if able and self.companions.copying.due(step):
            control.enter("saving")
            self.companions.copying.copy(step, control.check)

    def evaluate(self, step: int) -> dict[str, float]:
        """Return the metrics of the state after `step` if an evaluation is due, else nothing."""
        if self.evaluation is None or step <= self.evaluation.made:
            return {}
        if step not in (-1, self.span.end - 1) and (step + 1) % self.evaluation.every_steps:
            return {}
        self.context.control.set_limit(self.timeouts.first_step_s)
        self.context.control.enter("data")
        span, passes, batches = self.span, self.steps.passes, self.evaluation.batches
        metrics = evaluate(self.steps.state, passes, batches, span.hosted, self.context, shards=span.shards, step=step)
        self.companions.tell(Evaluated(step=step, metrics=metrics))
        return metrics

    def save(self, step: int, flags: Flags) -> None:
        """Save the state after `step` if a checkpoint is due or requested."""
        control, metrics = self.context.control, self.evaluations.metrics(step)
        self.companions.saving.check()
        if not (flags.save or self.companions.saving.due(step, bool(metrics))):
            return
        if self.evaluations.is_best(step):
            self.keep(step)
        elif flags.busy:
            # All members have seen `busy`, and none begins: retry at the next boundary, or the one after.
            control.save(control.generation)
        else:
            control.clear_save_request()
            control.enter("saving")
            self.companions.saving.copy(step, metrics)

    def keep(self, step: int) -> None:
        """Save the state after `step`, the best so far, and wait until it is saved: no later state can take its place.

        So a member that is lost meanwhile takes nothing with it: the others hold that state, and save it again.
        """
        control = self.context.control

        def check() -> None:
            control.check()
            # The writer limits the wait, not `elastic.hang_timeout_s`.
            control.enter("saving")

        self.companions.saving.check()
        self.companions.saving.wait(check)
        control.clear_save_request()
        control.enter("saving")
        self.companions.saving.copy(step, self.evaluations.metrics(step))
        self.companions.saving.wait(check)


@dataclass(slots=True)
class _Data:
    """The batches of some steps, and the wait for them."""

    feed: Feed
    control: Control
    limit_s: float
    """Limit of the wait for one step's batches."""
    waited_s: float = 0.0
    remarks: dict[int, list[Remark]] = field(default_factory=dict)
    """Remarks on the data of a step."""

    def batches(self, step: int) -> Shards:
        """Return the batches of a step."""
        self.control.enter("data")
        with self.control.within("data"):
            found = self.feed.get(step, self.limit_s, self.control.check)
        self.waited_s += found.waited_s
        self.remarks[step] = [row_skipped(one) for one in found.skipped]
        return found.shards


def _records(
    steps: range,
    applied: Sequence[Applied],
    seconds: float,
    waited_s: float,
    bars: Sequence[Bar],
    remarks: Mapping[int, Sequence[Remark]],
    *,
    drawn: bool,
) -> list[StepRecord]:
    """Return the records of steps that were made together in `seconds`; `drawn`: with their `bars`.

    `remarks`: those on the data of each step.
    """
    now = time.time()
    return [
        StepRecord(
            step=step,
            rows=one.rows,
            loss=one.loss,
            seconds=seconds / len(steps),
            waited_s=waited_s / len(steps),
            reduce_s=one.reduce_s,
            grad_norm=one.grad_norm,
            skipped=one.skipped,
            lr=one.lr,
            remarks=(*one.remarks, *remarks.get(step, ())),
            time=now - seconds * (steps[-1] - step) / len(steps),
            metrics=one.metrics,
            notes=one.notes,
            skipped_rows=one.skipped_rows,
            rows_skipped=len(one.skipped_rows) // SKIPPED.itemsize,
            # Overlapping steps report all their passes with the last step.
            **_pipelined(bars if step == steps[-1] else (), drawn),
        )
        for step, one in zip(steps, applied, strict=True)
    ]


def last_together(step: int, end: int, every: int, evaluation: Evaluation | None, saving: CheckpointWriter) -> int:
    """Return the last of the steps, from `step` on, that are committed together; the same for every member."""

    def ends(last: int) -> bool:
        evaluated = evaluation is not None and (last + 1) % evaluation.every_steps == 0
        return (last + 1) % every == 0 or last + 1 == end or evaluated or saving.due(last, evaluated)

    return next(last for last in range(step, end) if ends(last))


def _pipelined(bars: Sequence[Bar], drawn: bool) -> dict[str, Any]:
    """Return the record fields about a stage's passes; empty if the model has no stages."""
    if not bars:
        return {}
    return {
        "busy_s": sum(bar.end - bar.start for bar in bars),
        "passes": (bars[0].start, bars[-1].end),
        "bars": tuple(bars) if drawn else (),
    }
