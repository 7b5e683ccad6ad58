"""Items of a dataset become columns, and batches have the form of the items."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from raytrain_plus import Task
from raytrain_plus.data.sources.item_columns import UnfitItem, digest_of, schema_of, table_of


class Pair(NamedTuple):
    x: torch.Tensor
    y: int


def batch_of(items: list[Any]) -> Any:
    return Task().collate(table_of(items, schema_of(items)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4, 2)])
def test_batches_are_those_of_torch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    items = [((torch.rand(shape) * 9).to(dtype), number, number / 3) for number in range(7)]
    expected = torch.utils.data.default_collate(items)
    made = batch_of(items)
    assert isinstance(made, tuple)
    for got, wanted in zip(made, expected, strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(got, wanted)


def test_mappings_named_tuples_and_single_values_keep_their_form() -> None:
    assert {name: value.tolist() for name, value in batch_of([{"a": 1, "b": [1, 2]}] * 2).items()} == {
        "a": [1, 1],
        "b": [[1, 2], [1, 2]],
    }
    assert set(batch_of([Pair(torch.zeros(2), 1)] * 3)) == {"x", "y"}
    assert batch_of([np.float32(0.5)] * 3).tolist() == [0.5] * 3
    assert batch_of([torch.ones(2)] * 3).shape == (3, 2)


def test_arrays_may_differ_in_length_alone() -> None:
    items = [{"ids": torch.arange(length), "of": torch.ones(length, 2)} for length in (1, 3, 0, 2)]
    table = table_of(items, schema_of(items))
    assert table.column("ids").to_pylist() == [[0], [0, 1, 2], [], [0, 1]]
    assert table.column("of").to_pylist()[1] == [[1, 1]] * 3


def test_text_bytes_lists_and_none_are_taken() -> None:
    items = [{"text": "a", "raw": b"\0", "tags": ["x"], "at": None}, {"text": None, "raw": b"", "tags": [], "at": None}]
    assert table_of(items, schema_of(items)).to_pylist() == items


@pytest.mark.parametrize(
    ("items", "number", "what"),
    [
        ([{"a": 1}, {"a": 1, "b": 2}], 1, "has the fields a, b; others have a"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], 1, r"field '_' is list<.*\[4\]>, and in other items list<.*\[3\]>"),
        ([torch.zeros(2), torch.zeros(2, dtype=torch.int64)], 1, "is list<item: int64>, and in other items"),
        ([(torch.zeros(1),), (None,)], 1, "field '_0' is a NoneType, and in other items a tensor"),
        ([{"a": 1}, {"a": "x"}], 1, "field 'a': Could not convert 'x'"),
        ([{"a": {"b": torch.zeros(1)}}], 0, "field 'a' is a dict with tensors in it"),
        ([torch.zeros(1, dtype=torch.bfloat16)], 0, "is of torch.bfloat16, which Arrow cannot hold"),
        ([np.array(["x"])], 0, "is an array of <U1: return numbers"),
        ([torch.zeros(3, 0)], 0, r"has the shape \(3, 0\), with a dimension of 0"),
        ([np.ma.masked_array([1, 2], [0, 1])], 0, "is a masked array"),
        ([object()], 0, "field '_': Could not convert <object"),
    ],
)
def test_items_that_do_not_fit_are_named(items: list[Any], number: int, what: str) -> None:
    with pytest.raises(UnfitItem, match=what) as raised:
        schema_of(items)
    assert raised.value.number == number


@pytest.mark.parametrize(
    ("item", "what"),
    [
        ((torch.zeros(2), "x"), "field '_1' is not int64, as in other items"),
        ((torch.zeros(2, 1), 1), "field '_0' is list<.*, and in other items list<item: float>"),
        ((1, 1), "field '_0' is a int, and in other items a tensor"),
    ],
)
def test_a_later_item_that_does_not_fit_the_columns_is_named(item: Any, what: str) -> None:
    schema = schema_of([(torch.zeros(2), 1)] * 2)
    with pytest.raises(UnfitItem, match=what) as raised:
        table_of([(torch.zeros(2), 1), item], schema)
    assert raised.value.number == 1


def test_a_key_that_other_items_lack_is_named_also_inside() -> None:
    schema = schema_of([{"meta": {"a": 1, "list": [{"b": 1}]}}])
    for meta, lost in (({"a": 1, "c": 2}, "c"), ({"a": 1, "list": [{"b": 1}, {"d": 1}]}, "d")):
        with pytest.raises(UnfitItem, match=f"field 'meta' has a key '{lost}', which other items lack") as raised:
            table_of([{"meta": {"a": 1}}, {"meta": meta}], schema)
        assert raised.value.number == 1


def test_the_order_of_keys_does_not_matter() -> None:
    assert table_of([{"a": 1, "b": 2}, {"b": 4, "a": 3}], schema_of([{"a": 1, "b": 2}])).to_pylist() == [
        {"a": 1, "b": 2},
        {"a": 3, "b": 4},
    ]


def test_an_image_of_a_palette_becomes_colours() -> None:
    image = Image.new("P", (2, 1), 1)
    image.putpalette([0, 0, 0, 9, 8, 7])
    assert table_of([image], schema_of([image])).to_pylist() == [{"_": [[[9, 8, 7], [9, 8, 7]]]}]


def test_whole_numbers_fit_a_column_of_fractions() -> None:
    assert table_of([{"a": 1}], pa.schema([("a", pa.float64())])).to_pylist() == [{"a": 1.0}]


def test_different_items_have_different_digests() -> None:
    items: list[Any] = [
        (1, 2), (12,), [1, 2, 3], {"a": 1}, {"b": 1}, "1", b"1", 1, 1.0, True, None,
        torch.zeros(2), torch.zeros(2, 1), torch.zeros(2, dtype=torch.int32), np.ones(2), ("ab", "c"), ("a", "bc"),
    ]  # fmt: skip
    assert len({digest_of(item) for item in items}) == len(items)
    assert digest_of(torch.arange(6).reshape(2, 3).T) == digest_of(torch.arange(6).reshape(2, 3).T.clone())
