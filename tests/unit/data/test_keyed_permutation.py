"""A keyed permutation holds each number once, and neighbours land anywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.data.order.keyed_permutation import permuted


@given(st.integers(1, 3_000), st.integers(0, 2**64 - 1))
def test_each_number_once(length: int, key: int) -> None:
    assert sorted(permuted(key, length, np.arange(length)).tolist()) == list(range(length))


def test_a_key_and_a_place_decide() -> None:
    length = 1_000
    whole = permuted(7, length, np.arange(length))
    assert permuted(7, length, np.array([999, 3])).tolist() == [whole[999], whole[3]]
    assert (whole != permuted(8, length, np.arange(length))).sum() > 900
    # Part of what a run keeps: another order would be another run.
    assert whole[:6].tolist() == [340, 725, 757, 77, 82, 702]


@pytest.mark.parametrize("length", [1_000, 1 << 20, 10**9, (1 << 47) + 1])
def test_neighbours_land_anywhere(length: int) -> None:
    count = min(length, 100_000)
    found = permuted(1, length, np.arange(count)) / length
    tenths = np.histogram(found, 10, (0, 1))[0] / count
    assert np.abs(tenths - 0.1).max() < 0.01
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < (0.1 if count < 10_000 else 0.02)
