"""Transfer the training state from one worker to another, or back from a checkpoint.

The receiver keeps it beside its own state until it is complete and its hash matches, and only then swaps it in.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from raytrain_plus.errors import TaskError
from raytrain_plus.membership.pieces import Piece, Pieces
from raytrain_plus.state.entry import OF_LAYERS, REBUILT
from raytrain_plus.state.holding import (
    Holding,
    describe_state,
    load_tree,
    model_state,
    scale_values,
)
from raytrain_plus.state.json_tree import from_json
from raytrain_plus.state.named import bytes_of, dtype_name, optimizer_values
from raytrain_plus.state.stages import Wanted, all_but, everything, own_tensors, own_tree, whole_tree
from raytrain_plus.state.weight_rows import Packed, TensorKey, TensorRows, Tensors, assemble, name_of, put_rows

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A worker's training state after `step`."""

    step: int
    tensors: Tensors
    values: bytes
    """The values that are not tensors, as JSON: see `state.holding`."""
    digest: str
    """The result of `snapshot_digest`; empty if not computed yet."""

    @property
    def bytes(self) -> int:
        """The size of its tensors."""
        return sum(data.nbytes for _, _, data in self.tensors.values())


def take_snapshot(step: int, holding: Holding, wanted: Wanted = everything) -> Snapshot:
    """Return the state after `step`, or some layers of it; on the CPU its tensors share memory with the live ones."""
    return _digested(undigested(step, holding, wanted))


def take_rows(step: int, holding: Holding, wanted: Wanted, rows: Pieces, *, with_values: bool = False) -> Snapshot:
    """Return the layers that are wanted, without what belongs to rows of weights, and what belongs to these `rows`.

    `with_values`: with the values of the rows by themselves, which may be newer than those in the weights of other
    workers.
    """
    described, tree = describe_state(holding, with_values=with_values)
    weights, held = set(rows.names), dict[TensorKey, Packed]()
    for key, value in described.items():
        if isinstance(key, TensorRows) and key.rows.name in weights:
            held[key] = _pack(value)
    tensors = assemble([held], rows)
    tensors |= {key: _pack(one) for key, one in own_tensors(described, wanted).items() if isinstance(key, str)}
    optimizer = {name: values for name, values in tree["optimizer"].items() if name in weights}
    values = own_tree(tree, wanted) | {"optimizer": optimizer}
    return _digested(Snapshot(step, tensors, json.dumps(values).encode(), ""))


def undigested(step: int, holding: Holding, wanted: Wanted) -> Snapshot:
    """Return the same as `take_snapshot`, without a digest: for a state that stays in this process."""
    tensors, tree = describe_state(holding)
    packed = {name: _pack(value) for name, value in own_tensors(tensors, wanted).items()}
    return Snapshot(step, packed, json.dumps(own_tree(tree, wanted)).encode(), "")


def part_of(snapshot: Snapshot, wanted: Wanted) -> Snapshot:
    """Return the wanted layers of a state."""
    values = json.dumps(own_tree(json.loads(snapshot.values), wanted)).encode()
    return _digested(Snapshot(snapshot.step, own_tensors(snapshot.tensors, wanted), values, ""))


def _digested(snapshot: Snapshot) -> Snapshot:
    return replace(snapshot, digest=snapshot_digest(snapshot.step, snapshot.tensors, snapshot.values))


def snapshot_digest(step: int, tensors: Tensors, values: bytes) -> str:
    """Return XXH3 (128 bits) over step, values and tensors in name order: it detects damage, not manipulation."""
    total = xxhash.xxh3_128(f"{step}\0".encode() + values)
    for key in sorted(tensors, key=str):
        dtype, shape, data = tensors[key]
        total.update(f"{key}\0{dtype}\0{shape}\0".encode())
        total.update(data.data)
    return total.hexdigest()


def restricted(snapshots: Sequence[Snapshot], others: Collection[str]) -> Snapshot:
    """Return one stage's state, without the layers `others`, from parts of the state that together have all of it.

    The digest is left empty unless nothing is to be changed.
    """
    if len(snapshots) == 1 and not others:
        return snapshots[0]
    tensors = {name: packed for snapshot in snapshots for name, packed in snapshot.tensors.items()}
    tree = whole_tree([json.loads(snapshot.values) for snapshot in snapshots])
    values = json.dumps(own_tree(tree, all_but(others))).encode()
    return Snapshot(snapshots[0].step, own_tensors(tensors, all_but(others)), values, "")


