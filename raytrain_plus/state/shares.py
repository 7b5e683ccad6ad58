"""Distribute the writing of a state that several workers hold alike. Pure.

Tensors are divided along their first dimension into pieces that can be read one by one. The pieces, in name order, are
distributed in runs of about equal bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MOST_BYTES = 64 << 20
"""Maximum bytes of a piece, unless one row is larger."""
LEAST_BYTES = 1 << 20
"""A tensor of at most this many bytes is never divided."""


@dataclass(frozen=True, slots=True)
class StatePiece:
    """Rows [first, last) of a tensor's first dimension; [0, 1) for a scalar."""

    tensor: str
    first: int
    last: int
    start: int
    """The offset of its first byte in the tensor's bytes."""
    bytes: int


def share_out(tensors: Mapping[str, tuple[tuple[int, ...], int]], writers: int) -> list[list[StatePiece]]:
    """Return the pieces that each writer writes, given tensor -> (shape, bytes).

    >>> [[(piece.tensor, piece.bytes) for piece in share] for share in share_out({"a": ((3,), 12), "b": ((), 8)}, 2)]
    [[('a', 12)], [('b', 8)]]
    """
    total = sum(size for _, size in tensors.values())
    most = min(MOST_BYTES, max(LEAST_BYTES, math.ceil(total / (4 * writers))))
    shares: list[list[StatePiece]] = [[] for _ in range(writers)]
    before = 0
    for name in sorted(tensors):
        for piece in _cut(name, *tensors[name], most):
            # The writer whose range of bytes contains the middle of the piece.
            middle = before + piece.bytes / 2
            shares[min(writers - 1, int(middle * writers / total)) if total else 0].append(piece)
            before += piece.bytes
    return shares


def _cut(name: str, shape: tuple[int, ...], size: int, most: int) -> Iterator[StatePiece]:
    rows = shape[0] if shape else 1
    if not rows or not size:
        yield StatePiece(name, 0, rows, 0, 0)
        return
    row_bytes = size // rows
    step = max(1, rows if size <= most else most // row_bytes)
    for first in range(0, rows, step):
        last = min(rows, first + step)
        yield StatePiece(name, first, last, first * row_bytes, (last - first) * row_bytes)
