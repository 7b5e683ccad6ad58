"""Which rows of which tensors of the state a worker has, as its export and its checkpoints need them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from raytrain_plus.membership.pieces import Piece, Pieces, split
from raytrain_plus.state.entry import StateTensor
from raytrain_plus.state.named import entry_of
from raytrain_plus.state.weight_rows import WeightRows, whole_name


@dataclass(frozen=True)
class HeldRows:
    """The rows of weights that a worker changes, and how many rows each weight has; see `rows`."""

    owned: Sequence[WeightRows]
    row_counts: Mapping[str, int]

    @cached_property
    def by_weight(self) -> Mapping[str, Sequence[WeightRows]]:
        """Those of each weight that has any."""
        found: dict[str, list[WeightRows]] = {}
        for rows in self.owned:
            found.setdefault(rows.weight, []).append(rows)
        return found

    def of(self, weight: str) -> Sequence[WeightRows]:
        """Return those of one weight."""
        return self.by_weight.get(weight, ())


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


def held_tensors(tensors: Mapping[str, torch.Tensor], held: HeldRows | None) -> list[HeldTensor]:
    """Return the state's tensors, restricted to these rows of weights and optimizer state.

    `tensors`: see `state.holding`. `held`: None if nothing is sharded. A number that belongs to all rows of a weight
    goes with the first row.
    """
    return [found for name, value in tensors.items() for found in _held(name, value, held)]


def of_weights(tensor: str, row_counts: Mapping[str, int]) -> bool:
    """Return whether a tensor of the state belongs to one of these weights."""
    rows = whole_name(tensor)[1]
    return rows is not None and rows.weight in row_counts


def _held(name: str, value: torch.Tensor, held: HeldRows | None) -> Iterator[HeldTensor]:
    count = (len(value) if value.dim() else 1) or 1
    whole, rows = whole_name(name)
    if held is None or rows is None or rows.weight not in held.row_counts:
        yield HeldTensor(name, value, 0, count, count)
        return
    row_counts = held.row_counts[rows.weight]
    first, last = (0, row_counts) if rows.last is None else (rows.first, rows.last)
    if not value.dim() or row_counts == 1:
        if first == 0 and any(one.first == 0 for one in held.of(rows.weight)):
            yield HeldTensor(whole, value, 0, count, count)
        return
    for one in held.of(rows.weight):
        low, high = max(first, one.first), min(last, row_counts if one.last is None else one.last)
        if low < high:
            yield HeldTensor(whole, value[low - first : high - first], low, high, row_counts)
