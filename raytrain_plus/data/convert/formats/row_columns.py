"""Find columns that hold the rows of all files, and how large a row is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from raytrain_plus.errors import DataError


def united(schemas: Iterable[tuple[Path, pa.Schema]]) -> pa.Schema:
    """Return the columns of all files: of each name, the type that holds the values of each.

    Whole numbers and fractions unite to fractions, and a column that a file lacks is null there. Raises `DataError` for
    types that have nothing in common, such as text and numbers; without files there are no columns.
    """
    found: pa.Schema | None = None
    first: dict[str, Path] = {}
    for file, schema in schemas:
        for name in schema.names:
            first.setdefault(name, file)
        try:
            found = schema if found is None else pa.unify_schemas([found, schema], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            raise _clash(file, schema, found, first) from None
    return pa.schema([]) if found is None else found


def _clash(file: Path, schema: pa.Schema, found: pa.Schema, first: dict[str, Path]) -> DataError:
    for name in schema.names:
        if name not in found.names:
            continue
        fields = [pa.schema([one.field(name)]) for one in (found, schema)]
        try:
            pa.unify_schemas(fields, promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            return DataError(
                f"column '{name}' is {schema.field(name).type}",
                where=str(file),
                expected=f"{found.field(name).type}, as in {first[name]}"
                if first[name] != file
                else f"{found.field(name).type}, as in the rows before",
                remedy="give the column one type in all rows",
            )
    return DataError("the columns do not fit those of the other files", where=str(file))


def row_bytes(table: pa.Table) -> float:
    """Return the mean bytes of a row's values, whichever format they were read from."""
    whole: float = sum(_bytes_of(column) for column in table.columns)
    return float(whole / max(1, table.num_rows))


def _bytes_of(column: pa.ChunkedArray) -> float:
    kind = column.type
    if pa.types.is_binary(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return float(pc.sum(pc.binary_length(column)).as_py() or 0) + 4 * len(column)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _bytes_of(pc.list_flatten(column)) + 4.0 * len(column)
    if pa.types.is_struct(kind):
        return sum(_bytes_of(pc.struct_field(column, [number])) for number in range(kind.num_fields))
    try:
        return float(max(1, kind.bit_width // 8) * len(column))
    except ValueError:
        return float(column.nbytes)
