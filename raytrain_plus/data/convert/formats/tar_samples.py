"""Read tar files of samples, as WebDataset does: consecutive members with the same name up to its first dot are a row.

The rest of the name, in lower case, is the column. `cls`, `index` and `id` hold whole numbers, `txt`, `text` and
`caption` text, `json` what it says, and all others bytes. If no sample has several images, their column is `image`.
"""

from __future__ import annotations

import json
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from typing_extensions import override

from raytrain_plus.data.convert.formats.formats import SUFFIXES
from raytrain_plus.data.convert.formats.record_blocks import RecordBlock, Records, Unfit
from raytrain_plus.data.convert.formats.row_columns import united
from raytrain_plus.errors import DataError, first_line

BLOCK_BYTES, BLOCK_SAMPLES = 4 << 20, 1000
"""Bytes and samples of a block; a larger sample makes a larger one."""
SAMPLED = 100
"""Samples of each file from which the columns are found."""
_IMAGES = {"image", *(suffix[1:] for suffix in SUFFIXES["images"])}
_KINDS = {
    **dict.fromkeys(("cls", "index", "id"), pa.int64()),
    **dict.fromkeys(("txt", "text", "caption"), pa.string()),
}
"""The types of columns by the last part of their names; of `json` it depends on the values, and others are bytes."""
_NAME = re.compile(r"((?:.*/)?[^/.]+)\.([^/]+)")
_HIDDEN = re.compile(r"(^|/)(\.(?!\.?/)|__[^/]*__/)")
"""Names that begin with a dot, and the folders in which WebDataset keeps what is no sample."""
_WHOLE = re.compile(rb"\s*[-+]?[0-9]{1,19}\s*")
_BROKEN = (OSError, EOFError, tarfile.TarError, zlib.error)
_ZEROS = bytes(tarfile.BLOCKSIZE)


class _Member(NamedTuple):
    name: str
    content: bytes
    """Empty if it is not wanted."""


class _Sample(NamedTuple):
    members: Mapping[str, _Member]
    """By the rests of their names."""
    read: int
    """Bytes of the file that have been read so far."""


class TarSamples(Records):
    """A position is the number of a sample."""

    @override
    def schema(self, files: Sequence[Path], *, whole: bool) -> pa.Schema:
        several = False

        def schemas() -> Iterator[tuple[Path, pa.Schema]]:
            nonlocal several
            for file in files:
                samples = _samples(file, 0, _is_json)
                for batch in _batches(samples if whole else islice(samples, SAMPLED)):
                    several = several or any(len(_images_of(sample.members)) > 1 for sample in batch)
                    yield file, _schema_of(file, batch)

        found = united(schemas())
        if not several:
            found = _one_image(found)
        if any(map(_has_no_fields, found.types)):
            if not whole:
                return self.schema(files, whole=True)
            name = next(field.name for field in found if _has_no_fields(field.type))
            raise DataError(f"column '{name}' holds an object that has no fields in any sample", where=str(files[0]))
        return found

    @override
    def blocks(self, file: Path, schema: pa.Schema, begin: int) -> Iterator[RecordBlock]:
        for batch in _batches(_samples(file, begin, lambda column: True)):
            yield RecordBlock(_table(file, schema, batch), begin, batch[-1].read)
            begin += len(batch)


def _samples(file: Path, begin: int, wanted: Callable[[str], bool]) -> Iterator[_Sample]:
    """Yield the samples of a file from number `begin` on, with the contents of the wanted columns.

    Raises `DataError` if the file is not a whole tar file.
    """
    number, prefix, members, last = -1, "", dict[str, _Member](), ""
    try:
        with file.open("rb") as raw, tarfile.open(fileobj=raw, mode=_mode(file)) as tar:
            for member in iter(tar.next, None):
                # The list of all members would grow without end.
                tar.members.clear()  # type: ignore[attr-defined]
                last = f", member {member.name}"
                found = None if member.isdir() or _HIDDEN.search(member.name) else _NAME.fullmatch(member.name)
                if found is None:
                    continue
                if found[1] != prefix:
                    if members and number >= begin:
                        yield _Sample(members, raw.tell())
                    number, prefix, members = number + 1, found[1], {}
                column = found[2].lower()
                _check_member(file, member, column, members)
                content = number >= begin and wanted(column)
                members[column] = _Member(member.name, tar.extractfile(member).read() if content else b"")  # type: ignore[union-attr]
            _check_end(tar)
            if members and number >= begin:
                yield _Sample(members, raw.tell())
    except _BROKEN as error:
        raise DataError(
            f"is not a readable tar file: {first_line(error)}", f"{file}{last}", remedy="replace it, or remove it"
        ) from error


def _mode(file: Path) -> Any:
    return "r:gz" if file.name.lower().endswith("gz") else "r:"


def _check_member(file: Path, member: tarfile.TarInfo, column: str, members: Mapping[str, _Member]) -> None:
    where = f"{file}, member {member.name}"
    if not member.isfile():
        raise DataError("is a link or a device, not a file", where, remedy="tar --dereference --hard-dereference")
    if column in members:
        raise DataError(f"the sample has two members '{column}'", where, remedy="give each sample a name of its own")


def _check_end(tar: tarfile.TarFile) -> None:
    """Raise `tarfile.ReadError` if a tar file does not end where its members do: `tarfile` ends at a damaged header."""
    rest: Any = tar.fileobj
    rest.seek(tar.offset)
    first = rest.read(len(_ZEROS))
    if len(first) < len(_ZEROS):
        raise tarfile.ReadError("it has no end: the file was cut, or not closed")
    if first != _ZEROS:
        raise tarfile.ReadError("the header of the next member is damaged")
    while more := rest.read(BLOCK_BYTES):
        if more.strip(b"\0"):
            raise tarfile.ReadError("other data follows its end, as if several tar files were joined")


