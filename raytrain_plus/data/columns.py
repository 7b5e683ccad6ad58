"""NumPy arrays as Arrow's."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def column_of(values: npt.NDArray[Any]) -> pa.Array:
    """The same numbers, of the same memory where that is contiguous.

    `pa.array` would load pandas first, wherever that is installed: half a second of a controller that has less to save
    what a stopped run holds.
    """
    memory = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, memory])
