"""Rows of a run as the items that a dataset had: tensors, arrays, tuples and mappings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from raytrain_plus.task import SINGLE, field_name


def kind_of(value: Any) -> str:
    """Return what a field of an item is: a `tensor`, an `array`, or Python's own."""
    return "tensor" if isinstance(value, torch.Tensor) else "array" if isinstance(value, np.ndarray) else ""


def kinds_of(item: Any) -> dict[str, str]:
    """Return what the fields of an item are that are no values of Python's own: see `kind_of`."""
    fields = (
        item.items() if isinstance(item, Mapping) else enumerate(item) if isinstance(item, tuple) else [(SINGLE, item)]
    )
    kinds = {name if isinstance(name, str) else field_name(name): kind_of(value) for name, value in fields}
    return {name: kind for name, kind in kinds.items() if kind}


def items_of(table: pa.Table, kinds: Mapping[str, str]) -> list[Any]:
    """Return rows as the items that the dataset had: mappings, tuples or single values.

    `kinds`: for each column that was no value of Python's own, see `kind_of`.
    """
    columns = {name: _values(table.column(name), kinds.get(name, "")) for name in table.column_names}
    if list(columns) == [SINGLE]:
        return list(columns[SINGLE])
    rows = zip(*columns.values(), strict=True)
    if columns and list(columns) == [field_name(number) for number in range(len(columns))]:
        return list(rows)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _values(column: pa.ChunkedArray, kind: str) -> Sequence[Any]:
    values: list[Any] = column.to_pylist()
    if not kind:
        return values
    held = column.type
    while pa.types.is_list(held) or pa.types.is_large_list(held) or pa.types.is_fixed_size_list(held):
        held = held.value_type
    arrays = (None if one is None else np.asarray(one, dtype=held.to_pandas_dtype()) for one in values)
    if kind == "array":
        return list(arrays)
    return [None if one is None else torch.from_numpy(one) for one in arrays]
