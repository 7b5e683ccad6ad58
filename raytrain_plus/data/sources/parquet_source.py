"""Rows in Parquet files: one pass over the footers tells units, columns and fingerprint; then single units are read.

A row that may have changed since this process first saw its file must not be used. So the file's `stat` is compared
with the first one after each read and again at the end of a run, and pages are verified against their checksums.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import Self, override

from raytrain_plus.data.ledger.ledger import ROW_ID, row_ids
from raytrain_plus.data.paths.files import data_exists, find_files
from raytrain_plus.data.paths.path_columns import partitions_in, with_partitions
from raytrain_plus.data.paths.sight import Sight, change_of, footer_of, remote_end, sight_of
from raytrain_plus.data.sources.source import Source, cast_rows, least_bytes, within
from raytrain_plus.data.values.columns import column_of
from raytrain_plus.data.values.labels import labels_in
from raytrain_plus.data.values.one_table import check_one_table
from raytrain_plus.errors import DataChanged, DataError, StorageError, first_line
from raytrain_plus.storage.place import Place, RemotePath, in_parallel, place_of, spelled

_CHECKSUM_FAILED = "CRC checksum verification failed"
"""Part of Arrow's message; Arrow has no error type for it."""

_UNREADABLE = (OSError, pa.ArrowException, UnicodeDecodeError)
"""The errors that pyarrow raises for a damaged file; the last one for a column's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetSource(Source):
    """Parquet files. Units are numbered file by file, row group by row group; empty row groups are not units.

    `unit_bytes` are the footer's values, but at least the size of the fixed-width columns: the footer counts dictionary
    and run-length encoded values as they are encoded. `fingerprint`: over the files' relative paths, sizes and footers.
    """

    root: str
    """The folder that `files` are relative to: a path or an address."""
    files: tuple[str, ...]
    """File names relative to `root`, sorted."""
    file_bytes: tuple[int, ...]
    """For each file, its size."""
    file_footers: tuple[str, ...]
    """For each file, SHA-256 over its footer."""
    file_groups: tuple[tuple[int, ...], ...]
    """For each file, the rows of its row groups."""
    unit_file: tuple[int, ...]
    """For each unit, its file's number."""
    unit_group: tuple[int, ...]
    """For each unit, its row group in that file."""
    sights: tuple[Sight, ...] = field(compare=False)
    """For each file, its `stat` on this node, taken before its footer was read. Differs from node to node."""
    relabelled: tuple[tuple[str, Mapping[str, Sequence[str]]], ...] = field(default=(), compare=False)
    """Files whose class labels differ from those of the first file that has some, and theirs: one of each kind."""
    column_bytes: Mapping[str, int] = field(default_factory=dict, compare=False)
    """For each column, the approximate decoded bytes of its values in the first unit."""
    chosen: bool = field(default=False, compare=False)
    """Whether rows are read with the columns and types of `schema`, and not with those of the files."""
    partitions: pa.Table | None = field(default=None, compare=False)
    """Columns whose values are the names of the files' folders, one row a file: see `data.paths.path_columns`."""

    @property
    @override
    def places(self) -> Sequence[Place]:
        return [self.file(number) for number in range(len(self.files))]

    @property
    @override
    def user_files(self) -> Mapping[str, int]:
        return dict(zip(map(spelled, self.places), self.file_bytes, strict=True))

    def file(self, number: int) -> Place:
        """Return the path of file `number`."""
        return place_of(self.root) / self.files[number]

    @override
    def describe(self) -> dict[str, Any]:
        entries = zip(self.files, self.file_bytes, self.file_footers, self.file_groups, strict=True)
        return {
            "path": self.named,
            "fingerprint": self.fingerprint,
            "rows": self.rows,
            "files": [
                {"path": path, "bytes": size, "footer_sha256": footer, "row_groups": list(groups)}
                for path, size, footer, groups in entries
            ],
        }

    @override
    def read_as(self, schema: pa.Schema) -> Self:
        if schema.equals(self.schema):
            return self
        before = self.column_bytes
        kinds = {one.name: least_bytes(one.type) for one in self.schema}
        sizes = {
            one.name: round(before[one.name] / kinds[one.name] * least_bytes(one.type))
            for one in schema
            if one.name in before
        }
        share = sum(sizes.values()) / sum(before.values()) if before else 1.0
        unit_bytes = tuple(round(size * share) for size in self.unit_bytes)
        return replace(self, schema=schema, chosen=True, column_bytes=sizes, unit_bytes=unit_bytes)

    def read_like(self, other: ParquetSource) -> ParquetSource:
        """Return the source of the same rows, read and counted as `other` reads and counts its own."""
        return replace(
            self,
            schema=other.schema,
            chosen=other.chosen,
            partitions=other.partitions,
            column_bytes=other.column_bytes,
            unit_bytes=other.unit_bytes,
        )

    @override
    def name(self, unit: int) -> str:
        return f"{self.file_of(unit)}, row group {self.unit_group[unit]}"

    @override
    def file_of(self, unit: int) -> str:
        return str(self.file(self.unit_file[unit]))

    @override
    def name_rows(self, unit: int, rows: Sequence[int]) -> str:
        return f"row{'s' * (len(rows) != 1)} {', '.join(map(str, rows))} of {self.name(unit)}"

    @override
    def read_unit(self, unit: int, prefix: str = "") -> pa.Table:
        number, group = self.unit_file[unit], self.unit_group[unit]
        try:
            table = _read_group(self.file(number), group, self.schema.names if self.chosen else None)
        except _UNREADABLE as error:
            # If the file has changed, that explains the error better.
            self.check_unchanged(number)
            raise self._unreadable(unit, error) from error
        # After the read, so that it covers changes up to its end.
        self.check_unchanged(number)
        if table.num_rows != self.unit_rows[unit]:
            raise self._damaged(unit, f"read {table.num_rows} rows, expected {self.unit_rows[unit]}")
        ids = column_of(row_ids(prefix + self.files[number], group, table.num_rows))
        table = table.replace_schema_metadata(None)
        if self.partitions is not None:
            wanted = self.schema.names if self.chosen else ()
            table = with_partitions(table, self.partitions, number, wanted, self.name(unit))
        if self.chosen:
            table = cast_rows(table, self.schema, self.name(unit))
        return table.append_column(ROW_ID, ids)

    def check_unchanged(self, *numbers: int) -> None:
        """Compare files, by number, with the `stat` first taken: one `stat` each; all files by default.

        Raises `DataChanged` if one has changed, `DataError` if one cannot be accessed.
        """
        files = {self.file(number): number for number in numbers or range(len(self.files))}

        def change(file: Place) -> str:
            try:
                return change_of(file, self.sights[files[file]], self.file_footers[files[file]])
            except OSError as error:
                said = error.strerror or first_line(error)
                raise DataError(f"cannot be accessed: {said}", where=str(file)) from error

        for file, found in zip(files, in_parallel(change, list(files)), strict=True):
            if found:
                raise DataChanged(
                    f"the file changed while the run used it: {found}",
                    where=f"{file} on {os.uname().nodename}",
                    remedy=f"restore {_as_it_was(file)} and resume the run, or start over with --fresh; do not change "
                    "the data while a run uses it",
                    first=self._first_of(files[file]),
                )

    def check_restored(self, first: Mapping[str, Any]) -> None:
        """Compare a file that changed during a run with its state when the run began: `DataChanged.first`.

        Raises `DataError` if the file has not been restored.
        """
        if first["path"] != self.named or first["file"] not in self.files:
            return
        file = self.file(self.files.index(first["file"]))
        seen = Sight(first["bytes"], first["modified_ns"], changed_ns=0, inode=0, version=first.get("etag", ""))
        change = change_of(file, seen, first["footer_sha256"])
        if not change:
            return
        remedy = f"restore {_as_it_was(file)}"
        if not isinstance(file, RemotePath):
            seconds, rest = divmod(first["modified_ns"], 10**9)
            touched = f"`touch -d @{seconds}.{rest:09d} {shlex.quote(str(file))}`"
            remedy = f"restore its content, and its modification time with {touched}"
        raise DataError(
            f"the file changed while the run used it and has not been restored: {change}",
            where=str(file),
            remedy=f"{remedy}; or start over with --fresh",
        )

    def _first_of(self, number: int) -> dict[str, str | int]:
        sight = self.sights[number]
        return {
            "path": self.named,
            "file": self.files[number],
            "bytes": sight.size,
            "modified_ns": sight.modified_ns,
            "footer_sha256": self.file_footers[number],
            **({"etag": sight.version} if sight.version else {}),
        }

    def _unreadable(self, unit: int, error: Exception) -> DataError:
        if _CHECKSUM_FAILED in str(error):
            return self._damaged(unit, "the page checksum does not match", self._damaged_column(unit))
        if isinstance(error, StorageError):
            remedy = "run again when the store can be reached"
        elif isinstance(error, PermissionError):
            remedy = "allow this machine to read it"
        else:
            remedy = "rewrite the file, or remove it"
        return DataError(f"cannot be read: {first_line(error)}", where=self.name(unit), remedy=remedy)

    def _damaged_column(self, unit: int) -> str:
        """Return the first column of a unit with a wrong checksum of a page; empty if none has one when read alone."""
        names: list[str] = self.schema.names
        for name in names:
            try:
                _read_group(self.file(self.unit_file[unit]), self.unit_group[unit], [name])
            except _UNREADABLE as error:
                if _CHECKSUM_FAILED in str(error):
                    return name
        return ""

    def _damaged(self, unit: int, what: str, column: str = "") -> DataChanged:
        column = f", column '{column}'" if column else ""
        return DataChanged(
            f"{what}: the file is damaged",
            where=f"{self.name(unit)}{column} on {os.uname().nodename}",
            remedy="replace it with an undamaged copy and resume the run",
        )


