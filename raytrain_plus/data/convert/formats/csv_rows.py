"""Read CSV and TSV: the first line names the columns.

All values are read as text first, and become numbers only if each is written as one: `007`, `0x1F` and `NA` are text.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from typing_extensions import override

from raytrain_plus.data.convert.formats.lines import BLOCK_BYTES, compression_of
from raytrain_plus.data.convert.formats.record_blocks import RecordBlock, Records, Unfit
from raytrain_plus.data.convert.formats.row_columns import united
from raytrain_plus.errors import DataError, first_line

_BLOCKS = (BLOCK_BYTES, 64 << 20, 512 << 20)
"""Bytes of a block. A block must hold a whole row: if one does not, the file is read in larger blocks from there on."""
_AHEAD_BYTES = 128 << 20
"""Bytes that are read before their rows are taken, or three blocks."""
_LINE = re.compile(r"(?:Row|row) #(\d+)")
_TABS = re.compile(r"\.tsv(\.(gz|bz2|zst))?$")
_WRITTEN = (
    (pa.bool_(), r"^([tT]rue|[fF]alse|TRUE|FALSE)$"),
    (pa.int64(), r"^-?(0|[1-9]\d{0,17})$"),
    (pa.float64(), r"^([-+]?(0|[1-9]\d*)(\.\d*)?([eE][-+]?\d+)?|[-+]?\.\d+([eE][-+]?\d+)?|[-+]?([nN]a[nN]|[iI]nf))$"),
)
"""How the values of a type are written; a whole number of more digits stays text, unless it has a fraction."""
_SEPARATORS = {
    "\t": ("tabs", "give it a name that ends in .tsv"),
    ",": ("commas", "give it a name that ends in .csv"),
    ";": ("semicolons", "write it with commas, and numbers with decimal points"),
}
"""What may separate values -> its name, and what to do if the file's name promises another one."""
_NUMBER, _FRACTION = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"), re.compile(r"[-.]")
"""A name that is a number, and what such a name holds that is no year or position."""
_ROUNDED = r"^[-+]?\d{16,}$"
"""Whole numbers that a fraction may not hold exactly."""


class CsvRows(Records):
    """A position is a number of rows, because a quoted value may hold the end of a line."""

    @override
    def schema(self, files: Sequence[Path], *, whole: bool) -> pa.Schema:
        return united((file, _schema(file, whole)) for file in files)

    @override
    def blocks(self, file: Path, schema: pa.Schema, begin: int) -> Iterator[RecordBlock]:
        for size in _BLOCKS:
            try:
                for block in _blocks(file, schema, begin, size):
                    begin = block.begin + block.table.num_rows
                    yield block
                return
            except _LongRow as error:
                if size == _BLOCKS[-1]:
                    raise DataError(error.what, f"{file}, row {begin + 1}", remedy=error.remedy) from None


class _LongRow(DataError):
    """A row is longer than a block."""


def _blocks(file: Path, schema: pa.Schema, begin: int, size: int) -> Iterator[RecordBlock]:
    at, last = 0, None
    with _opened(file, size) as (raw, _, batches):
        for batch in batches:
            first, at = at, at + batch.num_rows
            if at > begin:
                table = _typed(pa.Table.from_batches([batch]).slice(max(0, begin - first)), schema, file)
                yield RecordBlock(table, max(first, begin), raw.tell())
            last = batch
    if last is not None and "\n" in str(last.column(last.num_columns - 1)[-1]) and not _ends_quoted(file):
        raise DataError(
            "a quote is not closed: the rest of the file would be one value",
            where=f"{file}, row {at}",
            remedy="close it; a quote in a quoted value is written twice",
        )


def _ends_quoted(file: Path) -> bool:
    """Return whether the last value of a file ends in a quote, so that the ends of lines in it are its own."""
    end = b""
    with pa.OSFile(str(file)) as raw, pa.input_stream(raw, compression=compression_of(file)) as stream:
        while read := stream.read(BLOCK_BYTES):
            end = (end + read).rstrip()[-1:]
    return end == b'"'


def _schema(file: Path, whole: bool) -> pa.Schema:
    """Return the columns of a file, by its first block or by all: those whose blocks differ are text, or fractions."""
    for size in _BLOCKS[:-1]:
        with suppress(_LongRow):
            return _schema_by(file, whole, size)
    return _schema_by(file, whole, _BLOCKS[-1])


def _schema_by(file: Path, whole: bool, size: int) -> pa.Schema:
    found: dict[str, pa.DataType | None] = {}
    with _opened(file, size) as (_, names, batches):
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"column '{twice}' is there twice", where=str(file), remedy="give each its own name")
        _check_header(file, names)
        for batch in batches:
            for name in names:
                found[name] = _either(found.get(name), _type_of(batch.column(name)))
            if not whole:
                break
    return pa.schema([pa.field(name, found.get(name) or pa.string()) for name in names])


def _delimiter(file: Path) -> str:
    return "\t" if _TABS.search(file.name.lower()) else ","


def _check_header(file: Path, names: Sequence[str]) -> None:
    """Raise `DataError` if the first line holds no names of columns, or other separators than the file's name says."""
    own = _delimiter(file)
    other = next((one for one in _SEPARATORS if one != own and one in names[0]), None) if len(names) == 1 else None
    if other is not None:
        word, remedy = _SEPARATORS[other]
        raise DataError(
            f"its only column is {names[0]!r}: the names are separated by {word}",
            where=f"{file}, line 1",
            expected=f"values separated by {_SEPARATORS[own][0]}",
            remedy=remedy,
        )
    if all(map(_NUMBER.fullmatch, names)) and any(map(_FRACTION.search, names)):
        raise DataError(
            f"the first line holds numbers, not the names of columns: {', '.join(names[:3])}",
            where=f"{file}, line 1",
            remedy="insert a line with the names",
        )


