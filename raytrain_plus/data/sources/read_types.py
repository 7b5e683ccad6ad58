"""Which columns rows are read with, and of which types: as the job says, as tensors want them, as others have them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence

import pyarrow as pa

from raytrain_plus.errors import DataError

Columns = Sequence[str] | Mapping[str, str]
"""Names, or the type of each by Arrow's name for it; see `data.columns`."""


def chosen(stored: pa.Schema, columns: Columns, where: str) -> pa.Schema:
    """Return the columns that a job chooses of those that are stored at a path, in the order in which it names them.

    Raises `DataError` for one that does not exist.
    """
    fields = []
    for name in columns:
        if name not in stored.names:
            near = difflib.get_close_matches(name, stored.names, 1)
            raise DataError(
                f"there is no column '{name}' at {where}",
                where="data.columns",
                expected=f"some of {', '.join(stored.names)}",
                remedy=f"did you mean '{near[0]}'?" if near else "",
            )
        kind = pa.type_for_alias(columns[name]) if isinstance(columns, Mapping) else stored.field(name).type
        fields.append(stored.field(name).with_type(kind))
    return pa.schema(fields)


def explicit(columns: Columns | None) -> Collection[str]:
    """Return the columns whose types the job says."""
    return columns.keys() if isinstance(columns, Mapping) else ()


def narrowed(schema: pa.Schema, kept: Collection[str] = ()) -> pa.Schema:
    """Return the same columns with fractions in float32, as models have them, but for those that are `kept`."""
    return pa.schema([one if one.name in kept else one.with_type(_narrowed(one.type)) for one in schema])


def _narrowed(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_float64(kind):
        return pa.float32()
    if pa.types.is_list(kind):
        return pa.list_(_inside(kind))
    if pa.types.is_large_list(kind):
        return pa.large_list(_inside(kind))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_inside(kind), kind.list_size)
    return kind


def _inside(kind: pa.DataType) -> pa.Field:
    return kind.value_field.with_type(_narrowed(kind.value_type))


def united(first: pa.Schema, other: pa.Schema) -> pa.Schema | None:
    """Return the columns with types that hold the values of both; None if there are none, or the names differ.

    Whole numbers unite with fractions, and null with anything. Their order is that of the first.
    """
    if sorted(first.names) != sorted(other.names):
        return None
    try:
        found = pa.unify_schemas([first, other], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None
    # Whole numbers beside float32 make float64, which is more than the fractions have.
    double = any(has_double(one) for one in (first, other))
    return found if double else narrowed(found)


def has_double(schema: pa.Schema) -> bool:
    """Return whether a column holds float64."""
    return not narrowed(schema).equals(schema)


def cast(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return these columns of rows, with these types. Raises `pa.ArrowInvalid` for values that do not fit them."""
    columns = []
    for one in schema:
        column = rows.column(one.name)
        if column.type != one.type:
            # A fraction has as many digits as its type; whole numbers must not be cut.
            column = column.cast(one.type, safe=not _is_fraction(one.type))
        columns.append(column)
    return pa.table(columns, schema=schema)


def _is_fraction(kind: pa.DataType) -> bool:
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_floating(kind))
