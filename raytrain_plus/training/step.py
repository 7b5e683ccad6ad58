"""A step is a transaction: everything is summed first, and only then does anything change.

    each hosted shard, in order
        committed buffers back -> each microbatch: keys set, forward, weighted backward
    last backward of all:  buckets submitted as they fill; the header rides on the first
    all sums complete -> divided by the weight -> checked -> clipped -> optimizer, scheduler, buffers    = applied

A step is recomputed, before anything has changed, in two cases. If exact sums (`collective.exact`) did not fit their
grids, it is recomputed on grids that fit. If a sum is not finite, it is recomputed with a check after each shard.
`verdict` decides what follows.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import nn

from raytrain_plus.collective.world import Work
from raytrain_plus.errors import TrainingError
from raytrain_plus.parallel.data import BUCKET_BYTES
from raytrain_plus.parallel.half import ring_wire
from raytrain_plus.parallel.wire import MakeWire
from raytrain_plus.state import transfer
from raytrain_plus.state.finite import not_finite
from raytrain_plus.state.holding import LEFT_ALONE, METRICS, SKIPPED, Holding, model_state
from raytrain_plus.state.stages import Wanted, everything
from raytrain_plus.task import Task
from raytrain_plus.training.context import StepContext
from raytrain_plus.training.fault_search import FaultSearch
from raytrain_plus.training.header import Flags, StepTotals
from raytrain_plus.training.model import Built
from raytrain_plus.training.part import make_parts
from raytrain_plus.training.passes import Overlapping, Passes, Shards
from raytrain_plus.training.records import Remark
from raytrain_plus.training.remarks import STANDING, standing_still, too_small, without_gradient
from raytrain_plus.training.rider import Rider
from raytrain_plus.training.scheduler import build_scheduler, rates_of
from raytrain_plus.training.step_sums import StepSums
from raytrain_plus.training.verdict import (
    LOSS,
    SKIPPED_IN_A_ROW,
    SumStatus,
    gradient_norm,
    of_step,
    squares_of,
    why_refused,
)
from raytrain_plus.training.whole import WholePasses

TRIES = 3
"""How often a step is computed until its sums are fit or known to stay unfit; a reproducible step needs at most two."""

UNDEFINED = "the mean loss is undefined"
"""How the error about a step of weight 0 ends."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """A step that changed the state."""

    rows: int
    loss: float
    flags: Flags
    """The flags that members raised at this boundary."""
    notes: bytes
    """Each shard's contribution for the ledger: `data.ledger.NOTE`s in shard order."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The means of what the loss returned beside it."""
    grad_norm: float
    """Global norm of the gradient before clipping; NaN or infinite if the step was skipped for it."""
    skipped: bool = False
    """Sums were not finite: weights, optimizer, scheduler and buffers are unchanged."""
    lr: tuple[float, ...] = ()
    """The learning rate of each parameter group in this step; empty if this worker's optimizer has none."""
    remarks: tuple[Remark, ...] = ()
    reduce_s: float = field(compare=False)
    """Seconds of waiting for the sums after this worker's own part; ignored in comparisons of results."""


@dataclass(frozen=True, slots=True)
class _Summed:
    """A step with complete sums that is not applied yet."""

    step: int
    totals: StepTotals
    scales: dict[str, int]
    absent: frozenset[str]
    """The parameters held here that got no gradient."""


@dataclass(frozen=True, slots=True)
class _Computed:
    """A step whose sums the stages of a replica have agreed on."""

    totals: StepTotals
    status: SumStatus
    reduce_s: float
    absent: frozenset[str]
    refused: str = ""
    """Why the step must not be applied; empty if it may be."""


@dataclass(slots=True)
class _WindowSums:
    """The steps of a window that this worker has summed and applied so far."""

    squares: dict[str, float] = field(default_factory=dict)
    totals: list[StepTotals] = field(default_factory=list)
    reduce_s: list[float] = field(default_factory=list)
    """For each step, the seconds of waiting for its sums."""
    lr: list[tuple[float, ...]] = field(default_factory=list)
    remarks: list[tuple[Remark, ...]] = field(default_factory=list)