def _type_of(column: pa.Array | pa.ChunkedArray) -> pa.DataType | None:
    """Return the type as which all values of a block are written; None if all are empty."""
    given = column.filter(pc.not_equal(column, ""))
    if not len(given):
        return None
    for kind, pattern in _WRITTEN:
        if pc.all(pc.match_substring_regex(given, pattern)).as_py():
            rounded = pa.types.is_floating(kind) and pc.any(pc.match_substring_regex(given, _ROUNDED)).as_py()
            return pa.string() if rounded else kind
    return pa.string()


def _either(one: pa.DataType | None, other: pa.DataType | None) -> pa.DataType | None:
    if one is None or other is None or one == other:
        return one or other
    return pa.float64() if {one, other} == {pa.int64(), pa.float64()} else pa.string()


def _typed(table: pa.Table, schema: pa.Schema, file: Path) -> pa.Table:
    """Return text as values of these columns; the columns that the file lacks are nulls. Raises `Unfit`."""
    columns = []
    for one in schema:
        if one.name not in table.schema.names:
            columns.append(pa.nulls(table.num_rows, one.type))
            continue
        column = table.column(one.name)
        if one.type != pa.string():
            written = (
                _type_of(column.combine_chunks())
                if column.num_chunks < 2
                else _type_of(pa.concat_arrays(column.chunks))
            )
            if written is not None and _either(written, one.type) != one.type:
                what = f"column '{one.name}' is {written} in some rows, and {one.type} in others"
                raise Unfit(DataError(what, str(file), remedy="give the column one type in all rows"))
            column = pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column).cast(one.type)
        columns.append(column)
    return pa.table(columns, schema=schema)


@contextmanager
def _opened(file: Path, size: int) -> Iterator[tuple[pa.NativeFile, list[str], Iterator[pa.RecordBatch]]]:
    """Open a file; yield it, the names of its columns, and its rows as text, in blocks of `size` bytes.

    Raises `_LongRow` if a block holds no whole row, and `DataError` if the file cannot be read.
    """
    parsing = pa.csv.ParseOptions(delimiter=_delimiter(file), newlines_in_values=True)
    reading = pa.csv.ReadOptions(block_size=size)
    try:
        with _stream(file, size) as (_, stream):
            names: list[str] = pa.csv.open_csv(pa.PythonFile(stream, "r"), reading, parsing).schema.names
        as_text = pa.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
        with _stream(file, size) as (raw, stream):
            yield raw, names, stream.freed_by(pa.csv.open_csv(pa.PythonFile(stream, "r"), reading, parsing, as_text))
    except pa.ArrowInvalid as error:
        raise _fault(file, error) from None
    except OSError as error:
        raise DataError(f"cannot be read: {first_line(error)}", where=str(file)) from error


@contextmanager
def _stream(file: Path, size: int) -> Iterator[tuple[pa.NativeFile, _FewAhead]]:
    with pa.OSFile(str(file)) as raw, pa.input_stream(raw, compression=compression_of(file)) as stream:
        few = _FewAhead(stream, max(3, _AHEAD_BYTES // size))
        try:
            yield raw, few
        finally:
            few.end()


class _FewAhead:
    """A stream that reads few blocks before their rows are taken; Arrow would read 32 of any size."""

    closed = False

    def __init__(self, stream: pa.NativeFile, blocks: int) -> None:
        self._stream = stream
        self._blocks = blocks
        self._free = threading.Semaphore(blocks)
        self._lock = threading.Lock()
        self._ended = False

    def readable(self) -> bool:
        """Return True: Arrow asks."""
        return True

    def read(self, size: int) -> bytes:
        """Return the next bytes, once the rows of earlier blocks are taken."""
        # A block without rows is never taken: after a second the next is read in any case.
        self._free.acquire(timeout=1)
        with self._lock:
            read: bytes = b"" if self._ended else self._stream.read(size)
        return read

    def freed_by(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the rows that Arrow makes of this stream; each that is taken lets one more block be read."""
        for batch in batches:
            yield batch
            self._free.release()

    def end(self) -> None:
        """Read nothing more, and let nobody wait."""
        with self._lock:
            self._ended = True
        self._free.release(self._blocks)


def _fault(file: Path, error: pa.ArrowInvalid) -> DataError:
    text = first_line(error)
    if "straddl" in text:
        what = f"a row is longer than {_BLOCKS[-1] >> 20} MiB, or has a quote that is not closed"
        return _LongRow(what, str(file), remedy="close the quote, or write the rows as JSON Lines or Parquet")
    if "Empty CSV file" in text:
        return DataError(
            "is empty", str(file), expected="a line with the names of the columns", remedy="write it, or move the file"
        )
    found = _LINE.search(text)
    where = f"{file}, line {found.group(1)}" if found else str(file)
    text = re.sub(r"^(CSV parse error: )?(Row #\d+: )?", "", text)
    if "utf8" in text.lower().replace("-", ""):
        return DataError("is not UTF-8 text", where, remedy="convert the file to UTF-8")
    return DataError(text, where, remedy="give each line as many values as there are columns")
