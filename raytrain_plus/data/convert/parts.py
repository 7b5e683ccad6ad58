"""Write tables as Parquet parts of fixed row groups, and continue where an earlier process ended."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_plus.data.convert.formats.record_blocks import RecordBlock
from raytrain_plus.data.convert.formats.row_columns import row_bytes

GROUP_BYTES = 1 << 20
"""Bytes of values that a row group is to have, so that many shards and workers can share a dataset."""
LEAST_ROWS, MOST_ROWS = 16, 8192
"""Bounds of the rows of a row group."""
SAMPLE_ROWS = 1000
"""Rows at the begin of a dataset whose size decides the rows of its row groups."""
GROUPS = 64
"""Row groups of a part."""
PROGRESS, COMPLETE = "_progress.json", "_complete.json"
"""How far a conversion is; and, once it is complete, its parts and their sizes in bytes."""
_CONTENT = "_content"
"""The digest of all parts: their footers can be equal though a row differs, or rows have another order."""
_READ_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a conversion is: what its complete parts hold, and where the next one begins."""

    schema: str
    """The columns, serialised, in base64."""
    group_rows: int = 0
    """Rows of each row group; 0 while they are not known."""
    parts: int = 0
    file: int = 0
    """The number of the file in which the next part begins."""
    begin: int = 0
    """The position there: see `records.Block`."""
    skip: int = 0
    """Rows after that position that the parts hold already."""

    @classmethod
    def of(cls, schema: pa.Schema) -> Progress:
        """Return the progress of a conversion that has not begun."""
        return cls(base64.b64encode(schema.serialize().to_pybytes()).decode())

    @property
    def columns(self) -> pa.Schema:
        """The columns."""
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(self.schema)))


def load_progress(folder: Path) -> Progress | None:
    """Return how far the conversion into a folder is; None if none has begun, or it cannot be continued."""
    try:
        found = Progress(**json.loads((folder / PROGRESS).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
    there = {file.name for file in folder.glob("part-*.parquet")}
    return found if there >= {part_name(number) for number in range(found.parts)} else None


def part_name(number: int, suffix: str = ".parquet") -> str:
    """Return the name of a part."""
    return f"part-{number:05d}{suffix}"


def mark_complete(folder: Path) -> None:
    """Record the parts of a conversion that is complete, and the digest of their content."""
    files = sorted(folder.glob("part-*"))
    content = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while some := opened.read(_READ_BYTES):
                content.update(some)
    (folder / _CONTENT).write_text(content.hexdigest())
    sizes = {file.name: file.stat().st_size for file in files}
    (folder / COMPLETE).write_text(json.dumps(sizes))
    (folder / PROGRESS).unlink(missing_ok=True)


def content_of(folder: Path) -> str:
    """Return the digest of all rows of a complete conversion, in order."""
    return (folder / _CONTENT).read_text()


def is_complete(folder: Path) -> bool:
    """Return whether a folder holds all parts of a complete conversion."""
    try:
        sizes = json.loads((folder / COMPLETE).read_bytes())
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


def begin_again(folder: Path, progress: Progress) -> Progress:
    """Begin a conversion into a folder with this progress, without what was there before; return the progress."""
    for file in folder.iterdir():
        file.unlink()
    save_progress(folder, progress)
    return progress


def group_rows_of(size: float, least: int = LEAST_ROWS) -> int:
    """Return the rows of a row group, for rows of `size` bytes: a power of two, but within bounds."""
    rows = int(2.0 ** round(math.log2(GROUP_BYTES / max(1.0, size))))
    return min(MOST_ROWS, max(least, rows))


def save_progress(folder: Path, progress: Progress) -> None:
    """Write how far a conversion is, whole or not at all."""
    made = folder / f"{PROGRESS}.new"
    made.write_text(json.dumps(asdict(progress)))
    os.replace(made, folder / PROGRESS)


def unwritable(columns: pa.Schema) -> list[str]:
    """Return the columns of a type that Parquet cannot hold, such as objects without any key."""
    found = []
    for column in columns:
        try:
            pq.ParquetWriter(io.BytesIO(), pa.schema([column])).close()
        except pa.ArrowNotImplementedError:
            found.append(column.name)
    return found


class ConvertedParts:
    """Writes the rows of a dataset, in order, into a folder."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._folder = folder
        self._columns = progress.columns
        self._pending: list[tuple[pa.Table, int, int, int]] = []
        """Tables that are not written: of which file, from which position, how many of its first rows are."""
        self._have = 0
        self._skip = progress.skip
        """Rows that are in the parts already, of those that come next."""
        self._last = (progress.file, progress.begin, progress.skip)
        """Where the rows begin that come after those that were taken last."""
        self.progress = progress

    def add(self, block: RecordBlock, file: int) -> None:
        """Take the next rows, of that file; write the parts that they complete."""
        # A block from a position on can be shorter than the one that began there before.
        skip = min(self._skip, block.table.num_rows)
        self._skip -= skip
        table = block.table.slice(skip)
        self._pending.append((table, file, block.begin, skip))
        self._have += table.num_rows
        if not self.progress.group_rows and self._have >= SAMPLE_ROWS:
            self._choose()
        while self.progress.group_rows and self._have >= GROUPS * self.progress.group_rows:
            self._write(GROUPS * self.progress.group_rows)

    def end(self) -> None:
        """Write the last rows."""
        if self._have:
            if not self.progress.group_rows:
                self._choose()
            self._write(self._have)

    def _choose(self) -> None:
        """Choose the rows of a row group, the same whichever format the rows had."""
        sample = pa.concat_tables([table for table, *_ in self._pending]).slice(0, SAMPLE_ROWS)
        self.progress = replace(self.progress, group_rows=group_rows_of(row_bytes(sample)))

    def _write(self, rows: int) -> None:
        name = part_name(self.progress.parts)
        made = self._folder / f".{name}"
        table, last = pa.concat_tables(self._take(rows)).combine_chunks(), self._last
        with pq.ParquetWriter(made, self._columns, write_page_checksum=True) as writer:
            writer.write_table(table, row_group_size=self.progress.group_rows)
        _sync(made)
        os.replace(made, self._folder / name)
        file, begin, skip = last
        self.progress = replace(self.progress, parts=self.progress.parts + 1, file=file, begin=begin, skip=skip)
        save_progress(self._folder, self.progress)

    def _take(self, rows: int) -> Iterator[pa.Table]:
        """Yield the first `rows` pending rows; `_last` says where the next ones begin."""
        self._have -= rows
        while rows:
            table, file, begin, skip = self._pending.pop(0)
            yield table.slice(0, rows)
            taken = min(rows, table.num_rows)
            rows -= taken
            self._last = file, begin, skip + taken
            if taken < table.num_rows:
                self._pending.insert(0, (table.slice(taken), file, begin, skip + taken))


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
