"""Every row of a state is written by exactly one writer that has it, and all writers write about equally much."""

from __future__ import annotations

import doctest
import math
from collections.abc import Mapping
from itertools import pairwise
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.state.stored import shares as module
from raytrain_plus.state.stored.shares import share_of

NAMES = st.text("abcdef./", min_size=1, max_size=6)
SHAPES = st.lists(st.integers(0, 70), max_size=3).map(tuple)
HOLDERS = st.sets(st.integers(0, 4), min_size=1).map(lambda found: tuple(sorted(found)))
TENSORS = st.dictionaries(NAMES, st.tuples(SHAPES, HOLDERS), max_size=12)
"""For each tensor, its shape and the writers that have it."""


def test_the_examples_hold() -> None:
    assert doctest.testmod(module).failed == 0


@given(TENSORS, st.sampled_from([1, 2, 4, 8]))
def test_every_row_is_written_by_one_of_its_holders(
    tensors: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]], item: int
) -> None:
    rows: dict[str, list[tuple[int, int]]] = {name: [] for name in tensors}
    for writer in range(5):
        # A writer knows the tensors that it has, and no others.
        own = {name: (shape, math.prod(shape) * item) for name, (shape, held) in tensors.items() if writer in held}
        with patch.object(module, "LEAST_BYTES", 64):
            share = share_of(writer, own, lambda name: tensors[name][1])
        assert share == sorted(share)
        for name, first, last in share:
            shape, held = tensors[name]
            assert writer in held
            assert last - first <= 1 or (last - first) * math.prod(shape[1:]) * item <= 64 << 20
            rows[name].append((first, last))
    for name, (shape, _) in tensors.items():
        found = sorted(rows[name])
        assert (found[0][0], found[-1][1]) == (0, shape[0] if shape else 1)
        assert all(end == start for (_, end), (start, _) in pairwise(found))


def test_writers_write_about_equally_much() -> None:
    # An embedding and the tensors of a transformer's blocks.
    tensors: dict[str, tuple[tuple[int, ...], int]] = {"embedding": ((50_257, 768), 50_257 * 768 * 4)}
    tensors |= {f"block.{number}": ((768, 3072), 768 * 3072 * 4) for number in range(24)}
    tensors |= {f"norm.{number}": ((768,), 768 * 4) for number in range(48)}
    row_bytes = {name: size // shape[0] for name, (shape, size) in tensors.items()}
    for writers in (1, 2, 3, 4, 8, 16):
        alike = tuple(range(writers))
        shares = [share_of(writer, tensors, lambda name: alike) for writer in range(writers)]  # noqa: B023
        weights = [[(last - first) * row_bytes[name] for name, first, last in share] for share in shares]
        assert max(map(sum, weights)) < 1.1 * sum(map(sum, weights)) / writers
        assert max(map(max, weights)) <= 64 << 20
