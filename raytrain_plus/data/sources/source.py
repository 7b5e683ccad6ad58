"""Index a dataset by its footers (units, columns, fingerprint), and read single units.

A row that may have changed since this process first saw its file must not be used. So the file's `stat` is compared
with the first one after each read and again at the end of a run, and pages are verified against their checksums.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_plus.data.convert.formats.image_files import CLASSES
from raytrain_plus.data.convert.packed import Packed
from raytrain_plus.data.ledger.ledger import ROW_ID, row_ids
from raytrain_plus.data.paths.file_tree import links_below
from raytrain_plus.data.paths.files import data_exists, find_files, split_pattern
from raytrain_plus.data.paths.path_columns import partitions_in, with_partitions
from raytrain_plus.data.paths.sight import Sight, change_of, footer_of, remote_end, sight_of
from raytrain_plus.data.sources.items import Items
from raytrain_plus.data.sources.one_table import check_one_table
from raytrain_plus.data.sources.read_types import cast, united
from raytrain_plus.data.values.columns import column_of
from raytrain_plus.data.values.labels import labels_in
from raytrain_plus.data.values.tokens import TokenizerFile, tokenizer_file
from raytrain_plus.errors import DataChanged, DataError, StorageError, first_line
from raytrain_plus.job.setting_types import Format
from raytrain_plus.storage.place import Place, RemotePath, in_parallel, place_of, spelled

READING = "reading"
"""A key of `Index.to_json`: 2 since fractions of text formats are float32, and names of folders columns."""
_CHECKSUM_FAILED = "CRC checksum verification failed"
"""Part of Arrow's message; Arrow has no error type for it."""

UNREADABLE = (OSError, pa.ArrowException, UnicodeDecodeError)
"""The errors that pyarrow raises for a damaged file; the last one for a column's name."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The source of converted data."""

    path: str
    """The file, folder or pattern, absolute or an address; or `module:function`, which returned a dataset."""
    format: Format | None
    """None for a dataset that a function returned."""
    files: tuple[tuple[str, int], ...]
    """Its files, and their sizes in bytes."""
    run: str = ""
    """For a dataset that a function returned, the run: see `user_dataset.open_dataset`."""


