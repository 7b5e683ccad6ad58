"""Rows of the tensors of the state that a worker has, as its export and its checkpoints need them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from raytrain_plus.membership.pieces import Piece, Pieces, split
from raytrain_plus.state.entry import StateTensor
from raytrain_plus.state.named import entry_of
from raytrain_plus.state.weight_rows import TensorRows


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """Rows [first, last) of a tensor of the state."""

    name: str
    """As where nothing is sharded."""
    value: torch.Tensor
    first: int
    last: int
    count: int
    """The number of rows of the whole tensor; one without dimensions has one, and so has an empty one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        whole = (self.first, self.last) == (0, self.count)
        return tuple(self.value.shape) if whole else (self.count, *self.value.shape[1:])

    @property
    def entry(self) -> StateTensor:
        """The entry of the whole tensor that these rows belong to."""
        held = entry_of(self.name, self.value)
        size = self.value.nbytes * self.count // max(1, self.last - self.first)
        return StateTensor(
            name=self.name,
            dtype=held.dtype,
            shape=self.shape,
            size=size,
            scalar=held.scalar,
            held=(self.first, self.last),
        )

    def pieces(self, most: int) -> list[Piece]:
        """Return the pieces of these rows, each of at most `most` bytes unless one row is larger."""
        if not self.value.nbytes:
            return [Piece(self.name, self.first, min(self.last, self.shape[0] if self.shape else 1))]
        row = self.value.nbytes // (self.last - self.first)
        return list(split(Pieces.of([Piece(self.name, self.first, self.last)]), {self.name: row}, most))

    def slice(self, first: int, last: int) -> torch.Tensor:
        """Return rows [first, last) of the tensor."""
        if (first, last) == (self.first, self.last):
            return self.value
        return self.value[first - self.first : last - self.first]


def whole_tensors(tensors: Mapping[str, torch.Tensor]) -> list[HeldTensor]:
    """Return tensors of the state with all their rows."""
    return [_whole(name, value) for name, value in tensors.items()]


def _whole(name: str, value: torch.Tensor) -> HeldTensor:
    count = (len(value) if value.dim() else 1) or 1
    return HeldTensor(name, value, 0, count, count)


def held_tensors(
    tensors: Mapping[TensorRows, torch.Tensor], wanted: Pieces, row_counts: Mapping[str, int]
) -> list[HeldTensor]:
    """Return what belongs to the wanted rows of weights, given the tensors of the rows held here.

    `row_counts`: how many rows each weight has. A number that belongs to all rows of a weight goes with the first row.
    """
    return [one for key, value in tensors.items() for one in _held(key, value, wanted, row_counts[key.rows.name])]


def _held(key: TensorRows, value: torch.Tensor, wanted: Pieces, count: int) -> Iterator[HeldTensor]:
    rows, name = key
    if value.dim() and count > 1:
        for _, first, last in Pieces.of([rows]) & wanted:
            yield HeldTensor(name, value[first - rows.first : last - rows.first], first, last, count)
    elif not rows.first and wanted.end(rows.name, 0):
        yield _whole(name, value)
