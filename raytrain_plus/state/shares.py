"""Who writes what of a state that several workers hold alike. Pure.

Tensors are cut along their first dimension into pieces that can be read one by one; the pieces, in name order, are
dealt out in runs of about as many bytes each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MOST_BYTES = 64 << 20
"""A piece is no larger, unless one row is."""
LEAST_BYTES = 1 << 20
"""A tensor below this is not cut."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [first, last) of a tensor's first dimension; a scalar's are [0, 1)."""

    tensor: str
    first: int
    last: int
    start: int
    """In the tensor's bytes."""
    bytes: int


def share_out(tensors: Mapping[str, tuple[tuple[int, ...], int]], writers: int) -> list[list[Piece]]:
    """The pieces that each of so many writers writes, out of tensor -> (shape, bytes).

    >>> [[(piece.tensor, piece.bytes) for piece in share] for share in share_out({"a": ((3,), 12), "b": ((), 8)}, 2)]
    [[('a', 12)], [('b', 8)]]
    """
    total = sum(size for _, size in tensors.values())
    most = min(MOST_BYTES, max(LEAST_BYTES, math.ceil(total / (4 * writers))))
    shares: list[list[Piece]] = [[] for _ in range(writers)]
    before = 0
    for name in sorted(tensors):
        for piece in _cut(name, *tensors[name], most):
            # Where its middle falls.
            middle = before + piece.bytes / 2
            shares[min(writers - 1, int(middle * writers / total)) if total else 0].append(piece)
            before += piece.bytes
    return shares


def _cut(name: str, shape: tuple[int, ...], size: int, most: int) -> Iterator[Piece]:
    rows = shape[0] if shape else 1
    if not rows or not size:
        yield Piece(name, 0, rows, 0, 0)
        return
    row_bytes = size // rows
    step = max(1, rows if size <= most else most // row_bytes)
    for first in range(0, rows, step):
        last = min(rows, first + step)
        yield Piece(name, first, last, first * row_bytes, (last - first) * row_bytes)