def parquet_source(path: str | Place) -> ParquetSource:
    """Read the footers of the files that `path` names; see `find_files`.

    Raises `DataError` if there is nothing to read, a file cannot be read, or the files are not one table.
    """
    base = place_of(path)
    found = find_files(base)
    digest = hashlib.sha256()
    schemas: list[pa.Schema] = []
    units: list[tuple[int, int, int, int]] = []
    marks: list[tuple[int, str, tuple[int, ...]]] = []
    sights: list[Sight] = []
    labels: Mapping[str, Sequence[str]] = {}
    relabelled: list[tuple[str, Mapping[str, Sequence[str]]]] = []
    column_bytes: Mapping[str, int] = {}
    # Each is a round trip if the files are remote.
    looked_at = in_parallel(_looked_at, found.places)
    for number, (name, (sight, metadata, footer)) in enumerate(zip(found.names, looked_at, strict=True)):
        sights.append(sight)
        size = sight.size
        groups = tuple(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        marks.append((size, hashlib.sha256(footer).hexdigest(), groups))
        digest.update(f"{name}\0{size}\0".encode())
        digest.update(bytes.fromhex(marks[-1][1]))
        stored = metadata.schema.to_arrow_schema()
        found_labels = labels_in(stored.metadata or {})
        labels = labels or found_labels
        if found_labels and found_labels not in (labels, *(other for _, other in relabelled)):
            relabelled.append((name, found_labels))
        schemas.append(stored.remove_metadata())
        row_bytes = sum(least_bytes(kind) for kind in schemas[-1].types)
        for group in range(metadata.num_row_groups):
            entry = metadata.row_group(group)
            if entry.num_rows:
                column_bytes = column_bytes or _column_bytes(entry, schemas[-1])
                units.append((number, group, entry.num_rows, max(entry.total_byte_size, entry.num_rows * row_bytes)))
    check_one_table([str(file) for file in found.places], schemas)
    if ROW_ID in schemas[0].names:
        raise DataError(
            f"has a column '{ROW_ID}', a name reserved by raytrain_plus", where=str(base), remedy="rename the column"
        )
    if not units:
        raise DataError(
            f"0 rows in {len(found.names)} file{'s' * (len(found.names) > 1)}",
            where=str(base),
            expected="rows to train on",
        )
    columns = list(zip(*units, strict=True))
    return ParquetSource(
        named=spelled(base),
        root=spelled(found.root),
        files=found.names,
        file_bytes=tuple(size for size, _, _ in marks),
        file_footers=tuple(footer for _, footer, _ in marks),
        file_groups=tuple(groups for _, _, groups in marks),
        unit_file=columns[0],
        unit_group=columns[1],
        unit_rows=columns[2],
        unit_bytes=columns[3],
        schema=schemas[0],
        fingerprint=digest.hexdigest(),
        sights=tuple(sights),
        labels=labels,
        relabelled=tuple(relabelled),
        column_bytes=column_bytes,
        partitions=partitions_in(found.names),
    )


def check_unchanged(data: Source) -> None:
    """Compare all files of a source with the `stat` that this process first took. Items are compared as they are read.

    Raises the errors of `ParquetSource.check_unchanged`.
    """
    for one in within(data, ParquetSource):
        one.check_unchanged()


def check_restored(data: Source, first: Mapping[str, Any]) -> None:
    """See `ParquetSource.check_restored`."""
    for one in within(data, ParquetSource):
        one.check_restored(first)


def on_a_disk(data: Source) -> bool:
    """Return whether all rows of a source are in files of this machine."""
    if isinstance(data, ParquetSource):
        return not isinstance(place_of(data.root), RemotePath)
    return bool(data.inner) and all(map(on_a_disk, data.inner))


def _as_it_was(file: Place) -> str:
    # An object that is written again has another modification time.
    return "the object's content" if isinstance(file, RemotePath) else "the file with its modification time"


def _read_group(file: Place, group: int, columns: list[str] | None = None) -> pa.Table:
    def read(source: Path | pa.NativeFile, *, ahead: bool) -> pa.Table:
        with pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=ahead) as opened:
            return opened.read_row_group(group, columns=columns, use_threads=False)

    # Of a remote file, the pages of all columns are asked for at once.
    return file.read(partial(read, ahead=True)) if isinstance(file, RemotePath) else read(file, ahead=False)


