"""Overlapping steps: a window of them is summed and applied stage by stage, and committed together.

Each stage applies a step when its own part of it is complete, while others still compute theirs. Only after the last
step of a window do all stages hold one consistent state again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from raytrain_plus.collective.world import Work
from raytrain_plus.errors import TrainingError
from raytrain_plus.state.holding import LEFT_ALONE
from raytrain_plus.training.exchange.applied import Applied
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.header import StepTotals
from raytrain_plus.training.exchange.remarks import Remarks
from raytrain_plus.training.exchange.step_records import Remark
from raytrain_plus.training.exchange.verdict import SumStatus, gradient_norm, of_step, squares_of, why_refused
from raytrain_plus.training.passes.passes import Overlapping, Shards
from raytrain_plus.training.update.fault_search import FaultSearch
from raytrain_plus.training.update.train_state import Summed, TrainState
from raytrain_plus.training.weights.scheduler import rates_of


@dataclass(frozen=True, slots=True)
class _Part:
    """This stage's part of a step."""

    step: int
    totals: StepTotals
    reduce_s: float
    """Seconds of waiting for its sums."""
    lr: tuple[float, ...]
    remarks: tuple[Remark, ...]


@dataclass(slots=True)
class _Window:
    """The steps that this worker has summed and applied so far."""

    squares: dict[str, float] = field(default_factory=dict)
    parts: list[_Part] = field(default_factory=list)


class OverlappingSteps:
    """Makes the steps of one generation, several at a time, on a state that is a stage's."""

    def __init__(self, state: TrainState, passes: Overlapping, *, every: int, counted: Callable[[int], Shards]) -> None:
        """Prepare to make steps.

        `every`: the number of steps after which all stages synchronise. `counted`: see `passes.Overlapping`.
        """
        self.state = state
        self.passes = passes
        self.every = every
        self.begun = -1
        """The first of the steps that were begun last."""
        self._counted = counted
        self._remarks = Remarks()

    def complete(self, context: StepContext) -> None:
        """Do nothing: all members of a ring change the same weights."""

    def make(self, steps: range, batches: Callable[[int], Shards], context: StepContext) -> list[Applied]:
        """Compute and apply these steps; `batches`: see `passes.Overlapping`.

        Raises `TrainingError` if loss or sums are not finite; raises `Interrupted` or `WaitExpired` (after `wait_s` in
        one collective) if the world breaks. The state is unusable if it has begun to change.
        """
        state, window = self.state, _Window()
        self.begun = steps[0]
        state.train()
        self._begin_step(context)

        def end(step: int, search: FaultSearch, works: list[Work]) -> None:
            self._end_step(step, search, works, context, window)

        self.passes.run_window(steps, self._counted, batches, context, end)
        state.end(steps[-1])
        status = self.passes.agree(steps[-1], SumStatus(True, window.squares), context)
        context.control.check()
        state.finish({})
        return [
            Applied.of(
                one.totals, gradient_norm(squares_of(one.step, status.squares)), one.reduce_s, one.lr, one.remarks
            )
            for one in window.parts
        ]

    def _end_step(
        self, step: int, search: FaultSearch, works: list[Work], context: StepContext, window: _Window
    ) -> None:
        """Wait for the sums of this stage's part of a step and apply it, while passes of later steps are under way.

        Raises `TrainingError` if it cannot be applied.
        """
        state, control, sums = self.state, context.control, self.state.sums
        control.enter("collective")
        start = time.monotonic()
        sums.wait(works, step, context)
        reduce_s = time.monotonic() - start
        totals = sums.totals(self.passes.metrics, step, context)
        # No weights are tied.
        absent, norms = sums.means(totals.weight, lambda own: own)
        status = SumStatus(True, norms.squares())
        if not status.fit:
            status = replace(status, fault=sums.first_fault(search, self.passes.chunks, step, context))
        refused = why_refused(step, totals.bad_shards, status, searched=True)
        if refused:
            raise TrainingError(refused)
        window.squares |= of_step(step, status.squares)
        control.check()
        control.enter("applying", "optimizer")
        lr = rates_of(state.optimizer)
        with self.passes.updating():
            state.apply_overlapping(Summed(step, totals, absent, {}))
        left_alone = absent if state.rules[LEFT_ALONE] else ()
        window.parts.append(
            _Part(step, totals, reduce_s, lr, self._remarks.of_step(step, lr, left_alone, sums.flushed(), {}))
        )
        self._begin_step(context)
        # The next action waits for other workers.
        control.enter("collective", "stages")

    def _begin_step(self, context: StepContext) -> None:
        # No buffer changes, and no sum is exact.
        self.state.begin(context.world.size, {}, buffers=False)
