"""Every byte of a state is written by exactly one writer, and all writers write about equally much."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.state import shares
from raytrain_plus.state.shares import share_out

SHAPES = st.dictionaries(
    st.text("abcdef./", min_size=1, max_size=6), st.lists(st.integers(0, 70), max_size=3).map(tuple), max_size=12
)


@given(SHAPES, st.integers(1, 9), st.sampled_from([1, 2, 4, 8]))
def test_every_byte_is_written_once(shapes: dict[str, tuple[int, ...]], writers: int, item: int) -> None:
    before, shares.LEAST_BYTES = shares.LEAST_BYTES, 64
    try:
        dealt = share_out({name: (shape, math.prod(shape) * item) for name, shape in shapes.items()}, writers)
    finally:
        shares.LEAST_BYTES = before
    assert len(dealt) == writers
    ends = dict.fromkeys(shapes, 0)
    rows = dict.fromkeys(shapes, 0)
    # Pieces are in name order, and in row order within each tensor.
    names = [piece.tensor for share in dealt for piece in share]
    assert names == sorted(names)
    for share in dealt:
        for piece in share:
            assert (piece.start, piece.first) == (ends[piece.tensor], rows[piece.tensor])
            ends[piece.tensor] += piece.bytes
            rows[piece.tensor] = piece.last
    for name, shape in shapes.items():
        assert ends[name] == math.prod(shape) * item
        assert rows[name] == (shape[0] if shape else 1)


def test_writers_write_about_equally_much() -> None:
    # An embedding and the tensors of a transformer's blocks.
    sizes: dict[str, tuple[tuple[int, ...], int]] = {"embedding": ((50_257, 768), 50_257 * 768 * 4)}
    sizes |= {f"block.{number}": ((768, 3072), 768 * 3072 * 4) for number in range(24)}
    sizes |= {f"norm.{number}": ((768,), 768 * 4) for number in range(48)}
    for writers in (1, 2, 3, 4, 8, 16):
        weights = [sum(piece.bytes for piece in share) for share in share_out(sizes, writers)]
        assert max(weights) < 1.3 * sum(weights) / writers
        assert max(piece.bytes for share in share_out(sizes, writers) for piece in share) <= 64 << 20
