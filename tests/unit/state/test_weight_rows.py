"""Rows of weights on several workers are put together to any other rows, without a value lost or moved."""

from __future__ import annotations

import doctest
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.membership.pieces import Piece, Pieces
from raytrain_plus.state import weight_rows as module
from raytrain_plus.state.weight_rows import (
    Packed,
    WeightRows,
    assemble,
    parse_rows,
    put_values,
    restrict,
    rows_of,
    values_of,
    whole_name,
)

ROWS, WIDTH = 9, 3
UNITS = {"w": ROWS, "b": 4, "whole": 1}


def packed(values: np.ndarray[Any, Any]) -> Packed:
    return "float32", values.shape, np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def unpacked(one: Packed) -> np.ndarray[Any, Any]:
    return one[2].view(np.float32).reshape(one[1])


WHOLE = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)


def part(*ranges: tuple[int, int], master: bool = False) -> tuple[dict[str, Packed], Any]:
    """A worker's part of the state: these rows of the weight `w`."""
    tensors, optimizer = {"buffer/mean": packed(WHOLE[0])}, {}
    if not master:
        tensors["param/w"] = packed(WHOLE)
    for first, last in ranges:
        name = "w" if (first, last) == (0, ROWS) else f"w[{first}:{last}]"
        tensors[f"optim/{name}/exp_avg"] = packed(WHOLE[first:last])
        tensors[f"optim/{name}/step"] = packed(np.float32(5).reshape(()))
        tensors[f"ema/{name}"] = packed(2 * WHOLE[first:last])
        if master:
            tensors[f"param/{name}"] = packed(3 * WHOLE[first:last])
        optimizer[name] = {
            "exp_avg": {"~": "tensor", "name": f"optim/{name}/exp_avg", "cpu": True},
            "step": {"~": "tensor", "name": f"optim/{name}/step", "cpu": True},
            "more": [{"~": "tensor", "name": f"optim/{name}/exp_avg", "cpu": True}, 7],
        }
    return tensors, {"optimizer": optimizer}


def test_the_examples_hold() -> None:
    assert doctest.testmod(module).failed == 0


def test_the_values_of_rows_are_put_into_older_weights() -> None:
    units = {"w": ROWS, "whole": 1}
    new = {"param/w": packed(WHOLE + 100), "param/whole": packed(np.float32(7).reshape(())), "buffer/m": packed(WHOLE)}
    wanted = Pieces.of([Piece("w", 2, 5), Piece("w", 7, 9), Piece("whole"), Piece("other")])
    assert values_of(new, wanted, units, ["w", "whole"]) == {}, "those of masters go with the rows"
    values = values_of(new, wanted, units)
    assert {name: one[1] for name, one in values.items()} == {
        "param/w[2:5]": (3, WIDTH),
        "param/w[7:9]": (2, WIDTH),
        "param/whole[0:1]": (),
    }
    old = {"param/w": packed(WHOLE), "param/whole": packed(np.float32(3).reshape(())), "buffer/m": packed(WHOLE)}
    found = put_values(old | values, units)
    assert found.keys() == old.keys()
    expected = WHOLE.copy()
    expected[2:5] += 100
    expected[7:9] += 100
    np.testing.assert_array_equal(unpacked(found["param/w"]), expected)
    assert unpacked(found["param/whole"]) == 7
    np.testing.assert_array_equal(unpacked(old["param/w"]), WHOLE, "what was given is as it was")


CUTS = st.lists(st.integers(1, ROWS - 1), max_size=4).map(lambda cuts: sorted({0, *cuts, ROWS}))


@given(CUTS, CUTS, st.booleans())
def test_any_rows_are_made_from_any_others(before: list[int], after: list[int], master: bool) -> None:
    # Each range twice: a row has two holders.
    parts = [part(pair, master=master) for pair in pairwise(before)] * 2
    names = [
        WeightRows("w").name if (first, last) == (0, ROWS) else WeightRows("w", first, last).name
        for first, last in pairwise(after)
    ]
    tensors, tree = assemble(parts, names, UNITS, ["w"] if master else [])
    kinds = 4 if master else 3
    assert len(tensors) == kinds * len(names)
    for name, (first, last) in zip(names, pairwise(after), strict=True):
        assert (unpacked(tensors[f"optim/{name}/exp_avg"]) == WHOLE[first:last]).all()
        assert (unpacked(tensors[f"ema/{name}"]) == 2 * WHOLE[first:last]).all()
        assert float(unpacked(tensors[f"optim/{name}/step"])) == 5
        if master:
            assert (unpacked(tensors[f"param/{name}"]) == 3 * WHOLE[first:last]).all()
        values = tree["optimizer"][name]
        assert values["exp_avg"]["name"] == f"optim/{name}/exp_avg"
        assert values["more"] == [values["exp_avg"], 7]
    assert set(tree["optimizer"]) == set(names)


def test_a_worker_gives_only_the_rows_that_are_wanted() -> None:
    wanted = Pieces.of([Piece("w", 4, 6)])
    tensors, tree = restrict(*part((2, 8)), wanted, UNITS)
    assert set(tensors) == {"optim/w[4:6]/exp_avg", "optim/w[4:6]/step", "ema/w[4:6]"}
    assert (unpacked(tensors["optim/w[4:6]/exp_avg"]) == WHOLE[4:6]).all()
    assert list(tree["optimizer"]) == ["w[4:6]"]


def test_missing_rows_are_said() -> None:
    with pytest.raises(ValueError, match="nobody gives row 4 of w"):
        assemble([part((0, 4)), part((5, 9))], ["w"], UNITS)


def test_a_weight_that_cannot_be_divided_is_one_row() -> None:
    values = packed(WHOLE)
    tree = {"optimizer": {"whole": {"factor": {"~": "tensor", "name": "optim/whole/factor", "cpu": True}}}}
    tensors, found = assemble([({"optim/whole/factor": values}, tree)], ["whole"], UNITS)
    assert tensors == {"optim/whole/factor": values}
    assert found == tree


def test_an_optimizer_without_a_step_has_nothing_to_give() -> None:
    assert assemble([({"param/w": packed(WHOLE)}, {"optimizer": {}})], ["w[2:4]"], UNITS) == ({}, {"optimizer": {}})


def test_pieces_and_rows_name_each_other() -> None:
    assert rows_of(Pieces.of([Piece("w", 0, 9), Piece("b", 1, 3)]), UNITS) == [WeightRows("b", 1, 3), WeightRows("w")]
    assert whole_name("optim/block.w[0:2]/exp_avg") == ("optim/block.w/exp_avg", WeightRows("block.w", 0, 2))
    assert whole_name("param/w") == ("param/w", WeightRows("w"))
    assert parse_rows("odd]name[1:x]") == WeightRows("odd]name[1:x]")
