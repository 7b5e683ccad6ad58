"""The keys of a state's tensors, and the parts of several workers' states put together. Pure.

If the optimizer's state is sharded, a worker changes some rows of each weight. The key of what belongs to them has the
rows beside the name that the tensor has where nothing is sharded (`TensorRows`). Manifests, files and hashes have that
name alone: no name contains rows. Values without dimensions, such as a step count, belong to each row alike, and so do
values that are not tensors: a state's tree has them once for each weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from raytrain_plus.membership.pieces import Piece

Packed = tuple[str, tuple[int, ...], npt.NDArray[Any]]
"""A tensor's dtype (its torch name), shape and bytes."""


class TensorRows(NamedTuple):
    """The key of the part of a tensor that belongs to these rows of a weight."""

    rows: Piece
    tensor: str
    """The name of the whole tensor."""

    def __str__(self) -> str:
        return f"{self.tensor}, rows {self.rows.first} to {self.rows.last}"


TensorKey = str | TensorRows
"""The key of a tensor of the state: its name, or if it belongs to rows of a weight, that and the rows."""
Tensors = Mapping[TensorKey, Packed]


def key_of(rows: Piece | None, tensor: str) -> TensorKey:
    """Return the key of a tensor, or of the part of it that belongs to these rows of a weight."""
    return tensor if rows is None else TensorRows(rows, tensor)


def name_of(key: TensorKey) -> str:
    """Return the name that a tensor has where nothing is sharded."""
    return key.tensor if isinstance(key, TensorRows) else key


def assemble(
    parts: Iterable[Tensors], wanted: Iterable[Piece], without: Collection[TensorKey] = ()
) -> dict[TensorKey, Packed]:
    """Return what belongs to these rows of weights, from parts that together have it, but for the tensors `without`.

    What a weight does not have in any part, such as the state of an optimizer that has made no step, it does not get.
    Raises `ValueError` if some of the rows are missing.
    """
    offers: dict[str, dict[Piece, dict[str, Packed]]] = {}
    for part in parts:
        for key, packed in part.items():
            if isinstance(key, TensorRows) and key.tensor not in without:
                offers.setdefault(key.rows.name, {}).setdefault(key.rows, {})[key.tensor] = packed
    found: dict[TensorKey, Packed] = {}
    for rows in wanted:
        held = offers.get(rows.name, {})
        taken = list(_taken(held, rows))
        for tensor in held[taken[0][0]] if taken else ():
            slices = [_cut(held[giver][tensor], giver, given) for giver, given in taken]
            found[TensorRows(rows, tensor)] = _concatenated(slices)
    return found


def _taken(held: Collection[Piece], wanted: Piece) -> Iterator[tuple[Piece, Piece]]:
    """Yield, in order, from which of the pieces held which rows are taken."""
    at = wanted.first
    while held and at < wanted.last:
        able = [one for one in held if one.first <= at < one.last]
        if not able:
            raise ValueError(f"nobody gives row {at} of {wanted.name}")
        giver = max(able, key=lambda one: one.last)
        end = min(wanted.last, giver.last)
        yield giver, Piece(wanted.name, at, end)
        at = end


def _cut(packed: Packed, held: Piece, given: Piece) -> Packed:
    """Return the rows `given` of a tensor of the rows `held`; a value without dimensions as it is."""
    dtype, shape, data = packed
    if not shape or given == held:
        return packed
    row = data.nbytes // (held.last - held.first)
    first, last = given.first - held.first, given.last - held.first
    return dtype, (last - first, *shape[1:]), data[first * row : last * row]


def _concatenated(parts: Sequence[Packed]) -> Packed:
    dtype, shape, data = parts[0]
    if len(parts) == 1 or not shape:
        return dtype, shape, data
    return dtype, (sum(one[1][0] for one in parts), *shape[1:]), np.concatenate([one[2] for one in parts])


def put_rows(tensors: Tensors, parts: Iterable[Tensors]) -> dict[TensorKey, Packed]:
    """Return whole tensors with the rows of them that are in these parts."""
    found, own = dict(tensors), set[str]()
    for key, (_, _, values) in (pair for part in parts for pair in part.items()):
        if not isinstance(key, TensorRows) or key.tensor not in found:
            continue
        dtype, shape, data = found[key.tensor]
        if key.tensor not in own:
            own.add(key.tensor)
            data = data.copy()
            found[key.tensor] = dtype, shape, data
        row = values.nbytes // (key.rows.last - key.rows.first)
        data[key.rows.first * row : key.rows.last * row] = values
    return found
