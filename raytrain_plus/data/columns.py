"""Convert NumPy arrays to Arrow arrays without loading pandas."""

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