@dataclass(frozen=True, slots=True)
class Index:
    """The result of one pass over the footers. Units are numbered file by file, row group by row group."""

    path: str
    """The file, folder or pattern, absolute or an address; or `module:function`."""
    root: str
    """The folder that `files` are relative to: a path or an address."""
    files: tuple[str, ...]
    """File names relative to `root`, sorted."""
    file_bytes: tuple[int, ...]
    """For each file, its size."""
    file_footers: tuple[str, ...]
    """For each file, SHA-256 over its footer."""
    unit_file: tuple[int, ...]
    """For each unit, its file's number."""
    unit_group: tuple[int, ...]
    """For each unit, its row group in that file."""
    unit_rows: tuple[int, ...]
    """For each unit, its rows."""
    file_groups: tuple[tuple[int, ...], ...]
    """For each file, the rows of its row groups; empty row groups are not units."""
    unit_bytes: tuple[int, ...]
    """For each unit, its approximate decoded bytes: the footer's value, but at least the size of its fixed-width
    columns (the footer counts dictionary and run-length encoded values as they are encoded)."""
    schema: pa.Schema
    """The columns, without metadata."""
    fingerprint: str
    """SHA-256 over the files' relative paths, sizes and footers, and the tokenizer if there is one; no times."""
    file_sights: tuple[Sight, ...] = field(compare=False)
    """For each file, its `stat` on this node, taken before its footer was read. Differs from node to node."""
    origin: Origin | None = field(default=None, compare=False)
    """The source of these files if they are converted; None for files of the user's."""
    items: Items | None = field(default=None, compare=False)
    """A dataset that is read by index, if it is one: its blocks are the row groups of one file, which is on no disk."""
    tokenizer: TokenizerFile | None = field(default=None, compare=False)
    """What makes tokens of the text in the rows; its path differs from node to node, if at all."""
    packed: Packed | None = field(default=None, compare=False)
    """How its rows were packed, if they were; and the index of their documents."""
    documents: Index | None = field(default=None, compare=False)
    prefix: str = field(default="", compare=False)
    """What precedes the names of its files in the ids of its rows: `3/` for source 3 of a mix."""
    sources: tuple[Index, ...] = field(default=(), compare=False)
    """The sources of a mix; see `data.sources.mixed_index`."""
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)
    """For each column of Hugging Face's class labels, the names of the classes, in the order of their numbers."""
    relabelled: tuple[tuple[str, Mapping[str, Sequence[str]]], ...] = field(default=(), compare=False)
    """Files whose class labels differ from those of the first file that has some, and theirs: one of each kind."""
    column_bytes: Mapping[str, int] = field(default_factory=dict, compare=False)
    """For each column, the approximate decoded bytes of its values in the first unit; empty if nobody knows."""
    read_as: pa.Schema | None = field(default=None, compare=False)
    """The columns and types that rows are read with, if others than those of the files."""
    older: bool = field(default=False, compare=False)
    """Whether an older version began the run: fractions of text formats stay float64, and folders are no columns."""
    partitions: pa.Table | None = field(default=None, compare=False)
    """Columns whose values are the names of the files' folders, one row a file: see `data.paths.path_columns`."""

    @property
    def on_a_disk(self) -> bool:
        """Whether all its rows are in files of this machine."""
        return all(
            one.items is None and not isinstance(place_of(one.root), RemotePath) for one in self.sources or (self,)
        )

    @property
    def named(self) -> str:
        """The path by which the user knows the data."""
        return self.path if self.origin is None else self.origin.path

    @property
    def rows(self) -> int:
        """The rows of all units."""
        return sum(self.unit_rows)

    def to_json(self) -> dict[str, Any]:
        """Return a description of the data, file by file, with which later checks can compare it."""
        entries = zip(self.files, self.file_bytes, self.file_footers, self.file_groups, strict=True)
        tokenizer = self.tokenizer if self.packed is None else self.packed.tokenizer
        return {
            "path": self.path,
            **({} if self.origin is None else {"converted_from": self.origin.path, "format": self.origin.format}),
            **({} if self.items is None else {"dataset": self.items.to_json()}),
            **({} if self.packed is None else {"packed": self.packed.to_json()}),
            **({} if tokenizer is None else {"tokenizer_sha256": tokenizer.sha256}),
            **({"sources": [_without_files(source) for source in self.sources]} if self.sources else {}),
            **({} if self.older else {READING: 2}),
            "fingerprint": self.fingerprint,
            "rows": self.rows,
            "files": [
                {"path": path, "bytes": size, "footer_sha256": footer, "row_groups": list(groups)}
                for path, size, footer, groups in entries
            ],
        }

    @property
    def places(self) -> list[Place]:
        """The files."""
        if self.sources:
            return [file for source in self.sources for file in source.places]
        return [] if self.items is not None else [self.file(number) for number in range(len(self.files))]

    def file(self, number: int) -> Place:
        """Return the path of file `number`."""
        return place_of(self.root) / self.files[number]

    def owner(self, unit: int) -> tuple[Index, int]:
        """Return the source of a mix that a unit belongs to, and the unit's number there; else this index itself."""
        for source in self.sources:
            if unit < len(source.unit_rows):
                return source, unit
            unit -= len(source.unit_rows)
        return self, unit

    def name(self, unit: int) -> str:
        """Return the name of a unit for messages: its file's path and its row group."""
        if self.sources:
            source, unit = self.owner(unit)
            return source.name(unit)
        if self.items is not None:
            return f"{self.path}, block {unit}"
        return f"{self.file(self.unit_file[unit])}, row group {self.unit_group[unit]}"


def index(path: str | Place) -> Index:
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
        row_bytes = sum(_least_bytes(kind) for kind in schemas[-1].types)
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
    return Index(
        path=spelled(base),
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
        file_sights=tuple(sights),
        labels=labels,
        relabelled=tuple(relabelled),
        column_bytes=column_bytes,
        partitions=partitions_in(found.names),
    )


def read_with(data: Index, schema: pa.Schema) -> Index:
    """Return the index of the same rows, read with these columns and types; of a mix, in all sources."""
    if schema.equals(data.schema):
        return data
    sources = tuple(read_with(source, schema) for source in data.sources)
    before = data.column_bytes
    kinds = {one.name: _least_bytes(one.type) for one in data.schema}
    sizes = {
        one.name: round(before[one.name] / kinds[one.name] * _least_bytes(one.type))
        for one in schema
        if one.name in before
    }
    share = sum(sizes.values()) / sum(before.values()) if before else 1.0
    return replace(
        data,
        schema=schema,
        read_as=None if sources else schema,
        sources=sources,
        column_bytes=sizes,
        unit_bytes=tuple(size for source in sources for size in source.unit_bytes)
        or tuple(round(size * share) for size in data.unit_bytes),
    )