def with_rows(parts: Sequence[Snapshot], rows: Sequence[Piece], others: Collection[str] = ()) -> Snapshot:
    """Return a state with these rows of weights, without the layers `others`, out of parts that together have it.

    What is the same on all workers comes from the first part that has it.
    """
    given = [part.tensors for part in parts]
    alike: dict[TensorKey, Packed] = {}
    for part in reversed(given):
        alike |= {key: packed for key, packed in part.items() if isinstance(key, str)}
    tensors = put_rows(own_tensors(alike, all_but(others)), given) | assemble(given, rows, without=alike)
    tree = own_tree(whole_tree([json.loads(part.values) for part in parts]), all_but(others))
    optimizer = {name: tree["optimizer"][name] for name, _, _ in rows if name in tree["optimizer"]}
    values = json.dumps({**tree, "optimizer": optimizer}).encode()
    return Snapshot(parts[0].step, tensors, values, "")


def hashed(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    """Return the tensors over which the hash of a state is computed, given all its rows: see `state.named`."""
    tree, tensors = json.loads(snapshot.values), {name_of(key): one for key, one in snapshot.tensors.items()}
    persistent = {f"buffer/{name}" for name in tree["persistent"]}
    cpu = torch.device("cpu")
    state = {
        name: unpacked(packed, cpu)
        for name, packed in tensors.items()
        if name.startswith(("param/", "ema/", REBUILT)) or name in persistent
    }
    for parameter, values in tree["optimizer"].items():
        held = from_json(values, lambda name, on_cpu: unpacked(tensors[name], cpu))
        state |= optimizer_values(parameter, held)
    return state | scale_values(tree.get("counts", {}))


def load_snapshot(snapshot: Snapshot, holding: Holding) -> None:
    """Swap a snapshot in. Raises `TaskError` if it is of another model, before changing anything."""
    tree = json.loads(snapshot.values)
    targets = model_state(holding)
    given = {key for key in snapshot.tensors if name_of(key).startswith(OF_LAYERS)}
    unknown = set(tree["optimizer"]) - dict(holding.parameters).keys()
    differing = sorted(map(str, (given ^ targets.keys()) | unknown))
    if differing:
        raise TaskError(f"the task built another model than on other workers: it differs in {differing[:3]}")
    for key, target in targets.items():
        if tuple(target.shape) != snapshot.tensors[key][1]:
            raise TaskError(f"the task built another model than on other workers: {key} has another shape")
    _check_rebuilt(snapshot, holding)

    with torch.no_grad():
        load_tree(tree, holding, lambda key, device: unpacked(snapshot.tensors[key], device))
        for key, target in targets.items():
            _fill(target, snapshot.tensors[key])


def _check_rebuilt(snapshot: Snapshot, holding: Holding) -> None:
    """Raise `TaskError` if a frozen weight that was built here is not the one that the state was made with."""
    for name, digest in holding.rebuilt.items():
        if not np.array_equal(snapshot.tensors[f"{REBUILT}{name}"][2], digest.numpy()):
            raise TaskError(
                f"the frozen weight '{name}' has other values than those that the run began with",
                where="Task.rebuilt",
                expected="the same values from `model`, `layers` or `weights` on each machine, and whenever they are "
                "called",
                remedy="put back the files that the run began with, on each machine",
            )


def unpacked(packed: Packed, device: torch.device) -> torch.Tensor:
    """Return a separate tensor; it takes over the bytes if nothing else uses them, as for those of a checkpoint."""
    dtype, shape, data = packed
    if device.type == "cpu" and data.nbytes and data.flags.owndata and data.flags.writeable:
        return torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)
    value = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    _fill(value, packed)
    return value


def _pack(tensor: torch.Tensor) -> Packed:
    return dtype_name(tensor.dtype), tuple(tensor.shape), bytes_of(tensor.cpu()).numpy()


def _fill(target: torch.Tensor, packed: Packed) -> None:
    """Copy packed values into `target`. Memory of Ray's object store is neither kept nor written to."""
    dtype, _, data = packed
    if target.device.type == "cpu" and target.is_contiguous() and dtype_name(target.dtype) == dtype:
        np.copyto(bytes_of(target).numpy(), data)
    else:
        target.copy_(torch.from_numpy(np.array(data)).view(getattr(torch, dtype)).reshape(target.shape))
