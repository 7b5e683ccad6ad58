"""Decide which rows of a state each worker writes to a checkpoint. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from raytrain_plus.membership.pieces import Piece, Pieces, assign, split

MOST_BYTES = 64 << 20
"""Maximum bytes of a piece, unless one row is larger."""
LEAST_BYTES = 1 << 20
"""A tensor of at most this many bytes is never divided."""

Tensors = Mapping[str, tuple[tuple[int, ...], int]]
"""Tensor -> (shape, bytes)."""


def share_of(writer: int, tensors: Tensors, holders: Callable[[str], tuple[int, ...]]) -> list[Piece]:
    """Return the pieces that `writer` writes of the `tensors` that it holds, in the order of names and rows.

    `holders` returns the writers that hold a tensor. Each row is written by one of them. Tensors with the same holders
    are balanced among these, whatever else they hold, so all holders come to the same result. A scalar is one row; a
    tensor without rows is one empty piece.

    >>> tensors = {"a": ((3,), 12), "b": ((), 8)}
    >>> [[piece.name for piece in share_of(writer, tensors, lambda tensor: (0, 1))] for writer in (0, 1)]
    [['a'], ['b']]
    """
    rows = {name: shape[0] if shape else 1 for name, (shape, _) in tensors.items()}
    row_bytes = {name: size // max(1, rows[name]) for name, (_, size) in tensors.items()}
    alike: dict[tuple[int, ...], list[Piece]] = {}
    for name in tensors:
        alike.setdefault(holders(name), []).append(Piece(name, 0, max(1, rows[name])))
    share: list[Piece] = []
    for writers, pieces in alike.items():
        wanted = Pieces.of(pieces)
        most = min(MOST_BYTES, max(LEAST_BYTES, math.ceil(wanted.size(row_bytes) / (4 * len(writers)))))
        given = assign(wanted, dict.fromkeys(writers, wanted), row_bytes, most=most)
        share += split(given.get(writer, Pieces()), row_bytes, most)
    return sorted(Piece(name, first, min(last, rows[name])) for name, first, last in share)
