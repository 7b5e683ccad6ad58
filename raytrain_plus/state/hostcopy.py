"""Copy the state, or a share of it, to separate host memory: the only part of a checkpoint that a step waits for."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from raytrain_plus.device_copies import StateCopies
from raytrain_plus.errors import TaskError
from raytrain_plus.membership.pieces import Pieces
from raytrain_plus.state.dtypes import DTYPES
from raytrain_plus.state.held import HeldTensor, held_tensors
from raytrain_plus.state.holding import Holding, describe_state
from raytrain_plus.state.json_tree import Json
from raytrain_plus.state.named import bytes_of, dtype_name
from raytrain_plus.state.stages import REST, layer_of
from raytrain_plus.state.stored.checkpoint import Copy
from raytrain_plus.state.stored.shares import MOST_BYTES, share_of
from raytrain_plus.state.transfer import Array, Snapshot
from raytrain_plus.state.weight_rows import TensorRows


class HostMemory:
    """Memory for copies, reused for the next one: fresh pages cost as much as the copy itself.

    Each method's result is valid until the next call, and from a GPU not before `wait` has returned.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._wait: Callable[[], None] = lambda: None

    def wait(self) -> None:
        """Wait until the last copy is complete."""
        self._wait()

    def copy(
        self,
        holding: Holding,
        writer: int,
        holders: Callable[[str], tuple[int, ...]],
        written: Pieces | None = None,
    ) -> tuple[list[Copy], Json]:
        """Copy the pieces that `writer` writes; return them and the tree.

        `holders` returns the writers that have a layer, or `state.stages.REST`. `written`: if the optimizer's state is
        sharded, the rows of weights that it writes, or None for all that it holds; the tree then has the optimizer's
        values of weights whose first rows are among them.
        """
        described, tree = describe_state(holding, with_values=True)
        layout = holding.layout
        divided = set[str]() if layout is None else layout.divided
        tensors = {key: value for key, value in described.items() if isinstance(key, str) and key not in divided}
        rows: list[HeldTensor] = []
        if layout is not None:
            written = Pieces.of(layout.rows) if written is None else written
            of_rows = {key: value for key, value in described.items() if isinstance(key, TensorRows)}
            rows = held_tensors(of_rows, written, layout.counts)
            first = {name: values for name, values in tree["optimizer"].items() if written.end(name, 0)}
            tree = {**tree, "optimizer": first}
        shapes = {name: (tuple(value.shape), value.nbytes) for name, value in tensors.items()}
        pieces = share_of(writer, shapes, lambda name: holders(layer_of(name) or REST))
        parts = [
            (piece, shapes[piece.name][0], tensors[piece.name].dtype, _rows(tensors[piece.name], *piece[1:]))
            for piece in pieces
        ]
        for held in rows:
            parts += [
                (piece, held.shape, held.value.dtype, bytes_of(held.slice(piece.first, piece.last)))
                for piece in held.pieces(MOST_BYTES)
            ]
        copied = self._copied([source for _, _, _, source in parts], holding.copies)
        return [
            Copy(piece, dtype_name(dtype), shape, data)
            for (piece, shape, dtype, _), data in zip(parts, copied, strict=True)
        ], tree

    def snapshot(self, step: int, holding: Holding) -> Snapshot:
        """Copy the whole state after `step`; the digest is left empty."""
        tensors, tree = describe_state(holding)
        copied = self._copied([bytes_of(value) for value in tensors.values()], holding.copies)
        packed = {
            name: (dtype_name(value.dtype), tuple(value.shape), data)
            for (name, value), data in zip(tensors.items(), copied, strict=True)
        }
        return Snapshot(step, packed, json.dumps(tree).encode(), "")

    def keep(self, snapshot: Snapshot) -> Snapshot:
        """Copy a snapshot into this memory."""
        rooms = self._rooms([data.nbytes for _, _, data in snapshot.tensors.values()], pinned=False)
        packed = {}
        for (name, (dtype, shape, data)), room in zip(snapshot.tensors.items(), rooms, strict=True):
            np.copyto(room.numpy(), data)
            packed[name] = dtype, shape, room.numpy()
        return replace(snapshot, tensors=packed)

    def _copied(self, sources: Sequence[torch.Tensor], copies: StateCopies) -> list[Array]:
        """Return copies of these byte tensors."""
        rooms = self._rooms([source.nbytes for source in sources], pinned=copies.pinned)
        self._wait = copies.copy(sources, rooms)
        return [room.numpy() for room in rooms]

    def _rooms(self, sizes: Sequence[int], pinned: bool) -> list[torch.Tensor]:
        """Return slices of the memory with these sizes in bytes."""
        if self._memory.nbytes < sum(sizes) or (pinned and not self._memory.is_pinned()):
            self._memory = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        ends = list(itertools.accumulate(sizes))
        return [self._memory[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _rows(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return the bytes of rows [first, last); a scalar has one row."""
    return bytes_of(tensor[first:last] if tensor.dim() else tensor)


def check_storable(holding: Holding) -> None:
    """Raise `TaskError` if a checkpoint cannot hold a tensor of the state."""
    for name, value in describe_state(holding)[0].items():
        if dtype_name(value.dtype) not in DTYPES:
            raise TaskError(
                f"'{name}' has dtype {dtype_name(value.dtype)}, which a checkpoint cannot hold",
                expected=f"one of {', '.join(DTYPES)}",
                remedy="convert it to one of these (for example complex128 to two float64)",
            )
