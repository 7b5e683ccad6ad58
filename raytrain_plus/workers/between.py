"""Change or save the state of a worker between two generations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from raytrain_plus.errors import RunError
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.workers.messages import Outcome, ShareOf, Written
from raytrain_plus.workers.preparation.data_check import check_data
from raytrain_plus.workers.preparation.prepared import Prepared
from raytrain_plus.workers.states.saver import Part
from raytrain_plus.workers.warm_up import FIRST_STEP_S


def finish(prepared: Prepared, control: Control, squares: Mapping[str, float]) -> Outcome:
    """Apply the step whose sums it has, because others have applied it: see `TrainState.finish`."""
    state = prepared.own.state
    control.set_limit(prepared.plan.job.elastic.hang_timeout_s)
    control.enter("applying")
    state.finish(squares)
    if state.last_applied == prepared.plan.steps - 1:
        # This worker ends the run without reaching the end of its own training.
        control.set_limit(FIRST_STEP_S)
        control.enter("data")
        check_data(prepared.plan)
    return prepared.outcome("interrupted")


def recall(prepared: Prepared, control: Control, step: int, *, in_use: bool) -> Outcome:
    """Load its copy of its own state after `step`, and return what it holds then.

    `in_use`: beside a step that is still being computed, nothing can be changed.
    """
    now = prepared.own.now
    found = None if now is None else prepared.copier.find(step, now.stage)
    if now is not None and found is not None and not in_use:
        control.enter("preparing")
        # Copies are made of states with all their rows.
        now.state.own(now.state.trained.rows)
        now.state.adopt(found)
    return replace(prepared.outcome("interrupted"), ready=None)


def keep(prepared: Prepared, share: ShareOf, tell: Callable[[Written], None]) -> None:
    """Write this worker's share of a checkpoint of the state that it holds; `tell` hears of it, on another thread."""
    state, saver = prepared.own.state, prepared.saver
    last_applied = state.last_applied
    assert last_applied is not None, "a partially applied state is never saved"
    saver.begin(Part(share, tell))
    saver.copy(last_applied, {})
    if state.last_applied != last_applied:
        raise RunError("the worker's state changed while it was being copied")