class Stepper:
    """Holds a model's training state and advances it step by step."""

    def __init__(
        self,
        task: Task,
        built: Sequence[Built],
        *,
        seed: int,
        shards: int,
        clip_norm: float | None,
        device: torch.device,
        exact: bool = False,
        make_wire: MakeWire = ring_wire,
        skip_nonfinite: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Build the training state.

        `built`: the model, or the chunks of it that this worker holds. `exact`: sums over shards are the same bits in
        any order. `skip_nonfinite`: keep the state in a step whose sums are not finite, instead of raising. Raises
        `TaskError` for parameters that cannot be summed exactly, and for a scheduler that needs an argument.
        """
        self.task = task
        self.parts = make_parts(
            task, built, seed=seed, shards=shards, exact=exact, make_wire=make_wire, bucket_bytes=bucket_bytes
        )
        named = [pair for part in self.parts for pair in part.parameters]
        self.named = [(name, value) for name, value in named if value.requires_grad]
        self.optimizer = task.optimizer(self.named) if self.named else None
        """None if a stage trains nothing: it has only frozen layers, or layers without weights."""
        self.scheduler = None if self.optimizer is None else build_scheduler(task, self.optimizer)
        self.tied = built[0].tied
        """For the whole model: parameters that are copies -> the parameters they copy."""
        self._sums = StepSums(self.parts, self.named, self.tied, shards=shards, device=device)
        self.passes: Passes | Overlapping = WholePasses(task, self.parts[0], self.rider, device=device, shards=shards)
        """Replaced in each generation if the model has stages."""
        self.begun = -1
        """The step that was begun last; of overlapping steps, the first."""
        self.last_applied: int | None = -1
        """The last applied step; None while the state is partially applied, also after an incomplete change."""
        self.scales: dict[str, int] = {}
        """The grids of the next exact sums, by parameter and buffer."""
        self.counts, self.rules = {SKIPPED: 0}, {LEFT_ALONE: True}
        """Parts of the committed state: the consecutive skipped steps up to this one, and the rules of its steps."""
        self._frozen = [(name, value) for name, value in named if not value.requires_grad]
        self._persistent = [
            name for part in self.parts for name, _ in part.module.named_buffers() if name in part.module.state_dict()
        ]
        self._clip_norm, self._skip_nonfinite = clip_norm, skip_nonfinite
        self.allowed: frozenset[str] = frozenset()
        """Names of values that are not finite from the beginning, such as a mask with infinities."""
        self._summed: _Summed | None = None
        self._standing = 0
        """The consecutive steps, up to the last one, with a learning rate of 0."""
        self._ended: int | None = None
        """The last step of a window that is complete here, and not known to be complete everywhere."""
        self.squares: dict[str, float] = {}
        """Squared gradient norms of all parameters of the model in the last applied step.

        A worker that has yet to apply that step needs them.
        """
        self.allowed = frozenset(not_finite(model_state(self.holding()).items()))

    @property
    def ready(self) -> int | None:
        """The step that `finish` can complete, or None."""
        return self._ended if self._summed is None else self._summed.step

    @property
    def rider(self) -> Rider:
        """The rider of the first bucket: header, metrics and small buffers."""
        return self._sums.rider

    @property
    def module(self) -> nn.Module:
        """The whole model, if this worker holds it."""
        [part] = self.parts
        return part.module

    def run(self, step: int, shards: Shards, context: StepContext) -> Applied:
        """Compute and apply step `step` over the microbatches of the hosted `shards`, with the world's other members.

        Raises `TrainingError` if loss or sums are not finite (before anything changed), unless such steps are skipped.
        Raises `Interrupted` or `WaitExpired` (after `wait_s` in one collective) if the world breaks.
        """
        self.begun = step
        for part in self.parts:
            part.module.train()
        computed = self._settle(step, shards, context)
        if computed.refused:
            self._check_may_skip(computed.refused)
        # A worker that must leave may have handed over its state, so it must not change it.
        context.control.check()
        context.control.enter("applying")
        squares, lr = computed.status.squares, rates_of(self.optimizer)
        self._apply(squares)
        remarks = () if computed.refused else self._remarks(step, computed.absent, lr)
        return _applied(
            computed.totals, gradient_norm(squares), computed.reduce_s, lr, remarks, skipped=bool(computed.refused)
        )

    def _settle(self, step: int, shards: Shards, context: StepContext) -> _Computed:
        """Compute a step until its sums may be applied, or must not be."""
        scales, search, unfit, reduce_s = self.scales, None, list[str](), 0.0
        for _ in range(TRIES):
            self._summed = None
            computed = self._compute(step, shards, context, scales, search, unfit)
            reduce_s += computed.reduce_s
            status = computed.status
            refused = why_refused(step, computed.totals.bad_shards, status, searched=search is not None)
            if status.fit or refused:
                if search is not None and not refused:
                    log.warning("step %d was not finite, but is finite when recomputed: check for faulty memory", step)
                return replace(computed, reduce_s=reduce_s, refused=refused)
            if status.settled:
                search = FaultSearch()
            else:
                measured, bad = self._sums.measure(step, context)
                # The gradients of these parameters were searched and are finite in each shard.
                unfit = [] if search is None else bad
                scales, search = {**scales, **measured}, FaultSearch() if bad else None
        raise TrainingError(
            f"the gradients of step {step} are not reproducible: each computation gives very different values; "
            "`reduction: exact` needs a loss that draws its random numbers from torch, NumPy or random"
        )

    def _compute(
        self,
        step: int,
        shards: Shards,
        context: StepContext,
        scales: Mapping[str, int],
        search: FaultSearch | None,
        unfit: Sequence[str],
    ) -> _Computed:
        """Run the passes and the sums of a step once.

        `unfit`: exact sums that were not finite the last time, although each shard's gradients were searched.
        """
        # A check of the protocol would take longer than most of what a step does beside its passes.
        passes, sums = cast(Passes, self.passes), self._sums
        sums.rider.fit(self.counts.get(METRICS, 0), context.world.size)
        sums.begin(scales)
        works = passes.run(step, shards, context, search)
        context.control.enter("collective")
        context.meanwhile()
        start = time.monotonic()
        totals = sums.wait(works, passes.metrics, step, context)
        if not totals.weight:
            raise TrainingError(f"the weights that the task's loss returned in step {step} sum to 0: {UNDEFINED}")
        reading = sums.read()
        if reading.settled:
            sums.take_means(totals.weight)
        absent = sums.add_tied(passes.exchange_tied, reading.settled, sums.without_gradient())
        squares = sums.squares() if reading.settled else {}
        if totals.bad_shards:
            squares[LOSS] = math.nan
        if not reading.settled:
            squares |= dict.fromkeys(unfit, math.nan)
        fault = None if search is None else sums.first_fault(search, passes.chunks, step, context)
        if fault is not None:
            squares[fault.parameter] = math.nan
        if reading.settled or squares:
            self._summed = _Summed(step, totals, dict(reading.scales), absent)
        status = passes.agree(step, SumStatus(reading.settled, squares, fault), context)
        return _Computed(totals, status, time.monotonic() - start, absent)

    def run_window(
        self, steps: range, counted: Callable[[int], Shards], batches: Callable[[int], Shards], context: StepContext
    ) -> list[Applied]:
        """Compute and apply these steps with overlapping passes; see `passes.Overlapping` for the arguments.

        Each stage applies a step when its own part of that step is complete; the state is consistent again after the
        last step. Raises the errors of `run`; the state is unusable if it has begun to change.
        """
        passes, window = cast(Overlapping, self.passes), _WindowSums()
        self.begun = steps[0]
        for part in self.parts:
            part.module.train()
        self._begin_window_step(context.world.size)
        self._summed = self._ended = None

        def end(step: int, search: FaultSearch) -> None:
            self._end_window_step(step, search, passes, context, window)

        passes.run_window(steps, counted, batches, context, end)
        for part in self.parts:
            part.buffers.check_unchanged()
        self._ended = steps[-1]
        status = passes.agree(steps[-1], SumStatus(True, window.squares), context)
        context.control.check()
        self.finish({})
        return [
            _applied(totals, gradient_norm(squares_of(step, status.squares)), reduce_s, lr, remarks)
            for step, totals, reduce_s, lr, remarks in zip(
                steps, window.totals, window.reduce_s, window.lr, window.remarks, strict=True
            )
        ]

    def _end_window_step(
        self, step: int, search: FaultSearch, passes: Overlapping, context: StepContext, window: _WindowSums
    ) -> None:
        """Sum and apply this stage's part of a step, while passes of later steps are under way.

        Raises `TrainingError` if it cannot be applied.
        """
        control, sums = context.control, self._sums
        works = list[Work]()
        for part in self.parts:
            with part.gradients.reducing(context.world, control.check) as started:
                pass
            works += started
        control.enter("collective")
        start = time.monotonic()
        totals = sums.wait(works, passes.metrics, step, context)
        window.reduce_s.append(time.monotonic() - start)
        absent = sums.without_gradient()
        sums.take_means(totals.weight)
        status = SumStatus(True, sums.squares())
        if not status.fit:
            status = replace(status, fault=sums.first_fault(search, passes.chunks, step, context))
        refused = why_refused(step, totals.bad_shards, status, searched=True)
        if refused:
            raise TrainingError(refused)
        window.squares |= of_step(step, status.squares)
        control.check()
        control.enter("applying")
        self.last_applied = None
        window.lr.append(rates_of(self.optimizer))
        with passes.updating():
            self._change(step, absent)
        window.remarks.append(self._remarks(step, absent, window.lr[-1]))
        self._count_metrics(totals)
        self._begin_window_step(context.world.size)
        window.totals.append(totals)
        # The next action waits for other workers.
        control.enter("collective")

    def _begin_window_step(self, members: int) -> None:
        # No buffer changes.
        self._sums.rider.fit(self.counts.get(METRICS, 0), members, buffers=False)
        for part in self.parts:
            part.gradients.begin({})

    def _count_metrics(self, totals: StepTotals) -> None:
        """Make room for the step's metrics in the next steps; a part of the state, so that all workers agree."""
        if len(totals.metrics) > self.counts.get(METRICS, 0):
            self.counts[METRICS] = len(totals.metrics)

    def finish(self, squares: Mapping[str, float]) -> None:
        """Apply the step whose sums are all complete, because others have applied it with the agreed `squares`.

        After a window: mark its steps as applied, because the others have completed it, too.
        """
        if self._ended is None:
            self._apply(squares)
        else:
            self.last_applied, self._ended = self._ended, None

    def snapshot(self, wanted: Wanted = everything) -> transfer.Snapshot:
        """Return the committed state, or some layers of it, for a worker that lacks it.

        Must not be called while a step is applied.
        """
        assert self.last_applied is not None, "a partially applied state is never given away"
        return transfer.take_snapshot(self.last_applied, self.holding(), wanted)

    def adopt(self, snapshot: transfer.Snapshot) -> None:
        """Replace the state by another worker's."""
        self.last_applied = self._summed = self._ended = None
        transfer.load_snapshot(snapshot, self.holding())
        self.restore_buffers()
        self.last_applied = snapshot.step

    def restore_buffers(self) -> None:
        """Put the committed buffers into the model."""
        for part in self.parts:
            part.buffers.restore()

    def holding(self) -> Holding:
        """Return references to all parts of the state."""
        return Holding(
            {name: value for part in self.parts for name, value in part.buffers.committed.items()},
            self.named,
            self._frozen,
            self.optimizer,
            self.scheduler,
            self.scales,
            self._persistent,
            self.counts,
            self.allowed,
            self.rules,
        )

    def _apply(self, squares: Mapping[str, float]) -> None:
        summed, self._summed = self._summed, None
        assert summed is not None, "the sums are complete"
        norm = gradient_norm(squares)
        self.squares = dict(squares)
        self._count_metrics(summed.totals)
        if not math.isfinite(norm):
            # All workers refuse the step alike: the state after it is the state before it.
            self.restore_buffers()
            self.counts[SKIPPED] += 1
            self.last_applied = summed.step
            return
        if self._clip_norm is not None and norm > self._clip_norm:
            self._sums.scale(self._clip_norm / (norm + 1e-6))
        self.last_applied = None
        self._change(summed.step, summed.absent)
        for part in self.parts:
            part.buffers.commit(summed.totals.rows)
        self.scales = summed.scales
        self.counts[SKIPPED] = 0
        self.last_applied = summed.step

    def _check_may_skip(self, refused: str) -> None:
        """Raise `TrainingError` unless a step refused for this reason may be skipped."""
        skipped = self.counts[SKIPPED] + 1
        if self._skip_nonfinite and skipped < SKIPPED_IN_A_ROW:
            log.warning("skipped: %s", refused)
            return
        self._summed = None
        if self._skip_nonfinite:
            refused += (
                f"; {skipped} consecutive steps were not finite, and `elastic.on_nonfinite: skip` allows {skipped - 1}"
            )
        raise TrainingError(refused)

    def _remarks(self, step: int, absent: Collection[str], lr: Sequence[float]) -> tuple[Remark, ...]:
        """Return what users should know of a step; `absent`: the parameters held here without a gradient."""
        found = []
        if step == 0 and absent and self.rules[LEFT_ALONE]:
            found.append(without_gradient(sorted(absent)))
        # The journal reports each remark once.
        if flushed := self._sums.flushed():
            found.append(too_small(flushed, step))
        self._standing = self._standing + 1 if lr and not any(lr) else 0
        if self._standing == STANDING:
            found.append(standing_still(step))
        return tuple(found)

    def _change(self, step: int, absent: Collection[str]) -> None:
        """Change weights, optimizer and scheduler; parameters without a gradient are left alone."""
        # An optimizer can draw random numbers, too.
        self.parts[0].keys.apply(step)
        if self.optimizer is not None:
            with self._sums.without(absent if self.rules[LEFT_ALONE] else ()):
                self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()


def _applied(
    totals: StepTotals,
    grad_norm: float,
    reduce_s: float,
    lr: tuple[float, ...],
    remarks: tuple[Remark, ...],
    skipped: bool = False,
) -> Applied:
    return Applied(
        rows=totals.rows,
        loss=totals.loss,
        flags=totals.flags,
        notes=totals.notes,
        metrics=totals.metrics,
        grad_norm=grad_norm,
        skipped=skipped,
        lr=lr,
        remarks=remarks,
        reduce_s=reduce_s,
    )
