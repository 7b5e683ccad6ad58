"""Mix sources to one: units, files and row ids are theirs, source by source.

A unit is read by its own source, which may be of any kind. The name of a file of source 3 begins with `3/` here and in
the ids of its rows, so that the same file in two sources has two sets of rows.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import override

from raytrain_plus.data.sources.alike import check_classes, check_labels
from raytrain_plus.data.sources.read_types import united
from raytrain_plus.data.sources.source import Source
from raytrain_plus.data.values.one_table import check_one_table

MIX = "data.mix"
"""What stands for the path of a mix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSource(Source):
    """See the module docstring. `fingerprint`: over those of the sources."""

    mixed: tuple[Source, ...]

    @property
    @override
    def parts(self) -> tuple[Source, ...]:
        return self.mixed

    @property
    @override
    def inner(self) -> tuple[Source, ...]:
        return self.mixed

    @property
    @override
    def in_memory(self) -> bool:
        return all(source.in_memory for source in self.mixed)

    @override
    def describe(self) -> dict[str, Any]:
        said = [source.describe() for source in self.mixed]
        return {
            "path": self.named,
            "sources": [{name: value for name, value in one.items() if name != "files"} for one in said],
            "fingerprint": self.fingerprint,
            "rows": self.rows,
            "files": [
                {**file, "path": f"{number}/{file['path']}"} for number, one in enumerate(said) for file in one["files"]
            ],
        }

    @override
    def read_as(self, schema: pa.Schema) -> MixedSource:
        return mix_of([source.read_as(schema) for source in self.mixed])

    def _at(self, unit: int) -> tuple[int, int]:
        """Return the number of the source that has a unit, and the unit's number there."""
        number = 0
        while unit >= len(self.mixed[number].unit_rows):
            unit -= len(self.mixed[number].unit_rows)
            number += 1
        return number, unit

    @override
    def owner(self, unit: int) -> tuple[Source, int]:
        number, unit = self._at(unit)
        return self.mixed[number], unit

    @override
    def name(self, unit: int) -> str:
        source, unit = self.owner(unit)
        return source.name(unit)

    @override
    def file_of(self, unit: int) -> str:
        source, unit = self.owner(unit)
        return source.file_of(unit)

    @override
    def name_rows(self, unit: int, rows: Sequence[int]) -> str:
        source, unit = self.owner(unit)
        return source.name_rows(unit, rows)

    @override
    def read_unit(self, unit: int, prefix: str = "") -> pa.Table:
        number, unit = self._at(unit)
        return self.mixed[number].read_unit(unit, f"{prefix}{number}/")

    @override
    def read_rows(self, unit: int, rows: npt.NDArray[np.int64], prefix: str = "") -> pa.Table:
        number, unit = self._at(unit)
        return self.mixed[number].read_rows(unit, rows, f"{prefix}{number}/")


def mix_of(sources: Sequence[Source]) -> MixedSource:
    """Return the mix of sources that have the same columns."""
    prints = "".join(f"{source.fingerprint}\0" for source in sources)
    return MixedSource(
        named=MIX,
        unit_rows=tuple(rows for source in sources for rows in source.unit_rows),
        unit_bytes=tuple(size for source in sources for size in source.unit_bytes),
        schema=sources[0].schema,
        fingerprint=hashlib.sha256(prints.encode()).hexdigest(),
        labels=sources[0].labels,
        mixed=tuple(sources),
    )


def mixed(sources: Sequence[Source], *, older: bool = False) -> MixedSource:
    """Return the mix of these sources, none of which has a tokenizer, with one type for each column.

    `older`: whether a version began the run that did not compare class labels. Raises `DataError` if they have
    different columns, or number classes otherwise.
    """
    names = [f"{MIX}[{number}]: {source.named}" for number, source in enumerate(sources)]
    schema = functools.reduce(lambda one, other: one and united(one, other.schema), sources, sources[0].schema)
    if schema is not None:
        sources = [source.read_as(schema) for source in sources]
    check_one_table(names, [source.schema for source in sources], "sources")
    check_classes(names, sources)
    for name, source in zip(names[1:], sources[1:], strict=True):
        if not older:
            check_labels(sources[0], source, name)
    return mix_of(sources)