def alike(seen: Index, held_out: Index) -> tuple[Index, Index]:
    """Return the training and the held-out data with one type for each column.

    Raises `DataError` if the held-out data has other columns, or types that have nothing in common.
    """
    schema = united(seen.schema, held_out.schema)
    if schema is not None:
        seen, held_out = read_with(seen, schema), read_with(held_out, schema)
    check_alike(seen, held_out)
    return seen, held_out


def linked_folders(data: Index) -> list[str]:
    """Return the links to folders through which files of the data are reached, by their names below its path."""
    if data.sources:
        return [link for source in data.sources for link in linked_folders(source)]
    if data.documents is not None:
        return linked_folders(data.documents)
    if data.items is not None or (data.origin is not None and data.origin.format is None):
        return []
    files = data.places if data.origin is None else [place_of(file) for file, _ in data.origin.files]
    root, _ = split_pattern(place_of(data.named))
    return links_below(root, [file for file in files if isinstance(file, Path)]) if isinstance(root, Path) else []


def index_items(items: Items) -> Index:
    """Return the index of a dataset that is read by index."""
    rows = items.block_rows
    return Index(
        path=items.spec,
        root="",
        files=(items.spec,),
        file_bytes=(0,),
        file_footers=(items.fingerprint,),
        file_groups=(rows,),
        unit_file=(0,) * len(rows),
        unit_group=tuple(range(len(rows))),
        unit_rows=rows,
        unit_bytes=tuple(round(items.item_bytes * count) for count in rows),
        schema=items.schema,
        fingerprint=items.fingerprint,
        file_sights=(),
        items=items,
    )


def with_tokenizer(data: Index, path: str | Path | None) -> Index:
    """Return the index of the same rows with tokens in place of text, if `path` names a tokenizer.

    Its digest becomes a part of the fingerprint. Raises the errors of `tokenizer_file`.
    """
    if path is None:
        return data
    file = tokenizer_file(path)
    both = hashlib.sha256(f"{data.fingerprint}\0{file.sha256}".encode()).hexdigest()
    return replace(data, tokenizer=file, fingerprint=both)


def _without_files(source: Index) -> dict[str, Any]:
    """Return the description of a source of a mix, whose files are among the mix's."""
    return {name: value for name, value in source.to_json().items() if name != "files"}


def check_alike(seen: Index, held_out: Index) -> None:
    """Raise `DataError` if the held-out data has other columns than the training data."""
    if not held_out.schema.equals(seen.schema):
        raise DataError(
            f"the held-out data has other columns than the training data: {_other_columns(seen, held_out)}",
            where=f"evaluate.path: {held_out.named}",
            expected=f"the columns of {seen.named}: {', '.join(seen.schema.names)}",
            remedy="name the columns to read, with their types, in data.columns",
        )
    if not seen.older:
        check_labels(seen, held_out, f"evaluate.path: {held_out.named}")
    if (mine := class_names(seen)) != (theirs := class_names(held_out)):
        names = sorted({*mine} ^ {*theirs})
        raise DataError(
            f"only one of the training data and the held-out data has images of {', '.join(names[:4])}",
            where=f"evaluate.path: {held_out.named}",
            expected=f"the class folders of {seen.named}: labels number them",
            remedy="put an image of each class into both folders",
        )


def check_labels(seen: Index, other: Index, where: str) -> None:
    """Raise `DataError` if a class label of Hugging Face's has another number in other data, which is at `where`."""
    _check_labels(seen.sources[0] if seen.sources else seen, other.labels, where, than=f"in {seen.named}")


def check_own_labels(data: Index) -> None:
    """Raise `DataError` if a class label of Hugging Face's has another number in another file."""
    for name, labels in data.relabelled:
        _check_labels(data, labels, f"{data.root}/{name}", than=f"those of other files of {data.named}")


def _check_labels(seen: Index, labels: Mapping[str, Sequence[str]], where: str, *, than: str) -> None:
    for name in seen.labels.keys() & labels.keys() & {*seen.schema.names}:
        mine, theirs = list(seen.labels[name]), list(labels[name])
        if mine != theirs:
            at = next((at for at, pair in enumerate(zip(mine, theirs, strict=False)) if len({*pair}) > 1), None)
            differ = f"{len(theirs)}, not {len(mine)}" if at is None else f"{at} is '{theirs[at]}', not '{mine[at]}'"
            raise DataError(
                f"the classes of '{name}' have other numbers than {than}: {differ}",
                where=where,
                expected=f"the classes {', '.join(mine[:6])}{', ...' * (len(mine) > 6)}",
                remedy=f"cast it with datasets' cast_column('{name}', ClassLabel(names=[...])), or leave it out of "
                "data.columns",
            )


