"""Turn the items of a dataset into Arrow columns, and digest them. Pure.

An item is a mapping of fields, a tuple of them, or a single value. The fields of a tuple become the columns `_0`, `_1`,
..., and a single value the column `_`, so that `Task.collate` can return batches of the same form. A value is a tensor,
an array, or whatever Arrow takes: numbers, text, bytes, lists, None. Arrays with dimensions become lists; those may
differ in length from item to item, their other dimensions may not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from raytrain_plus.data.ledger.ledger import ROW_ID
from raytrain_plus.errors import first_line
from raytrain_plus.task import SINGLE, field_name

Array = npt.NDArray[Any]


FORM = "return items of one form: the same fields, each of one type"
"""The remedy for items that do not fit together."""


class UnfitItem(Exception):
    """An item that does not fit the columns: which of those given, and why, in words."""

    def __init__(self, number: int, what: str) -> None:
        super().__init__(what)
        self.number = number


def schema_of(items: Sequence[Any], declared: pa.Schema | None = None) -> pa.Schema:
    """Return the columns of these items; a field without a value takes its type from `declared`. Raises `UnfitItem`."""
    fields = list(map(_fields, items))
    for number, one in enumerate(fields):
        _check_names(number, one, list(fields[0]))
    types = {name: _type_of(name, [one[name] for one in fields]) for name in fields[0]}
    for name, kind in types.items():
        if pa.types.is_null(kind) and declared is not None and name in declared.names:
            types[name] = declared.field(name).type
    if ROW_ID in types:
        raise UnfitItem(0, f"has a field '{ROW_ID}', a name reserved by raytrain_plus")
    return pa.schema(list(types.items()))


def table_of(items: Sequence[Any], schema: pa.Schema) -> pa.Table:
    """Return items as rows with these columns. Raises `UnfitItem` for the first that does not fit them."""
    fields = list(map(_fields, items))
    for number, one in enumerate(fields):
        _check_names(number, one, schema.names)
    columns = [_column(one, [row[one.name] for row in fields]) for one in schema]
    return pa.table(columns, schema=schema)


def digest_of(item: Any) -> str:
    """Return the SHA-256 of an item's content."""
    digest = hashlib.sha256()
    for part in _content(item):
        digest.update(part)
    return digest.hexdigest()


def _content(value: Any) -> Iterable[bytes]:
    """Yield the bytes of a value, with its form, so that different values have different bytes."""
    if isinstance(value, Mapping):
        yield f"mapping of {len(value)}\0".encode()
        for name, one in value.items():
            yield f"{name}\0".encode()
            yield from _content(one)
    elif isinstance(value, (tuple, list)):
        yield f"{len(value)} values\0".encode()
        for one in value:
            yield from _content(one)
    elif _is_array(value):
        array = _array(value)
        yield f"{array.dtype} {array.shape}\0".encode()
        yield np.ascontiguousarray(array).tobytes()
    elif isinstance(value, bytes):
        yield f"{len(value)} bytes\0".encode()
        yield value
    else:
        yield f"{type(value).__name__} {value!r}\0".encode()


def _fields(item: Any) -> Mapping[str, Any]:
    """Return the fields of an item by the names of their columns."""
    if isinstance(item, Mapping):
        return {str(name): value for name, value in item.items()}
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return dict(zip(item._fields, item, strict=True))
    if isinstance(item, (tuple, list)):
        return {field_name(number): value for number, value in enumerate(item)}
    return {SINGLE: item}


def _check_names(number: int, fields: Mapping[str, Any], names: Sequence[str]) -> None:
    if fields.keys() != set(names):
        raise UnfitItem(number, f"has the fields {_listed(fields)}; others have {_listed(names)}")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _type_of(name: str, values: Sequence[Any]) -> pa.DataType:
    """Return the type of a column with these values."""
    arrays = [_is_array(value) for value in values]
    if not any(arrays):
        for number, value in enumerate(values):
            _check_plain(number, name, value)
        try:
            found = pa.array(values).type
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise UnfitItem(_first_odd(values), f"field '{name}': {first_line(error)}") from None
        return found
    kinds = [_array_type(number, name, value) for number, value in enumerate(values)]
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise UnfitItem(number, f"field '{name}' is {kind}, and in other items {kinds[0]}")
    return kinds[0]


