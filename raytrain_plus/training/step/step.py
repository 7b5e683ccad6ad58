"""A step is a transaction: everything is summed first, and only then does anything change.

    each hosted shard, in order
        committed buffers back -> each microbatch: keys set, forward, backward of the mean loss
    last backward of all:  buckets submitted as they fill; the header rides on the first
    all sums complete -> divided by the weight -> checked -> clipped -> optimizer, scheduler, buffers    = applied

A step is recomputed, before anything has changed, in three cases. If exact sums (`collective.exact`) did not fit their
grids, it is recomputed on grids that fit. If gradients of scaled losses are not finite, it is recomputed with half the
scale (`loss_scale`). If a sum is not finite otherwise, it is recomputed with a check after each shard. What follows is
decided by `verdict`.
"""

from __future__ import annotations

import json
import logging
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from raytrain_plus.device_clock import marks
from raytrain_plus.errors import TrainingError
from raytrain_plus.parallel.step_modules import RoutedStep
from raytrain_plus.state.holding import LEFT_ALONE, MEAN_LOSS, SKIPPED
from raytrain_plus.training.exchange.applied import Applied
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.header import StepTotals
from raytrain_plus.training.exchange.remarks import Remarks
from raytrain_plus.training.exchange.skipped_rows import skipped_rows
from raytrain_plus.training.exchange.verdict import (
    LOSS,
    SKIPPED_IN_A_ROW,
    SumStatus,
    gradient_norm,
    overflows,
    why_refused,
)
from raytrain_plus.training.passes.passes import Passes, Shards
from raytrain_plus.training.update.fault_search import FaultSearch
from raytrain_plus.training.update.train_state import Summed, TrainState
from raytrain_plus.training.weights.loss_scale import LossScale
from raytrain_plus.training.weights.scheduler import rates_of

TRIES = 3
"""How often a step is computed until its sums are fit or known to stay unfit; a reproducible step needs at most two."""

UNDEFINED = "the mean loss is undefined"
"""How the error about a step of weight 0 ends."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Try:
    """How a step is computed."""

    scales: Mapping[str, int]
    """The grids of its exact sums."""
    loss_scale: LossScale | None = None
    """The scale of its losses, if they have one."""
    search: FaultSearch | None = None
    """It checks each shard's gradients."""
    unfit: Sequence[str] = ()
    """Exact sums that were not finite the last time, although each shard's gradients were searched."""


@dataclass(frozen=True, slots=True)
class _Computed:
    """A step whose sums the stages of a replica have agreed on."""

    totals: StepTotals
    status: SumStatus
    reduce_s: float
    absent: frozenset[str]
    """The parameters held here that got no gradient."""
    routed: RoutedStep