def _other_columns(seen: Index, held_out: Index) -> str:
    """Name the columns that only one of them has, or those of other types, or say that their order differs."""
    mine, theirs = ({field.name: field.type for field in one.schema} for one in (seen, held_out))
    if names := sorted({*mine} ^ {*theirs}):
        return ", ".join(names)
    types = [f"'{name}' is {kind}, not {mine[name]}" for name, kind in theirs.items() if kind != mine[name]]
    return ", ".join(types) or f"their order is {', '.join(theirs)}"


def class_names(data: Index) -> list[str]:
    """Return the classes of image files, in the order of their labels; none for other data."""
    if data.sources:
        return next(filter(None, map(class_names, data.sources)), [])
    if data.origin is None or data.origin.format != "images":
        return []
    names: list[str] = json.loads((pq.read_schema(data.file(0)).metadata or {}).get(CLASSES, b"[]"))
    return names


def check_enough(data: Index, shards: int) -> None:
    """Raise `DataError` if there are fewer rows than shards, in the data or in a source of a mix."""
    for source in data.sources:
        check_enough(source, shards)
    if data.rows < shards:
        raise DataError(
            f"the data has {data.rows} rows, fewer than data.shards = {shards}",
            where=data.named,
            expected="at least one row for each shard",
            remedy=f"use more data, or data.shards of at most {data.rows}",
        )


def read_unit(data: Index, unit: int) -> pa.Table:
    """Return all rows of one unit, in the file's order, with their ids.

    Raises `DataChanged` if the file has changed since `data` was made, or is damaged; `DataError` if it cannot be read.
    """
    data, unit = data.owner(unit)
    if data.items is not None:
        return read_places(data, unit, np.arange(data.unit_rows[unit]))
    number, group = data.unit_file[unit], data.unit_group[unit]
    try:
        table = _read_group(data.file(number), group, None if data.read_as is None else data.read_as.names)
    except UNREADABLE as error:
        # If the file has changed, that explains the error better.
        check_unchanged(data, number)
        raise _unreadable(data, unit, error) from error
    # After the read, so that it covers changes up to its end.
    check_unchanged(data, number)
    if table.num_rows != data.unit_rows[unit]:
        raise _damaged(data, unit, f"read {table.num_rows} rows, expected {data.unit_rows[unit]}")
    ids = column_of(row_ids(data.prefix + data.files[number], group, table.num_rows))
    return _as_read(data, unit, table.replace_schema_metadata(None)).append_column(ROW_ID, ids)


def read_places(data: Index, unit: int, places: npt.NDArray[np.int64]) -> pa.Table:
    """Return some rows of a unit of a dataset that is read by index, with their ids; see `Items.rows`."""
    data, unit = data.owner(unit)
    assert data.items is not None
    ids = column_of(row_ids(data.prefix + data.path, unit, data.unit_rows[unit])[places])
    rows = data.items.rows(data.items.at(unit, places).tolist())
    return _as_read(data, unit, rows).append_column(ROW_ID, ids)


def _as_read(data: Index, unit: int, rows: pa.Table) -> pa.Table:
    """Return rows of a unit with the columns and types that the job reads. Raises `DataError` if they do not fit."""
    if data.partitions is not None:
        wanted = () if data.read_as is None else data.read_as.names
        rows = with_partitions(rows, data.partitions, data.unit_file[unit], wanted, data.name(unit))
    if data.read_as is None:
        return rows
    try:
        return cast(rows, data.read_as)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"its rows cannot be read as {', '.join(f'{one.name}: {one.type}' for one in data.read_as)}: "
            f"{first_line(error)}",
            where=data.name(unit),
            remedy="give data.columns types that hold all values",
        ) from error


def check_unchanged(data: Index, *numbers: int) -> None:
    """Compare files, by number, with the `stat` that this process first took: one `stat` each; all files by default.

    Raises `DataChanged` if one has changed, `DataError` if one cannot be accessed.
    """
    for source in data.sources:
        check_unchanged(source)
    # Items are compared when they are read.
    of_all = range(len(data.files) if data.items is None and not data.sources else 0)
    files = {data.file(number): number for number in numbers or of_all}

    def change(file: Place) -> str:
        try:
            return change_of(file, data.file_sights[files[file]], data.file_footers[files[file]])
        except OSError as error:
            raise DataError(f"cannot be accessed: {error.strerror or first_line(error)}", where=str(file)) from error

    for file, found in zip(files, in_parallel(change, list(files)), strict=True):
        if found:
            raise DataChanged(
                f"the file changed while the run used it: {found}",
                where=f"{file} on {os.uname().nodename}",
                remedy=f"restore {_as_it_was(file)} and resume the run, or start over with --fresh; do not change the "
                "data while a run uses it",
                first=_first_of(data, files[file]),
            )


