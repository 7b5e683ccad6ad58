"""Rows of weights on several workers are put together to any other rows, without a value lost or moved."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.membership.pieces import Piece
from raytrain_plus.state.stages import layer_of
from raytrain_plus.state.weight_rows import Packed, TensorKey, TensorRows, assemble, name_of, put_rows

ROWS, WIDTH = 9, 3


def packed(values: np.ndarray[Any, Any]) -> Packed:
    return "float32", values.shape, np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def unpacked(one: Packed) -> np.ndarray[Any, Any]:
    return one[2].view(np.float32).reshape(one[1])


WHOLE = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
NUMBER = packed(np.float32(5).reshape(()))


def part(*ranges: tuple[int, int]) -> dict[TensorKey, Packed]:
    """A worker's part of the state: these rows of the weight `w`."""
    found: dict[TensorKey, Packed] = {"buffer/mean": packed(WHOLE[0]), "param/w": packed(WHOLE)}
    for first, last in ranges:
        rows = Piece("w", first, last)
        found[TensorRows(rows, "optim/w/exp_avg")] = packed(WHOLE[first:last])
        found[TensorRows(rows, "optim/w/step")] = NUMBER
        found[TensorRows(rows, "ema/w")] = packed(2 * WHOLE[first:last])
    return found


def test_the_values_of_rows_are_put_into_older_weights() -> None:
    old: dict[TensorKey, Packed] = {
        "param/w": packed(WHOLE),
        "param/whole": packed(np.float32(3).reshape(())),
        "buffer/m": packed(WHOLE),
    }
    new: list[dict[TensorKey, Packed]] = [
        {TensorRows(Piece("w", 2, 5), "param/w"): packed(WHOLE[2:5] + 100), "buffer/m": packed(WHOLE + 1)},
        {TensorRows(Piece("w", 7, 9), "param/w"): packed(WHOLE[7:9] + 100), **part((0, 9))},
        {TensorRows(Piece("whole"), "param/whole"): packed(np.float32(7).reshape(()))},
    ]
    found = put_rows(old, new)
    assert found.keys() == old.keys()
    expected = WHOLE.copy()
    expected[2:5] += 100
    expected[7:9] += 100
    np.testing.assert_array_equal(unpacked(found["param/w"]), expected)
    assert unpacked(found["param/whole"]) == 7
    np.testing.assert_array_equal(unpacked(found["buffer/m"]), WHOLE)
    np.testing.assert_array_equal(unpacked(old["param/w"]), WHOLE, "what was given is as it was")


CUTS = st.lists(st.integers(1, ROWS - 1), max_size=4).map(lambda cuts: sorted({0, *cuts, ROWS}))


@given(CUTS, CUTS)
def test_any_rows_are_made_from_any_others(before: list[int], after: list[int]) -> None:
    # Each range twice: a row has two holders.
    parts = [part(pair) for pair in pairwise(before)] * 2
    wanted = [Piece("w", *pair) for pair in pairwise(after)]
    tensors = assemble(parts, wanted)
    assert len(tensors) == 3 * len(wanted)
    for rows in wanted:
        expected = WHOLE[rows.first : rows.last]
        np.testing.assert_array_equal(unpacked(tensors[TensorRows(rows, "optim/w/exp_avg")]), expected)
        np.testing.assert_array_equal(unpacked(tensors[TensorRows(rows, "ema/w")]), 2 * expected)
        assert unpacked(tensors[TensorRows(rows, "optim/w/step")]) == 5


def test_only_rows_that_are_wanted_are_given_and_no_tensor_that_is_there_whole() -> None:
    rows = Piece("w", 4, 6)
    tensors = assemble([part((2, 8))], [rows], without=["ema/w"])
    assert set(tensors) == {TensorRows(rows, "optim/w/exp_avg"), TensorRows(rows, "optim/w/step")}
    np.testing.assert_array_equal(unpacked(tensors[TensorRows(rows, "optim/w/exp_avg")]), WHOLE[4:6])


def test_missing_rows_are_said() -> None:
    with pytest.raises(ValueError, match="nobody gives row 4 of w"):
        assemble([part((0, 4)), part((5, 9))], [Piece("w", 0, 9)])


def test_a_weight_that_cannot_be_divided_is_one_row() -> None:
    state: dict[TensorKey, Packed] = {TensorRows(Piece("whole"), "optim/whole/factor"): packed(WHOLE)}
    assert assemble([state], [Piece("whole")]) == state


def test_an_optimizer_without_a_step_has_nothing_to_give() -> None:
    assert assemble([part()], [Piece("w", 2, 4)]) == {}


def test_rows_belong_to_the_layer_of_their_weight() -> None:
    key = TensorRows(Piece("block.w", 0, 2), "optim/block.w/exp_avg")
    assert (name_of(key), layer_of(key), name_of("param/w")) == ("optim/block.w/exp_avg", "block", "param/w")
