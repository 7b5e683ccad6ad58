"""Rows of another format, or of a dataset that can only be iterated, in Parquet files that were made of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from typing_extensions import override

from raytrain_plus.data.convert.formats.image_files import CLASSES
from raytrain_plus.data.convert.parts import content_of
from raytrain_plus.data.sources.parquet_source import ParquetSource, parquet_source
from raytrain_plus.data.sources.source import Around, Source, facts_of, within
from raytrain_plus.job.setting_types import Format


@dataclass(frozen=True, slots=True)
class Origin:
    """What was converted."""

    path: str
    """The file, folder or pattern, absolute or an address; or `module:function`, which returned a dataset."""
    format: Format | None
    """None for a dataset that a function returned."""
    files: tuple[tuple[str, int], ...]
    """Its files, and their sizes in bytes."""
    run: str = ""
    """For a dataset that a function returned, the run: see `user_dataset.open_dataset`."""

    def describe(self) -> dict[str, Any]:
        """Return what is said of it in the description of the rows."""
        return {"converted_from": self.path, "format": self.format}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedSource(Around):
    """See the module docstring. Another node may have other files with the same rows.

    `fingerprint`: over all values too, because the footers do not tell every change.
    """

    source: ParquetSource
    origin: Origin = field(compare=False)

    @property
    @override
    def user_files(self) -> Mapping[str, int]:
        return dict(self.origin.files)

    def read_like(self, other: ConvertedSource) -> ConvertedSource:
        """Return the source of the same rows, read as `other` reads its own: see `ParquetSource.read_like`."""
        source = self.source.read_like(other.source)
        return replace(self, source=source, schema=source.schema, unit_bytes=source.unit_bytes)

    @override
    def describe(self) -> dict[str, Any]:
        return {**self.source.describe(), **self.origin.describe(), "fingerprint": self.fingerprint}

    @override
    def name_rows(self, unit: int, rows: Sequence[int]) -> str:
        if self.origin.format != "images":
            return self.source.name_rows(unit, rows)
        # A row of image files is named by its file.
        first = sum(self.unit_rows[:unit])
        return ", ".join(self.origin.files[first + row][0] for row in rows)


def converted_source(
    folder: Path, origin: Origin, labels: Mapping[str, Sequence[str]] | None = None
) -> ConvertedSource:
    """Return the source of what was converted to the files in a folder; `labels`: see `Source`."""
    source = parquet_source(folder)
    both = hashlib.sha256(f"{source.fingerprint}\0{content_of(folder)}".encode()).hexdigest()
    facts = {**facts_of(source), "named": origin.path, "fingerprint": both}
    if labels is not None:
        facts["labels"] = labels
    return ConvertedSource(**facts, source=source, origin=origin)


def class_names(data: Source) -> list[str]:
    """Return the classes of image files, in the order of their labels; none for other data."""
    for one in within(data, ConvertedSource):
        if one.origin.format == "images":
            names: list[str] = json.loads((pq.read_schema(one.source.file(0)).metadata or {}).get(CLASSES, b"[]"))
            if names:
                return names
    return []
