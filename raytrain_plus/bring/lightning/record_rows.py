"""Records of held-out batches as values of their rows, in which form a run gathers them on one worker. Pure.

A record is plain data: numbers, text, None, tensors and arrays, and lists, tuples and dicts of these. It becomes bytes
(msgpack; nothing is pickled), which are laid over the rows of its batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np
import torch

from raytrain_plus.errors import TaskError

_TENSOR, _ARRAY, _TUPLE, _NUMBER = 1, 2, 3, 4
_BYTES, _LENGTHS = "bytes", "lengths"


def as_rows(record: Any, rows: int, what: str) -> dict[str, torch.Tensor]:
    """Return a record as tensors whose first dimension is the rows of its batch.

    Raises `TaskError`, which names `what` was recorded, for other than plain data.
    """
    try:
        packed = np.frombuffer(msgpack.packb(record, default=_packed, strict_types=True), dtype=np.uint8)
    except (TypeError, ValueError, OverflowError) as error:
        raise TaskError(
            f"{what} cannot be gathered from all workers: {error}",
            where="LightningModule",
            expected="numbers, text, tensors, arrays, and lists and dicts of these",
        ) from None
    width = -(-len(packed) // rows)
    # Signed: longer rows of other batches are filled up with a negative number.
    laid = np.zeros(rows * width, dtype=np.int16)
    laid[: len(packed)] = packed
    return {
        _BYTES: torch.from_numpy(laid.reshape(rows, width)),
        _LENGTHS: torch.tensor([[rows, len(packed)]]).repeat(rows, 1),
    }


def read_rows(outputs: Mapping[str, torch.Tensor]) -> list[tuple[int, Any]]:
    """Return the rows and the record of each batch, in order."""
    laid, lengths = outputs[_BYTES].numpy(), outputs[_LENGTHS].tolist()
    found, at = [], 0
    while at < len(lengths):
        rows, length = lengths[at]
        width = -(-length // rows)
        data = laid[at : at + rows, :width].reshape(-1)[:length].astype(np.uint8).tobytes()
        found.append((rows, msgpack.unpackb(data, ext_hook=_unpacked, strict_map_key=False)))
        at += rows
    return found


def _packed(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        # NumPy has no bfloat16.
        wide = value.float() if value.dtype is torch.bfloat16 else value
        return msgpack.ExtType(_TENSOR, _of_array(wide.numpy()))
    if isinstance(value, np.ndarray) and value.dtype != object:
        return msgpack.ExtType(_ARRAY, _of_array(value))
    if isinstance(value, tuple):
        return msgpack.ExtType(_TUPLE, msgpack.packb(list(value), default=_packed, strict_types=True))
    if isinstance(value, np.generic):
        return msgpack.ExtType(_NUMBER, _of_array(np.asarray(value)))
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"it holds an object of type {type(value).__name__}")


def _of_array(array: Any) -> bytes:
    data = np.ascontiguousarray(array).tobytes()
    packed: bytes = msgpack.packb([array.dtype.str, list(array.shape), data])
    return packed


def _unpacked(code: int, data: bytes) -> Any:
    if code == _TUPLE:
        return tuple(msgpack.unpackb(data, ext_hook=_unpacked, strict_map_key=False))
    dtype, shape, content = msgpack.unpackb(data)
    array = np.frombuffer(content, dtype=dtype).reshape(shape).copy()
    return torch.from_numpy(array) if code == _TENSOR else array if code == _ARRAY else array[()]
