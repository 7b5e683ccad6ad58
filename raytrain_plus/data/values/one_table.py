"""Check that several files, or several sources of a mix, have the same columns."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from raytrain_plus.errors import DataError


def check_one_table(names: Sequence[str], schemas: Sequence[pa.Schema], kind: str = "files") -> None:
    """Raise `DataError` if the columns of some differ from those of the first. `kind`: what `names` are, in words."""
    first = schemas[0]
    differing = [number for number, schema in enumerate(schemas) if not schema.equals(first)]
    if not differing:
        return
    name, spelled, expected = _difference(first, schemas[differing[0]])
    raise DataError(
        f"column '{name}' {spelled}; {len(differing)} of {len(names)} {kind} differ from the first",
        where=names[differing[0]],
        expected=f"{expected}, as in {names[0]}",
        remedy=f"write all {kind} with the same columns, in the same order"
        + "; or name those to read, with their types, in data.columns" * (kind == "sources"),
    )


def _difference(first: pa.Schema, other: pa.Schema) -> tuple[str, str, str]:
    """Return the name of the first column that differs, how it is in `other`, and what was expected."""
    for name in dict.fromkeys([*first.names, *other.names]):
        here = first.field(name).type if name in first.names else None
        there = other.field(name).type if name in other.names else None
        if here == there and first.field(name).nullable != other.field(name).nullable:
            can, cannot = "can hold nulls", "cannot hold nulls"
            spelled, expected = (can, cannot) if other.field(name).nullable else (cannot, can)
            return name, spelled, f"a column that {expected}"
        if here != there:
            spelled = f"is {there}" if there is not None else "is missing"
            return name, spelled, f"{here}" if here is not None else "no such column"
    return ", ".join(other.names), "are in another order", ", ".join(first.names)