def _array_type(number: int, name: str, value: Any) -> pa.DataType:
    if not _is_array(value):
        raise UnfitItem(number, f"field '{name}' is a {type(value).__name__}, and in other items a tensor")
    array = _checked(number, name, value)
    if 0 in array.shape[1:]:
        raise UnfitItem(number, f"field '{name}' has the shape {array.shape}, with a dimension of 0")
    kind = pa.from_numpy_dtype(array.dtype)
    for length in reversed(array.shape[1:]):
        kind = pa.list_(kind, length)
    return pa.list_(kind) if array.ndim else kind


def _first_odd(values: Sequence[Any]) -> int:
    """Return the number of the first value for which Arrow has no type, alone or beside those before it."""
    for number in range(len(values)):
        try:
            pa.array(values[: number + 1])
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            return number
    return 0


def _column(field: pa.Field, values: Sequence[Any]) -> pa.Array:
    if not any(map(_is_array, values)):
        return _plain_column(field, values)
    arrays = []
    for number, value in enumerate(values):
        kind = _array_type(number, field.name, value)
        if kind != field.type:
            raise UnfitItem(number, f"field '{field.name}' is {kind}, and in other items {field.type}")
        arrays.append(_array(value))
    if not arrays[0].ndim:
        return pa.array(np.stack(arrays), field.type)
    ends = np.cumsum([0, *(len(array) for array in arrays)])
    return pa.LargeListArray.from_arrays(ends, _nested(np.concatenate(arrays), field.type)).cast(field.type)


def _nested(array: Array, kind: pa.DataType) -> pa.Array:
    """Return an array of n dimensions as the values of a list whose type is `kind`."""
    values = pa.array(np.ascontiguousarray(array).reshape(-1))
    for length in reversed(array.shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, length)
    return values.cast(kind.value_type)


def _plain_column(field: pa.Field, values: Sequence[Any]) -> pa.Array:
    for number, value in enumerate(values):
        _check_plain(number, field.name, value)
    if _has_struct(field.type):
        for number, value in enumerate(values):
            if (lost := _lost(value, field.type)) is not None:
                raise UnfitItem(number, f"field '{field.name}' has a key '{lost}', which other items lack")
    try:
        return pa.array(values, field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        for number, value in enumerate(values):
            try:
                pa.array([value], field.type)
            except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                what = f"field '{field.name}' is not {field.type}, as in other items: {first_line(error)}"
                raise UnfitItem(number, what) from None
        raise


def _has_struct(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind)) or (pa.types.is_list(kind) and _has_struct(kind.value_type))


def _lost(value: Any, kind: pa.DataType) -> str | None:
    """Return a key in a value for which its type has no field; Arrow would leave it out."""
    if pa.types.is_list(kind) and isinstance(value, (list, tuple)):
        return next((lost for one in value if (lost := _lost(one, kind.value_type)) is not None), None)
    if not pa.types.is_struct(kind) or not isinstance(value, Mapping):
        return None
    types = {field.name: field.type for field in kind.fields}
    if unknown := [str(key) for key in value if key not in types]:
        return unknown[0]
    return next((lost for key in value if (lost := _lost(value[key], types[key])) is not None), None)


def _check_plain(number: int, name: str, value: Any) -> None:
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    if any(map(_is_array, inside)):
        raise UnfitItem(
            number, f"field '{name}' is a {type(value).__name__} with tensors in it: return each as a field of the item"
        )


def _is_array(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray, np.generic)) or hasattr(value, "__array_interface__")


def _array(value: Any) -> Array:
    if getattr(value, "mode", None) == "P":
        # An image of Pillow whose pixels are numbers of colours.
        return np.asarray(value.convert("RGB"))
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def _checked(number: int, name: str, value: Any) -> Array:
    """Return a value as an array that Arrow takes."""
    try:
        array = _array(value)
        pa.from_numpy_dtype(array.dtype)
    except (pa.ArrowException, TypeError, RuntimeError):
        kind = value.dtype if hasattr(value, "dtype") else type(value).__name__
        raise UnfitItem(number, f"field '{name}' is of {kind}, which Arrow cannot hold: return it as float32") from None
    if isinstance(value, np.ma.MaskedArray):
        raise UnfitItem(number, f"field '{name}' is a masked array: fill it, or return the mask as a field")
    if array.dtype.kind not in "biuf":
        raise UnfitItem(number, f"field '{name}' is an array of {array.dtype}: return numbers, or a list")
    return array