def _column_bytes(group: pq.RowGroupMetaData, schema: pa.Schema) -> dict[str, int]:
    """Return the approximate decoded bytes of each column of a row group: see `ParquetSource`."""
    found = {one.name: least_bytes(one.type) * group.num_rows for one in schema}
    stored = dict.fromkeys(found, 0)
    for number in range(group.num_columns):
        chunk = group.column(number)
        # A column's name may have dots, and those of lists and structs continue.
        name = next((name for name in found if f"{chunk.path_in_schema}.".startswith(f"{name}.")), None)
        if name is not None:
            stored[name] += chunk.total_uncompressed_size
    return {name: max(size, stored[name]) for name, size in found.items()}


def _looked_at(file: Place) -> tuple[Sight, pq.FileMetaData, bytes]:
    """Return a file's `stat`, or what a store says about it, its metadata and the bytes of its footer."""
    try:
        if isinstance(file, RemotePath):
            sight, end = remote_end(file)
            return sight, pq.read_metadata(pa.BufferReader(end)), end[:-8]
        return sight_of(file), pq.read_metadata(file), footer_of(file)
    except PermissionError as error:
        said = "permission denied" if isinstance(file, Path) else first_line(error)
        raise DataError(f"cannot be read: {said}", where=str(file)) from error
    except StorageError as error:
        raise DataError(
            f"cannot be read: {error}", where=str(file), remedy="run again when the store can be reached"
        ) from error
    except _UNREADABLE as error:
        raise DataError(
            f"is not a readable Parquet file ({_size_of(file)} bytes): {first_line(error)}",
            where=str(file),
            remedy="rewrite it, or move it out of the folder",
        ) from error


def _size_of(file: Place) -> int:
    if isinstance(file, RemotePath):
        entry = file.entry or file.look()
        return 0 if entry is None else entry.size
    return file.stat().st_size if data_exists(file) else 0
