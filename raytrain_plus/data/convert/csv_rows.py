"""Read CSV and TSV: the first line names the columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv

from raytrain_plus.data.convert.columns import united
from raytrain_plus.data.convert.lines import BLOCK_BYTES, compression_of
from raytrain_plus.data.convert.records import Block, Unfit
from raytrain_plus.errors import DataError, first_line

_LINE = re.compile(r"(?:Row|row) #(\d+)")


class CsvRows:
    """See `records.Records`. A position is a number of rows, because a quoted value may hold the end of a line."""

    def schema(self, files: Sequence[Path], *, whole: bool) -> pa.Schema:
        """See `records.Records`."""
        return united((file, schema) for file in files for schema in _schemas(file, whole))

    def blocks(self, file: Path, schema: pa.Schema, begin: int) -> Iterator[Block]:
        """See `records.Records`."""
        types = {field.name: field.type for field in schema}
        at = 0
        try:
            with pa.OSFile(str(file)) as raw, pa.input_stream(raw, compression=compression_of(file)) as stream:
                for batch in _opened(stream, file, types):
                    table = _all_columns(pa.Table.from_batches([batch]), schema)
                    first, at = at, at + table.num_rows
                    if at > begin:
                        skip = max(0, begin - first)
                        yield Block(table.slice(skip), first + skip, raw.tell())
        except pa.ArrowInvalid as error:
            raise _fault(file, error) from None
        except OSError as error:
            raise DataError(f"cannot be read: {first_line(error)}", where=str(file)) from error


def _schemas(file: Path, whole: bool) -> Iterator[pa.Schema]:
    """Yield the columns of the first block of a file, or of each."""
    try:
        with pa.OSFile(str(file)) as raw, pa.input_stream(raw, compression=compression_of(file)) as stream:
            first = _opened(stream, file, {})
            names = first.schema.names
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise DataError(f"column '{twice}' is there twice", where=str(file), remedy="give each its own name")
            yield _plain(first.schema)
            if not whole:
                return
        with pa.OSFile(str(file)) as raw, pa.input_stream(raw, compression=compression_of(file)) as stream:
            # All values as text, and then each block on its own.
            for batch in _opened(stream, file, dict.fromkeys(names, pa.string())):
                yield _plain(_guessed(batch))
    except pa.ArrowInvalid as error:
        fault = _fault(file, error)
        raise fault.error if isinstance(fault, Unfit) else fault from None
    except OSError as error:
        raise DataError(f"cannot be read: {first_line(error)}", where=str(file)) from error


def _opened(stream: pa.NativeFile, file: Path, types: dict[str, pa.DataType]) -> pa.csv.CSVStreamingReader:
    tabs = ".tsv" in file.suffixes
    return pa.csv.open_csv(
        stream,
        pa.csv.ReadOptions(block_size=BLOCK_BYTES),
        pa.csv.ParseOptions(delimiter="\t" if tabs else ",", newlines_in_values=True),
        pa.csv.ConvertOptions(column_types=types, timestamp_parsers=[]),
    )


def _guessed(batch: pa.RecordBatch) -> pa.Schema:
    """Return the types that the text of a block's columns has."""
    sink = pa.BufferOutputStream()
    pa.csv.write_csv(batch, sink)
    return pa.csv.read_csv(pa.BufferReader(sink.getvalue())).schema


def _plain(schema: pa.Schema) -> pa.Schema:
    """Return the columns with text as text, which pyarrow takes for times if it looks like them."""
    times = (pa.types.is_temporal, pa.types.is_null)
    return pa.schema([pa.field(one.name, pa.string() if times[0](one.type) else one.type) for one in schema])


def _all_columns(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table with the columns that its file lacks, as nulls."""
    if table.schema.names == schema.names:
        return table
    columns = [
        table.column(one.name) if one.name in table.schema.names else pa.nulls(table.num_rows, one.type)
        for one in schema
    ]
    return pa.table(columns, schema=schema)


def _fault(file: Path, error: pa.ArrowInvalid) -> Exception:
    text = first_line(error)
    found = _LINE.search(text)
    where = f"{file}, line {found.group(1)}" if found else str(file)
    text = re.sub(r"^(CSV parse error: )?(Row #\d+: )?", "", text)
    if "conversion error" in text.lower():
        return Unfit(DataError(text, where, remedy="give the column one type in all rows"))
    return DataError(text, where, remedy="give each line as many values as there are columns")