class SynchronousSteps:
    """Makes the steps of one generation, one after the other, on a state."""

    every = 1
    """The number of steps after which one state exists."""

    def __init__(self, state: TrainState, passes: Passes, *, skip_nonfinite: bool = False) -> None:
        """Prepare to make steps.

        `skip_nonfinite`: keep the state in a step whose sums are not finite, instead of raising.
        """
        self.state = state
        self.passes = passes
        self.begun = -1
        """The step that was begun last."""
        self._mark = marks(state.device)
        self._skip_nonfinite = skip_nonfinite
        self._remarks = Remarks()

    def make(self, steps: range, batches: Callable[[int], Shards], context: StepContext) -> list[Applied]:
        """Compute and apply these steps; `batches` returns the microbatches of one. See `run`."""
        return [self.run(step, batches(step), context) for step in steps]

    def complete(self, context: StepContext) -> None:
        """Bring the weights that other members have changed here, if they change others."""
        if self.state.exchange is not None:
            context.control.enter("collective")
            self.state.spread(context)

    def run(self, step: int, shards: Shards, context: StepContext) -> Applied:
        """Compute and apply step `step` over the microbatches of the hosted `shards`, with the world's other members.

        Raises `TrainingError` if loss or sums are not finite (before anything changed), unless such steps are skipped.
        Raises `Interrupted` or `WaitExpired` (after `wait_s` in one collective) if the world breaks.
        """
        self.begun = step
        self.state.train()
        self._check_remembered(step, context)
        one, reduce_s, tries = _Try(self.state.scales, self.state.loss_scale), 0.0, TRIES
        while tries:
            computed = self._compute(step, shards, context, one)
            reduce_s += computed.reduce_s
            refused = why_refused(step, computed.totals.bad_shards, computed.status, searched=one.search is not None)
            if computed.status.fit or refused:
                if one.search is not None and not refused:
                    log.warning("step %d was not finite, but is finite when recomputed: check for faulty memory", step)
                return self._apply(step, computed, refused, reduce_s, context)
            half = self._half(one, computed)
            one = self._next_try(step, one, half, computed.status, context)
            tries = tries - 1 if half is None else TRIES
        raise TrainingError(
            f"the gradients of step {step} are not reproducible: each computation gives very different values; "
            "`reduction: exact` needs a loss that draws its random numbers from torch, NumPy or random"
        )

    def _check_remembered(self, step: int, context: StepContext) -> None:
        """Raise `TrainingError` if the task remembers something else on another worker."""
        task, remembered = self.state.stepwise, self.state.remembered
        if task is None or not task.remembers() or context.world.size == 1:
            return
        mine = zlib.crc32(json.dumps(remembered, sort_keys=True).encode())
        seen = torch.tensor([mine, -mine])
        context.control.enter("collective")
        context.reduce(seen, "remembered", f"what the task remembers before step {step}", "max")
        if int(seen[0]) != -int(seen[1]):
            raise TrainingError(
                f"what the task remembers before step {step} differs between workers: it must depend on nothing but "
                "what it remembered before, and the metrics of the step"
            )

    def _compute(self, step: int, shards: Shards, context: StepContext, one: _Try) -> _Computed:
        """Run the passes and the sums of a step once."""
        state, passes, sums, search = self.state, self.passes, self.state.sums, one.search
        state.begin(context.world.size, one.scales, loss_scale=one.loss_scale)
        works = passes.run(step, shards, context, search)
        context.control.enter("collective")
        context.meanwhile()
        start = self._mark()
        sums.wait(works, step, context)
        # A worker alone knows the weight, as a rule, and then one copy to the host has all that it must know. The means
        # of sums that do not fit their grids are made in vain, and nothing uses them.
        weight = passes.weight if context.world.size == 1 else None
        means = sums.means(weight, passes.exchange_tied) if weight else None
        summed = self._mark()
        tallies = [part.buffers.routed() for part in state.parts]
        routed = RoutedStep({name: one for tally in tallies for name, one in tally.items()})
        sums.read_with([*passes.unread, *routed.unread, *([] if means is None else means.norms.unread)])
        totals = sums.totals(passes.metrics, step, context)
        if skipped := skipped_rows(step, totals, shards, context, state.device):
            totals = replace(totals, skipped_rows=skipped)
        if not totals.weight:
            raise TrainingError(f"the weights that the task's loss returned in step {step} sum to 0: {UNDEFINED}")
        reading = sums.read()
        if means is None:
            means = sums.means(totals.weight, passes.exchange_tied, settled=reading.settled)
            summed = self._mark() if reading.settled else summed
        absent = means.absent
        squares = means.norms.squares() if reading.settled else {}
        if totals.bad_shards:
            squares[LOSS] = math.nan
        if not reading.settled:
            # All stages must know of an overflow, wherever it is.
            overflowed = sums.overflowed() if one.loss_scale is not None else []
            squares |= dict.fromkeys([*one.unfit, *overflowed], math.nan)
        fault = None if search is None else sums.first_fault(search, passes.chunks, step, context)
        if fault is not None:
            squares[fault.parameter] = math.nan
        if reading.settled or squares:
            state.hold(Summed(step, totals, absent, dict(reading.scales), one.loss_scale))
        agreeing = time.monotonic()
        status = passes.agree(step, SumStatus(reading.settled, squares, fault), context)
        # The host has read what was requested before `summed`, so the device is past it.
        reduce_s = start.seconds_to(summed) + time.monotonic() - agreeing
        return _Computed(totals, status, reduce_s, absent, routed)

    def _half(self, one: _Try, computed: _Computed) -> LossScale | None:
        """Return half the scale of the loss if gradients have overflowed that may not with it."""
        if one.loss_scale is None or computed.totals.bad_shards or not overflows(computed.status.squares):
            return None
        mean = self.state.rules[MEAN_LOSS]
        return one.loss_scale.halved(1.0 if mean else computed.totals.weight / self.state.shards)

    def _next_try(self, step: int, one: _Try, half: LossScale | None, status: SumStatus, context: StepContext) -> _Try:
        """Return how a step is computed again whose sums do not fit their grids, or are not finite.

        `half`: half the scale of the loss, if that may help.
        """
        if status.settled:
            return _Try(one.scales, one.loss_scale, FaultSearch()) if half is None else _Try(one.scales, half)
        measured, bad = self.state.sums.measure(step, context)
        if half is not None:
            # What did not fit is measured again.
            return _Try({name: scale for name, scale in {**one.scales, **measured}.items() if name not in bad}, half)
        # The gradients of these parameters were searched and are finite in each shard.
        unfit = [] if one.search is None else bad
        return _Try({**one.scales, **measured}, one.loss_scale, FaultSearch() if bad else None, unfit)

    def _apply(self, step: int, computed: _Computed, refused: str, reduce_s: float, context: StepContext) -> Applied:
        """Apply a step, or skip it if it is `refused` and may be skipped."""
        state, totals, squares = self.state, computed.totals, computed.status.squares
        if refused:
            self._check_may_skip(refused)
        # A worker that must leave may have handed over its state, so it must not change it.
        context.control.check()
        context.control.enter("applying", "optimizer")
        lr = rates_of(state.optimizer)
        state.apply(squares)
        norm = gradient_norm(squares)
        if refused:
            return Applied.of(totals, norm, reduce_s, lr, skipped=True)
        left_alone = computed.absent if state.rules[LEFT_ALONE] else ()
        experts = computed.routed.uses()
        remarks = self._remarks.of_step(step, lr, left_alone, state.sums.flushed(), experts)
        return Applied.of(totals, norm, reduce_s, lr, remarks, experts=experts)

    def _check_may_skip(self, refused: str) -> None:
        """Raise `TrainingError` unless a step refused for this reason may be skipped."""
        skipped = self.state.counts[SKIPPED] + 1
        if self._skip_nonfinite and skipped < SKIPPED_IN_A_ROW:
            log.warning("skipped: %s", refused)
            return
        self.state.let_go()
        if self._skip_nonfinite:
            refused += (
                f"; {skipped} consecutive steps were not finite, and `elastic.on_nonfinite: skip` allows {skipped - 1}"
            )
        raise TrainingError(refused)
