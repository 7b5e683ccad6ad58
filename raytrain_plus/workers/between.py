"""Change or save the state of a worker between two generations."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from raytrain_plus.errors import CheckpointError, DamagedError, RunError, StorageError
from raytrain_plus.state.checkpoint import read_tensors
from raytrain_plus.state.finite import as_tensors, not_finite
from raytrain_plus.state.holding import class_differences, model_state
from raytrain_plus.state.manifest import FOLDER, Manifest, mismatch
from raytrain_plus.state.named import dtype_name
from raytrain_plus.state.stages import all_but, own_tensors, own_tree
from raytrain_plus.state.transfer import Snapshot
from raytrain_plus.storage.retry import retry
from raytrain_plus.training.thread_control import Control
from raytrain_plus.workers.data_check import check_data
from raytrain_plus.workers.messages import Layers, Outcome, ShareOf
from raytrain_plus.workers.prepared import Prepared
from raytrain_plus.workers.reporter import tell_written
from raytrain_plus.workers.saver import Part
from raytrain_plus.workers.warm_up import FIRST_STEP_S


def finish(prepared: Prepared, control: Control, squares: Mapping[str, float]) -> Outcome:
    """Apply the step of which it has all sums, because others of its generation have: see `TrainState.finish`."""
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
        now.state.adopt(found)
    return replace(prepared.outcome("interrupted"), ready=None)


def restore(prepared: Prepared, manifest: Manifest, layers: Layers) -> None:
    """Load the state, or a stage's, from a checkpoint.

    Raises `DamagedError` if it is not what was written, and `CheckpointError` if it belongs to another model.
    """
    state, run = prepared.own.part(layers), prepared.run_folder()
    stored = own_tensors(manifest.tensors, all_but(layers.others))
    built = {
        name: (dtype_name(value.dtype), tuple(value.shape)) for name, value in model_state(state.holding()).items()
    }
    differing = mismatch(stored, built) or class_differences(manifest.tree, state.holding())
    if differing:
        rest = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise CheckpointError(
            f"the checkpoint belongs to another task: {'; '.join(differing[:3])}{rest}",
            where=f"{run.where}/{FOLDER}/{manifest.name}.json",
            remedy="use the layers, optimizer and args that the run began with, or start over with --fresh",
        )
    try:
        tensors = retry(lambda: read_tensors(run, manifest, dict.fromkeys(stored)))
    except StorageError as failure:
        raise StorageError(f"the checkpoint {manifest.name} cannot be read: {failure}") from failure
    bad = not_finite(as_tensors(tensors), state.allowed)
    if bad:
        # Older versions wrote such checkpoints.
        raise DamagedError(f"'{bad[0]}' holds NaN or infinity", where=f"{run.where}/{FOLDER}/{manifest.name}.json")
    tree = own_tree(manifest.tree, all_but(layers.others))
    state.adopt(Snapshot(manifest.step, tensors, json.dumps(tree).encode(), ""))


def keep(prepared: Prepared, controller: Any, share: ShareOf) -> None:
    """Write this worker's share of a checkpoint of the state that it holds."""
    state, saver = prepared.own.state, prepared.saver
    last_applied = state.last_applied
    assert last_applied is not None, "a partially applied state is never saved"
    saver.begin(Part(share, functools.partial(tell_written, controller)))
    saver.copy(last_applied, {})
    if state.last_applied != last_applied:
        raise RunError("the worker's state changed while it was being copied")
