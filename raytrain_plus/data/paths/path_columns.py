"""Columns whose values are the names of folders, `lang=de/part-0.parquet`, as Hive and Spark write them.

Types are those of pyarrow's dataset: whole numbers of 32 bits, if all values are such, or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc

from raytrain_plus.errors import DataError

NOTHING = "__HIVE_DEFAULT_PARTITION__"
"""The value that stands for a null."""


def partitions_in(names: Sequence[str]) -> pa.Table | None:
    """Return the values of each file as text, one file a row, given the files' names below the data's folder.

    None if no folder is one, or if the folders of two files have other keys: then they are no columns.
    """
    found = [dict(_pairs(name)) for name in names]
    keys = [*found[0]]
    if not keys or any([*one] != keys for one in found):
        return None
    return pa.table({key: pa.array([_value(one[key]) for one in found], pa.string()) for key in keys})


def folder_of_other_keys(names: Sequence[str]) -> str | None:
    """Return a file whose folders have other keys than those of another file; None if all have the same, or none."""
    found = {name: [key for key, _ in _pairs(name)] for name in names}
    most = max(found.values(), key=len, default=[])
    return next((name for name, keys in found.items() if keys != most), None)


def columns_of(partitions: pa.Table | None) -> list[pa.Field]:
    """Return the columns that the values make, with their types."""
    return (
        []
        if partitions is None
        else [pa.field(name, _type_of(partitions.column(name))) for name in partitions.column_names]
    )


def with_partitions(rows: pa.Table, partitions: pa.Table, file: int, wanted: Sequence[str], where: str) -> pa.Table:
    """Return rows of a file with the values of its folders, of those columns that are `wanted`.

    Raises `DataError` if the file has another value in such a column itself.
    """
    for one in columns_of(partitions):
        value = partitions.column(one.name)[file]
        if one.name in rows.column_names:
            _check_same(rows.column(one.name), value, one.name, where)
        elif one.name in wanted:
            column = pa.repeat(value, rows.num_rows) if value.is_valid else pa.nulls(rows.num_rows, pa.string())
            rows = rows.append_column(one, column.cast(one.type))
    return rows


def _check_same(column: pa.ChunkedArray, value: pa.Scalar, name: str, where: str) -> None:
    """Raise `DataError` if a column has other values than its folder, as far as the two can be compared."""
    try:
        expected = value.cast(column.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return
    same = pc.is_null(column) if not value.is_valid else pc.fill_null(pc.equal(column, expected), False)
    if len(column) and not pc.all(same).as_py():
        raise DataError(
            f"its column '{name}' has other values than its folder, {name}={value.as_py()}",
            where=where,
            remedy=f"drop the column from the file, or leave '{name}' out of data.columns",
        )


def _pairs(name: str) -> list[tuple[str, str]]:
    """Return the keys and values of the folders of a file, from the first one on."""
    parts = (part.partition("=") for part in name.split("/")[:-1])
    return [(key, unquote(value)) for key, equals, value in parts if key and equals]


def _value(text: str) -> str | None:
    return None if text == NOTHING else text


def _type_of(column: pa.ChunkedArray) -> pa.DataType:
    try:
        column.cast(pa.int32())
    except pa.ArrowInvalid:
        return pa.string()
    return pa.int32()
