"""A worker's share of the state, copied into memory of its own: all of a checkpoint that a step waits for."""

from __future__ import annotations

import torch

from raytrain_plus.errors import TaskError
from raytrain_plus.state.checkpoint import Copy
from raytrain_plus.state.dtypes import DTYPES
from raytrain_plus.state.holding import Holding, described
from raytrain_plus.state.named import dtype_name
from raytrain_plus.state.shares import share_out
from raytrain_plus.state.stages import layer_of
from raytrain_plus.state.tree import Json


class HostMemory:
    """Memory for copies, kept from one checkpoint to the next: fresh pages cost as much as the copy itself."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, holding: Holding, rank: int, size: int, speaks: bool = True) -> tuple[list[Copy], Json]:
        """The pieces that this one, of so many who hold the same, writes, and the tree. They stand until the next call.

        What belongs to no layer is written by who `speaks` for all stages.
        """
        tensors, tree = described(holding)
        if not speaks:
            tensors = {name: value for name, value in tensors.items() if layer_of(name) is not None}
        sizes = {name: (tuple(value.shape), value.nbytes) for name, value in tensors.items()}
        pieces = share_out(sizes, size)[rank]
        total = sum(piece.bytes for piece in pieces)
        on_gpu = any(value.is_cuda for value in tensors.values())
        if self._memory.nbytes < total:
            self._memory = torch.empty(total, dtype=torch.uint8, pin_memory=on_gpu)
        copies = []
        at = 0
        for piece in pieces:
            value = tensors[piece.tensor]
            source = value.contiguous().reshape(-1).view(torch.uint8)[piece.start : piece.start + piece.bytes]
            target = self._memory[at : at + piece.bytes]
            target.copy_(source, non_blocking=True)
            copies.append(Copy(piece, dtype_name(value.dtype), tuple(value.shape), target.numpy()))
            at += piece.bytes
        if on_gpu:
            torch.cuda.synchronize()
        return copies, tree


def check_storable(holding: Holding) -> None:
    """Raises `TaskError` where a checkpoint could not hold the state."""
    for name, value in described(holding)[0].items():
        if dtype_name(value.dtype) not in DTYPES:
            raise TaskError(
                f"'{name}' is {dtype_name(value.dtype)}, which a checkpoint cannot hold",
                expected=f"one of {', '.join(DTYPES)}",
                remedy="keep it as one of these (a complex128 as two float64, say)",
            )
