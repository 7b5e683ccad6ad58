"""Load a checkpoint into what a worker holds."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from raytrain_plus.errors import CheckpointError, DamagedError, StorageError
from raytrain_plus.membership.pieces import Pieces
from raytrain_plus.state.finite import as_tensors, not_finite
from raytrain_plus.state.holding import RowLayout, class_differences, model_state, settings_kept
from raytrain_plus.state.named import dtype_name
from raytrain_plus.state.stages import all_but, own_tensors, own_tree
from raytrain_plus.state.stored.checkpoint import read_tensors
from raytrain_plus.state.stored.manifest import FOLDER, Manifest, StoredTensor, mismatch
from raytrain_plus.state.transfer import Snapshot
from raytrain_plus.state.weight_rows import Packed, TensorKey, TensorRows
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.retry import retry
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.workers.messages import Layers
from raytrain_plus.workers.preparation.prepared import Prepared


def restore(prepared: Prepared, manifest: Manifest, layers: Layers, owned: Pieces | None = None) -> None:
    """Load the state, or a stage's, from a checkpoint; `owned`: only the optimizer's state of these rows.

    Raises `DamagedError` if it is not what was written, and `CheckpointError` if it belongs to another model.
    """
    state, run = prepared.own.part(layers), prepared.run_folder()
    stored = own_tensors(manifest.tensors, all_but(layers.others))
    differing = mismatch(stored, _whole_model(state)) or class_differences(manifest.tree, state.holding())
    if differing and (lacking := _only_lacks(manifest, stored, state)):
        raise DamagedError(lacking, where=f"{run.where}/{FOLDER}/{manifest.name}.json")
    if differing:
        rest = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise CheckpointError(
            f"the checkpoint belongs to another task: {'; '.join(differing[:3])}{rest}",
            where=f"{run.where}/{FOLDER}/{manifest.name}.json",
            remedy="use the layers, optimizer and args that the run began with, or start over with --fresh",
        )
    if owned is not None:
        state.own(owned)
    tree = own_tree(manifest.tree, all_but(layers.others))
    try:
        tensors = retry(lambda: _read(run, manifest, list(stored), state.holding().layout))
    except StorageError as failure:
        raise StorageError(f"the checkpoint {manifest.name} cannot be read: {failure}") from failure
    kept = settings_kept(tree, state.holding()) if state.last_applied == -1 else []
    bad = not_finite(as_tensors(tensors), state.allowed)
    if bad:
        # Older versions wrote such checkpoints.
        raise DamagedError(f"'{bad[0]}' holds NaN or infinity", where=f"{run.where}/{FOLDER}/{manifest.name}.json")
    state.adopt(Snapshot(manifest.step, tensors, json.dumps(tree).encode(), ""))
    if prepared.plan.fresh_rates:
        state.renew_rates()
    else:
        state.kept = kept


def _only_lacks(manifest: Manifest, stored: Mapping[str, StoredTensor], state: TrainState) -> str:
    """Describe what a checkpoint of an older version lacks, if that is its only fault; empty otherwise.

    Such a version could call a checkpoint complete although a stage was missing. This one lists all parameters.
    """
    built = _whole_model(state)
    missing = sorted(built.keys() - stored.keys())
    alike = {name: built[name] for name in built if name in stored}
    if "weights" in manifest.tree or not missing or mismatch(stored, alike):
        return ""
    names = ", ".join(name.partition("/")[2] for name in missing[:3]) + (", ..." if len(missing) > 3 else "")
    return f"it lacks {len(missing)} of {len(built)} tensors of the task's model ({names}); or the model has changed"


def _whole_model(state: TrainState) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each tensor that the model's state has where nothing is sharded."""
    found = {
        key: (dtype_name(value.dtype), tuple(value.shape))
        for key, value in model_state(state.holding()).items()
        if isinstance(key, str)
    }
    for name, value in state.trained.weights:
        dtype = dtype_name(state.trained.dtypes[name])
        kinds = ("param",) if state.technique.decay is None else ("param", "ema")
        found |= {f"{kind}/{name}": (dtype, tuple(value.shape)) for kind in kinds}
    return found


def _read(run: Folder, manifest: Manifest, names: Collection[str], layout: RowLayout | None) -> dict[TensorKey, Packed]:
    """Read these tensors of a checkpoint, of what belongs to rows of weights only those that are changed here."""
    layout = layout or RowLayout((), {}, ())
    shared, by_weight = layout.divided, dict[str, list[str]]()
    for name in names:
        kind, _, rest = name.partition("/")
        weight = rest.partition("/")[0]
        if kind in ("param", "ema", "optim") and weight in layout.counts and name not in shared:
            by_weight.setdefault(weight, []).append(name)
    of_rows = {name for own in by_weight.values() for name in own}
    whole = read_tensors(run, manifest, dict.fromkeys(name for name in names if name not in of_rows))
    found: dict[TensorKey, Packed] = dict(whole.items())
    left = [rows for rows in layout.rows if rows.first < rows.last]
    while left:
        # One range of rows of each weight at a time.
        now = {rows.name: rows for rows in reversed(left)}
        left = [rows for rows in left if now[rows.name] != rows]
        keys = [TensorRows(rows, name) for weight, rows in now.items() for name in by_weight.get(weight, ())]
        wanted = {
            name: (rows.first, rows.last) if manifest.tensors[name].shape and layout.counts[rows.name] > 1 else None
            for rows, name in keys
        }
        read = read_tensors(run, manifest, wanted)
        found |= {key: read[key.tensor] for key in keys}
    return found
