"""Convert NumPy arrays to Arrow arrays without loading pandas, and copy rows out of larger tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def column_of(values: npt.NDArray[Any]) -> pa.Array:
    """Return the values as an Arrow array; contiguous memory is shared, not copied.

    `pa.array` would load pandas first if it is installed. That takes half a second, and a controller may have less
    than that to save the state of a stopped run.
    """
    memory = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, memory])


def copied(rows: pa.Table) -> pa.Table:
    """Return the rows in memory of their own."""
    columns = [
        pa.chunked_array([pa.concat_arrays([chunk]) for chunk in column.chunks], column.type) for column in rows.columns
    ]
    return pa.table(columns, schema=rows.schema)


def selectable(rows: pa.Table) -> pa.Table:
    """Return the rows so that Arrow's `take` and `filter` select the right ones.

    They return other rows, without an error, if a column of nested lists of fixed sizes, such as images, is a slice
    (measured with pyarrow 26.0.1). Rows with such a column are copied.
    """
    return copied(rows) if any(map(_is_selected_wrongly, rows.schema.types)) else rows


def _is_selected_wrongly(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_is_selected_wrongly(field.type) for field in kind.fields)
    return bool(pa.types.is_fixed_size_list(kind) and pa.types.is_fixed_size_list(kind.value_type))
