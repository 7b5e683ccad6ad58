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


def partitions_in(names: Sequence[str], root: str) -> pa.Table | None:
    """Return the values of each file, one a row, given the files' names below `root`; None if no folder is one.

    Raises `DataError` if the folders of two files have other keys.
    """
    found = [dict(_pairs(name)) for name in names]
    if not any(found):
        return None
    keys = [*found[0]]
    other = next((name for name, one in zip(names, found, strict=True) if [*one] != keys), None)
    if other is not None:
        raise DataError(
            f"its folders have the keys {', '.join(found[names.index(other)]) or 'of none'}, and those of "
            f"{names[0]} {', '.join(keys) or 'none'}",
            where=f"{root}/{other}",
            expected="folders KEY=VALUE with the same keys for all files, or none",
            remedy="move the files, or name those of one kind by a pattern",
        )
    return pa.table({key: _column([one[key] for one in found]) for key in keys})


def with_partitions(rows: pa.Table, partitions: pa.Table, file: int, wanted: Sequence[str], where: str) -> pa.Table:
    """Return rows of a file with the values of its folders, of those columns that are `wanted`.

    Raises `DataError` if the file has another value in such a column itself.
    """
    for name in partitions.column_names:
        value = partitions.column(name)[file]
        if name in rows.column_names:
            column = rows.column(name)
            same = pc.all(pc.equal(column.cast(pa.string()), pa.scalar(_text(value))), skip_nulls=False)
            if len(column) and not same.as_py():
                raise DataError(
                    f"its column '{name}' has other values than its folder, {name}={_text(value)}",
                    where=where,
                    remedy=f"drop the column from the file, or leave '{name}' out of data.columns",
                )
        elif name in wanted:
            column = pa.repeat(value, rows.num_rows) if value.is_valid else pa.nulls(rows.num_rows, value.type)
            rows = rows.append_column(name, column)
    return rows


def _pairs(name: str) -> list[tuple[str, str]]:
    """Return the keys and values of the folders of a file, from the first one on."""
    parts = (part.partition("=") for part in name.split("/")[:-1])
    return [(key, unquote(value)) for key, equals, value in parts if key and equals]


def _column(values: Sequence[str]) -> pa.Array:
    given = [None if value == NOTHING else value for value in values]
    text = pa.array(given, pa.string())
    try:
        return text.cast(pa.int32())
    except pa.ArrowInvalid:
        return text


def _text(value: pa.Scalar) -> str | None:
    return None if not value.is_valid else str(value.as_py())