def _batches(samples: Iterator[_Sample]) -> Iterator[list[_Sample]]:
    """Yield the samples in lists of limited size."""
    batch, size = list[_Sample](), 0
    for sample in samples:
        batch.append(sample)
        size += sum(len(member.content) for member in sample.members.values())
        if size >= BLOCK_BYTES or len(batch) >= BLOCK_SAMPLES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _images_of(columns: Iterable[str]) -> list[str]:
    return [column for column in columns if column in _IMAGES]


def _one_image(schema: pa.Schema) -> pa.Schema:
    """Return the columns with one for the images of all samples, in place of the first of theirs."""
    images = _images_of(schema.names)
    fields = [pa.field("image", pa.binary()) if field.name in images[:1] else field for field in schema]
    return pa.schema([field for field in fields if field.name not in images or field.name == "image"])


def _schema_of(file: Path, batch: Sequence[_Sample]) -> pa.Schema:
    columns = dict.fromkeys(column for sample in batch for column in sample.members)
    return pa.schema([pa.field(column, _type_of(file, column, _members(batch, column))) for column in columns])


def _members(batch: Sequence[_Sample], column: str) -> list[_Member]:
    return [sample.members[column] for sample in batch if column in sample.members]


def _type_of(file: Path, column: str, members: Sequence[_Member]) -> pa.DataType:
    if not _is_json(column):
        return _KINDS.get(_kind(column), pa.binary())
    return _type_of_values(file, column, members, [_parsed(file, member) for member in members])


def _type_of_values(file: Path, column: str, members: Sequence[_Member], values: Sequence[Any]) -> pa.DataType:
    """Return the type that holds all values of a column. Raises `DataError` if there is none."""
    try:
        # Not `infer_type`, which takes the type of some values for that of all.
        return pa.array(values).type
    except (pa.ArrowException, ValueError, OverflowError) as error:
        member = _first_unfit(members, values)
        raise DataError(
            f"column '{column}' has no type that holds all values: {first_line(error)}",
            where=f"{file}, member {member.name}",
            remedy="give each field one type in all samples",
        ) from None


def _first_unfit(members: Sequence[_Member], values: Sequence[Any]) -> _Member:
    """Return the first member whose value, together with those before it, has no type."""
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            pa.array(values[: middle + 1])
            low = middle + 1
        except (pa.ArrowException, ValueError, OverflowError):
            high = middle
    return members[low]


def _table(file: Path, schema: pa.Schema, batch: Sequence[_Sample]) -> pa.Table:
    """Return samples as rows with these columns, null where a sample has no such member. Raises `Unfit`."""
    one_image = not {*schema.names} & (_IMAGES - {"image"})
    rows = []
    for sample in batch:
        row = dict[str, _Member]()
        for column, member in sample.members.items():
            name = "image" if one_image and column in _IMAGES else column
            if name not in schema.names or name in row:
                what = f"the sample has a member '{column}', which the first samples do not have"
                raise Unfit(DataError(what, f"{file}, member {member.name}"))
            row[name] = member
        rows.append(row)
    return pa.table([_column(file, field, [row.get(field.name) for row in rows]) for field in schema], schema=schema)


def _column(file: Path, field: pa.Field, members: Sequence[_Member | None]) -> pa.Array:
    if not _is_json(field.name):
        value: Callable[[Path, _Member], Any] = {pa.int64(): _whole, pa.string(): _text}.get(field.type, _bytes)
        return pa.array([None if one is None else value(file, one) for one in members], field.type)
    values = [None if one is None else _parsed(file, one) for one in members]
    given = [(one, value) for one, value in zip(members, values, strict=True) if one is not None]
    found = _type_of_values(file, field.name, [one for one, _ in given], [value for _, value in given])
    try:
        both = united((file, pa.schema([pa.field(field.name, kind)])) for kind in (field.type, found))
    except DataError as error:
        raise Unfit(error) from None
    if both.types != [field.type]:
        what = f"column '{field.name}' is {found} in some samples, and {field.type} in others"
        raise Unfit(DataError(what, str(file), remedy="give each field one type in all samples"))
    try:
        return pa.array(values, field.type)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise DataError(f"column '{field.name}': {first_line(error)}", where=str(file)) from error


def _bytes(file: Path, member: _Member) -> bytes:
    return member.content


def _whole(file: Path, member: _Member) -> int:
    value = int(member.content) if _WHOLE.fullmatch(member.content) else 2**63
    if not -(2**63) <= value < 2**63:
        raise DataError("is not a whole number of 64 bits", f"{file}, member {member.name}")
    return value


def _text(file: Path, member: _Member) -> str:
    try:
        return member.content.decode()
    except UnicodeDecodeError:
        raise DataError("is not UTF-8 text", f"{file}, member {member.name}", remedy="convert it to UTF-8") from None


def _parsed(file: Path, member: _Member) -> Any:
    try:
        return json.loads(member.content)
    except ValueError as error:
        raise DataError(f"is not JSON: {first_line(error)}", f"{file}, member {member.name}") from None


def _kind(column: str) -> str:
    return column.rpartition(".")[2]


def _is_json(column: str) -> bool:
    return _kind(column) == "json"


def _has_no_fields(kind: pa.DataType) -> bool:
    """Return whether a type is, or holds, a struct without fields, which Parquet cannot hold."""
    if pa.types.is_struct(kind):
        return kind.num_fields == 0 or any(_has_no_fields(field.type) for field in kind.fields)
    return bool(pa.types.is_list(kind)) and _has_no_fields(kind.value_type)