def check_restored(data: Index, first: Mapping[str, Any]) -> None:
    """Compare a file that changed during a run with its state when the run began: `DataChanged.first`.

    Raises `DataError` if the file has not been restored.
    """
    for source in data.sources:
        check_restored(source, first)
    if first["path"] != data.path or first["file"] not in data.files:
        return
    file = data.file(data.files.index(first["file"]))
    seen = Sight(first["bytes"], first["modified_ns"], changed_ns=0, inode=0, version=first.get("etag", ""))
    change = change_of(file, seen, first["footer_sha256"])
    if change and isinstance(file, RemotePath):
        raise DataError(
            f"the file changed while the run used it and has not been restored: {change}",
            where=str(file),
            remedy=f"restore {_as_it_was(file)}; or start over with --fresh",
        )
    if change:
        seconds, rest = divmod(first["modified_ns"], 10**9)
        raise DataError(
            f"the file changed while the run used it and has not been restored: {change}",
            where=str(file),
            remedy="restore its content, and its modification time with "
            f"`touch -d @{seconds}.{rest:09d} {shlex.quote(str(file))}`; or start over with --fresh",
        )


def _as_it_was(file: Place) -> str:
    # An object that is written again has another modification time.
    return "the object's content" if isinstance(file, RemotePath) else "the file with its modification time"


def _first_of(data: Index, number: int) -> dict[str, str | int]:
    sight = data.file_sights[number]
    return {
        "path": data.path,
        "file": data.files[number],
        "bytes": sight.size,
        "modified_ns": sight.modified_ns,
        "footer_sha256": data.file_footers[number],
        **({"etag": sight.version} if sight.version else {}),
    }


def _read_group(file: Place, group: int, columns: list[str] | None = None) -> pa.Table:
    def read(source: Path | pa.NativeFile, *, ahead: bool) -> pa.Table:
        with pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=ahead) as opened:
            return opened.read_row_group(group, columns=columns, use_threads=False)

    # Of a remote file, the pages of all columns are asked for at once.
    return file.read(partial(read, ahead=True)) if isinstance(file, RemotePath) else read(file, ahead=False)


def _unreadable(data: Index, unit: int, error: Exception) -> DataError:
    if _CHECKSUM_FAILED in str(error):
        return _damaged(data, unit, "the page checksum does not match", _damaged_column(data, unit))
    if isinstance(error, StorageError):
        remedy = "run again when the store can be reached"
    elif isinstance(error, PermissionError):
        remedy = "allow this machine to read it"
    else:
        remedy = "rewrite the file, or remove it"
    return DataError(f"cannot be read: {first_line(error)}", where=data.name(unit), remedy=remedy)


def _damaged_column(data: Index, unit: int) -> str:
    """Return the first column of a unit that has a page with a wrong checksum; empty if none has when read alone."""
    names: list[str] = data.schema.names
    for name in names:
        try:
            _read_group(data.file(data.unit_file[unit]), data.unit_group[unit], [name])
        except UNREADABLE as error:
            if _CHECKSUM_FAILED in str(error):
                return name
    return ""


def _damaged(data: Index, unit: int, what: str, column: str = "") -> DataChanged:
    column = f", column '{column}'" if column else ""
    return DataChanged(
        f"{what}: the file is damaged",
        where=f"{data.name(unit)}{column} on {os.uname().nodename}",
        remedy="replace it with an undamaged copy and resume the run",
    )


def _least_bytes(kind: pa.DataType) -> int:
    """Return the minimum bytes of a value of this type in memory; the size of its offset if its length varies."""
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * _least_bytes(kind.value_type)
    if pa.types.is_struct(kind):
        return sum(_least_bytes(kind.field(number).type) for number in range(kind.num_fields))
    try:
        return max(1, int(kind.bit_width) // 8)
    except ValueError:
        return 4


def _column_bytes(group: pq.RowGroupMetaData, schema: pa.Schema) -> dict[str, int]:
    """Return the approximate decoded bytes of each column of a row group: see `Index.unit_bytes`."""
    found = {one.name: _least_bytes(one.type) * group.num_rows for one in schema}
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
    except UNREADABLE as error:
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
