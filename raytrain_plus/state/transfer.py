"""Transfer the training state from one worker to another, or back from a checkpoint.

The receiver keeps it beside its own state until it is complete and its hash matches, and only then swaps it in.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from raytrain_plus.errors import TaskError
from raytrain_plus.membership.pieces import Pieces
from raytrain_plus.state import weight_rows
from raytrain_plus.state.entry import OF_MODEL
from raytrain_plus.state.holding import Holding, describe_state, load_tree, model_state, scale_values
from raytrain_plus.state.json_tree import from_json
from raytrain_plus.state.named import bytes_of, dtype_name, optimizer_values
from raytrain_plus.state.stages import Wanted, all_but, everything, own_tensors, own_tree, whole_tree

Array = npt.NDArray[Any]
Packed = tuple[str, tuple[int, ...], Array]
"""A tensor's dtype (its torch name), shape and bytes."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A worker's training state after `step`."""

    step: int
    tensors: Mapping[str, Packed]
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


def take_rows(
    step: int,
    holding: Holding,
    wanted: Wanted,
    pieces: Pieces,
    row_counts: Mapping[str, int],
    masters: Collection[str],
    *,
    with_values: bool = False,
) -> Snapshot:
    """Return the layers that are wanted, without what belongs to rows of weights, and what belongs to these rows.

    `row_counts`, `masters`: see `weight_rows.assemble`. `with_values`: with the values of the rows by themselves, which
    may be newer than those in the weights of other workers.
    """
    everything_here = undigested(step, holding, everything)
    tree = json.loads(everything_here.values)
    tensors, optimizer = weight_rows.restrict(everything_here.tensors, tree, pieces, row_counts, masters)
    same = own_tensors(everything_here.tensors, wanted)
    tensors = {name: packed for name, packed in same.items() if not weight_rows.is_sharded(name, masters)} | tensors
    if with_values:
        tensors |= weight_rows.values_of(everything_here.tensors, pieces, row_counts, masters)
    return _digested(Snapshot(step, tensors, json.dumps({**own_tree(tree, wanted), **optimizer}).encode(), ""))


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


def snapshot_digest(step: int, tensors: Mapping[str, Packed], values: bytes) -> str:
    """Return XXH3 (128 bits) over step, values and tensors in name order: it detects damage, not manipulation."""
    total = xxhash.xxh3_128(f"{step}\0".encode() + values)
    for name in sorted(tensors):
        dtype, shape, data = tensors[name]
        total.update(f"{name}\0{dtype}\0{shape}\0".encode())
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


def with_rows(
    parts: Sequence[Snapshot],
    parameters: Sequence[str],
    row_counts: Mapping[str, int],
    masters: Collection[str],
    others: Collection[str] = (),
) -> Snapshot:
    """Return a state with these rows, without the layers `others`, out of parts that together have it.

    `row_counts`, `masters`: see `weight_rows.assemble`. What is the same on all workers comes from the first part that
    has it.
    """
    trees = [json.loads(part.values) for part in parts]
    tensors, optimizer = weight_rows.assemble(
        [(part.tensors, tree) for part, tree in zip(parts, trees, strict=True)], parameters, row_counts, masters
    )
    alike: dict[str, Packed] = {}
    for part in parts:
        for name, packed in part.tensors.items():
            if not weight_rows.is_sharded(name, masters):
                alike.setdefault(name, packed)
    same = weight_rows.put_values(own_tensors(alike, all_but(others)), row_counts)
    tree = own_tree(whole_tree(trees), all_but(others)) | optimizer
    return Snapshot(parts[0].step, same | tensors, json.dumps(tree).encode(), "")


def hashed(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    """Return the tensors over which the state's hash is computed: see `state.named`."""
    tree = json.loads(snapshot.values)
    persistent = {f"buffer/{name}" for name in tree["persistent"]}
    cpu = torch.device("cpu")
    state = {
        name: unpacked(packed, cpu)
        for name, packed in snapshot.tensors.items()
        if name.startswith(("param/", "ema/")) or name in persistent
    }
    for parameter, values in tree["optimizer"].items():
        held = from_json(values, lambda name, on_cpu: unpacked(snapshot.tensors[name], cpu))
        state |= optimizer_values(parameter, held)
    return state | scale_values(tree.get("counts", {}))


def load_snapshot(snapshot: Snapshot, holding: Holding) -> None:
    """Swap a snapshot in. Raises `TaskError` if it is of another model, before changing anything."""
    tree = json.loads(snapshot.values)
    targets = model_state(holding)
    given = {name for name in snapshot.tensors if name.startswith(OF_MODEL)}
    differing = sorted((given ^ targets.keys()) | (set(tree["optimizer"]) - dict(holding.parameters).keys()))
    if differing:
        raise TaskError(f"the task built another model than on other workers: it differs in {differing[:3]}")
    for name, target in targets.items():
        if tuple(target.shape) != snapshot.tensors[name][1]:
            raise TaskError(f"the task built another model than on other workers: {name} has another shape")

    with torch.no_grad():
        load_tree(tree, holding, lambda name, device: unpacked(snapshot.tensors[name], device))
        for name, target in targets.items():
            _fill(target, snapshot.tensors[name])


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
