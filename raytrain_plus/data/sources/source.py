"""What can be asked of any source of rows, whatever its kind: `Source`.

ParquetSource      Parquet files                             MixedSource        several sources, in proportions
ItemSource         a dataset that is read by index           TokenizedSource    text becomes tokens as it is used
ConvertedSource    what was converted to Parquet             PackedSource       documents in rows of one length
WindowsSource      windows of a stream of tokens              JoinedSource       windows of joined documents
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from typing_extensions import Self, override

from raytrain_plus.data.paths.file_tree import links_below
from raytrain_plus.data.paths.files import split_pattern
from raytrain_plus.data.sources.read_types import cast
from raytrain_plus.errors import DataError, first_line
from raytrain_plus.storage.place import Place, place_of

READING = "reading"
"""A key in the description of a run's data: 2 since fractions of texts are float32, and names of folders columns.

An older version that began a run did not write it; then both stay as they were.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(ABC):
    """Rows in units: row groups of Parquet files, or blocks of items. A unit is read as a whole, or row by row."""

    named: str
    """The path by which the user knows the data, absolute or an address; or `module:function`."""
    unit_rows: tuple[int, ...]
    """For each unit, its rows."""
    unit_bytes: tuple[int, ...]
    """For each unit, its approximate decoded bytes."""
    schema: pa.Schema
    """The columns, without metadata."""
    fingerprint: str
    """SHA-256 over what the rows are; no times, and nothing that differs from node to node."""
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)
    """For each column of Hugging Face's class labels, the names of the classes, in the order of their numbers."""

    @property
    def rows(self) -> int:
        """The rows of all units."""
        return sum(self.unit_rows)

    @property
    def parts(self) -> tuple[Source, ...]:
        """The sources of a mix; of any other source, itself alone."""
        return (self,)

    @property
    def inner(self) -> tuple[Source, ...]:
        """The sources that this one reads."""
        return ()

    @property
    def by_index(self) -> bool:
        """Whether single rows are read, and not whole units."""
        return False

    @property
    def in_memory(self) -> bool:
        """Whether a read hardly costs more than a copy within memory, so that nothing is gained by reading ahead."""
        return False

    @property
    def places(self) -> Sequence[Place]:
        """The Parquet files that are read."""
        return [place for source in self.inner for place in source.places]

    @property
    def user_files(self) -> Mapping[str, int]:
        """The files of the user's, by path or address, and their bytes; empty if code makes the rows."""
        return {path: size for source in self.inner for path, size in source.user_files.items()}

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return a description of the data, file by file, with which later checks can compare it: plain JSON."""

    @abstractmethod
    def read_as(self, schema: pa.Schema) -> Source:
        """Return the source of the same rows, read with these columns and types."""

    def owner(self, unit: int) -> tuple[Source, int]:
        """Return the source that has a unit, and the unit's number there."""
        return self, unit

    @abstractmethod
    def name(self, unit: int) -> str:
        """Return the name of a unit for messages."""

    @abstractmethod
    def file_of(self, unit: int) -> str:
        """Return the name of the file that a unit is in, for messages; a dataset that is read by index is one file."""

    @abstractmethod
    def name_rows(self, unit: int, rows: Sequence[int]) -> str:
        """Return the names of rows of a unit, counted in the file's order: "row 4 of a.parquet, row group 0"."""

    @abstractmethod
    def read_unit(self, unit: int, prefix: str = "") -> pa.Table:
        """Return all rows of one unit, in the file's order, with their ids.

        `prefix`: what precedes the names of files in the ids, `3/` for source 3 of a mix. Raises `DataChanged` if the
        data has changed since this source was made, or is damaged; `DataError` if it cannot be read.
        """

    def read_rows(self, unit: int, rows: npt.NDArray[np.int64], prefix: str = "") -> pa.Table:
        """Return some rows of a unit, by their numbers, with their ids. Raises the errors of `read_unit`."""
        return self.read_unit(unit, prefix).take(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Around(Source):
    """A source whose rows are those of another one."""

    source: Source

    @property
    @override
    def inner(self) -> tuple[Source, ...]:
        return (self.source,)

    @override
    def read_as(self, schema: pa.Schema) -> Self:
        source = self.source.read_as(schema)
        return replace(self, source=source, schema=source.schema, unit_bytes=source.unit_bytes)

    @override
    def name(self, unit: int) -> str:
        return self.source.name(unit)

    @override
    def file_of(self, unit: int) -> str:
        return self.source.file_of(unit)

    @override
    def name_rows(self, unit: int, rows: Sequence[int]) -> str:
        return self.source.name_rows(unit, rows)

    @override
    def read_unit(self, unit: int, prefix: str = "") -> pa.Table:
        return self.source.read_unit(unit, prefix)

    @override
    def read_rows(self, unit: int, rows: npt.NDArray[np.int64], prefix: str = "") -> pa.Table:
        return self.source.read_rows(unit, rows, prefix)


def facts_of(source: Source) -> dict[str, Any]:
    """Return what is known of the rows of a source, as arguments of another one."""
    names = ("named", "unit_rows", "unit_bytes", "schema", "fingerprint", "labels")
    return {name: getattr(source, name) for name in names}


Kind = TypeVar("Kind", bound=Source)


def within(data: Source, kind: type[Kind]) -> Iterator[Kind]:
    """Yield the sources of one kind in a source: itself, those that it reads, and those that these read."""
    if isinstance(data, kind):
        yield data
    for source in data.inner:
        yield from within(source, kind)


def linked_folders(data: Source) -> list[str]:
    """Return the links to folders through which files of the data are reached, by their names below its path."""
    found = []
    for one in data.parts:
        files = [file for name in one.user_files if isinstance(file := place_of(name), Path)]
        if files:
            root, _ = split_pattern(place_of(one.named))
            found += links_below(root, files) if isinstance(root, Path) else []
    return found


def check_enough(data: Source, shards: int) -> None:
    """Raise `DataError` if there are fewer rows than shards, in the data or in a source of a mix."""
    for source in (*(one for one in data.parts if one is not data), data):
        if source.rows < shards:
            raise DataError(
                f"the data has {source.rows} rows, fewer than data.shards = {shards}",
                where=source.named,
                expected="at least one row for each shard",
                remedy=f"use more data, or data.shards of at most {source.rows}",
            )


def cast_rows(rows: pa.Table, schema: pa.Schema, where: str) -> pa.Table:
    """Return rows with the columns and types that the job reads. Raises `DataError` if they do not fit."""
    try:
        return cast(rows, schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"its rows cannot be read as {', '.join(f'{one.name}: {one.type}' for one in schema)}: {first_line(error)}",
            where=where,
            remedy="give data.columns types that hold all values",
        ) from error


def least_bytes(kind: pa.DataType) -> int:
    """Return the minimum bytes of a value of this type in memory; the size of its offset if its length varies."""
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * least_bytes(kind.value_type)
    if pa.types.is_struct(kind):
        return sum(least_bytes(kind.field(number).type) for number in range(kind.num_fields))
    try:
        return max(1, int(kind.bit_width) // 8)
    except ValueError:
        return 4
