"""Read JSON Lines: one JSON object on each line; its keys are the columns."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
from typing_extensions import override

from raytrain_plus.data.convert.formats.lines import LineBlock, in_order, line_blocks, line_number, text_of
from raytrain_plus.data.convert.formats.record_blocks import RecordBlock, Records, Unfit
from raytrain_plus.data.convert.formats.row_columns import united
from raytrain_plus.errors import DataError, first_line

_AT = re.compile(r" in row (?P<row>\d+)$")
"""The end of pyarrow's messages: it counts rows of the block from 0."""
_CHANGED = re.compile(r"Column\(/(?P<name>.*)\) (?P<how>changed from .*)")
"""pyarrow's message about a value of another type than those before."""
_EXACT = 2**53
"""Up to here a fraction holds every whole number exactly."""


class JsonLines(Records):
    """A position is that of a byte in the uncompressed file."""

    @override
    def schema(self, files: Sequence[Path], *, whole: bool) -> pa.Schema:
        return united(
            (file, schema)
            for file in files
            for _, schema in in_order(islice(line_blocks(file), None if whole else 1), partial(_schema_of, file))
        )

    @override
    def blocks(self, file: Path, schema: pa.Schema, begin: int) -> Iterator[RecordBlock]:
        for block, table in in_order(line_blocks(file, begin), partial(_table, file, schema)):
            if table.num_rows:
                yield RecordBlock(table, block.begin, block.read)


def _schema_of(file: Path, block: LineBlock) -> pa.Schema:
    """Return the columns of the rows of a block. Raises `DataError` if one is not a JSON object."""
    return _plain(_parsed(file, block, None).schema)


def _table(file: Path, schema: pa.Schema, block: LineBlock) -> pa.Table:
    return _parsed(file, block, schema)


def _parsed(file: Path, block: LineBlock, schema: pa.Schema | None) -> pa.Table:
    if not block.content.strip():
        return (schema or pa.schema([])).empty_table()
    reading = pa.json.ReadOptions(use_threads=False, block_size=len(block.content) + 1)
    parsing = pa.json.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "error"
    )
    text_of(file, block)
    try:
        table = pa.json.read_json(pa.BufferReader(block.content), reading, parsing)
    except pa.ArrowException as error:
        raise _fault(file, block, schema, error) from None
    large = [one.name for one in table.schema if pa.types.is_floating(one.type) and _has_large(table.column(one.name))]
    if large:
        _check_exact(file, block, large)
    return table


def _has_large(column: pa.ChunkedArray) -> bool:
    return bool(pc.any(pc.greater_equal(pc.abs(column), _EXACT)).as_py())


def _check_exact(file: Path, block: LineBlock, fractions: Sequence[str]) -> None:
    """Raise `DataError` for a whole number in these columns of fractions that would be rounded."""
    for at, line in enumerate(block.content.splitlines()):
        row = (json.loads(line) if line.strip() else None) or {}
        for name in fractions:
            value = row.get(name)
            if isinstance(value, int) and abs(value) > _EXACT:
                raise DataError(
                    f"column '{name}' holds {value}, which a column of fractions, or one beyond 64 bits, cannot hold",
                    f"{file}, line {line_number(file, block.begin) + at}",
                    remedy="write the column as text",
                )


def _fault(file: Path, block: LineBlock, schema: pa.Schema | None, error: pa.ArrowException) -> Exception:
    """Return what is wrong with a block: a line that is no JSON object, or values of another type than before."""
    number, rows = line_number(file, block.begin), 0
    text = _plain_text(error)
    at_row = _AT.search(text)
    text, row = (text, None) if at_row is None else (text[: at_row.start()], int(at_row["row"]))
    changed = _CHANGED.fullmatch(text)
    for at, line in enumerate(block.content.splitlines(), number):
        if not line.strip():
            continue
        rows, where = rows + 1, f"{file}, line {at}"
        try:
            value = json.loads(line)
        except ValueError as broken:
            return DataError(f"is not JSON: {first_line(broken)}", where, remedy="correct the line, or remove it")
        if not isinstance(value, dict):
            return DataError(
                f"is a JSON {type(value).__name__}, not an object",
                where,
                expected='{"column": value, ...}',
                remedy="write each row as an object on a line of its own",
            )
        if rows - 1 == row and changed:
            what = f"column '{changed['name']}' {changed['how']}"
            refused = DataError(what, where, remedy="give the column one type in all lines")
            # All rows together may have a type.
            null_before = schema is not None and changed["how"].startswith("changed from null")
            return Unfit(refused) if null_before else refused
        if schema is not None:
            try:
                _parsed_line(line, schema)
            except pa.ArrowException as unfit:
                what = _AT.sub("", _plain_text(unfit))
                return Unfit(DataError(what, where, expected=_columns_text(schema)))
        if rows - 1 == row:
            return DataError(text, where, remedy="correct the line, or remove it")
    return DataError(text, f"{file}, from line {number}", remedy="correct the lines from there on")


def _parsed_line(line: bytes, schema: pa.Schema) -> None:
    parsing = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error")
    pa.json.read_json(pa.BufferReader(line), pa.json.ReadOptions(use_threads=False), parsing)


def _plain_text(error: pa.ArrowException) -> str:
    return first_line(error).removeprefix("JSON parse error: ")


def _columns_text(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _plain(schema: pa.Schema) -> pa.Schema:
    """Return the columns with text as text, which pyarrow takes for times if it looks like them."""
    return pa.schema([pa.field(field.name, _plain_type(field.type)) for field in schema])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_plain_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(one.name, _plain_type(one.type)) for one in kind.fields])
    return kind
