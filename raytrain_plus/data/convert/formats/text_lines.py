"""Read plain text: each line is a row, without its end, in the column `text`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from typing_extensions import override

from raytrain_plus.data.convert.formats.lines import LineBlock, in_order, line_blocks, text_of
from raytrain_plus.data.convert.formats.record_blocks import RecordBlock, Records

SCHEMA = pa.schema([pa.field("text", pa.string())])


class TextLines(Records):
    """A position is that of a byte in the uncompressed file."""

    @override
    def schema(self, files: Sequence[Path], *, whole: bool) -> pa.Schema:
        return SCHEMA

    @override
    def blocks(self, file: Path, schema: pa.Schema, begin: int) -> Iterator[RecordBlock]:

        def lines(block: LineBlock) -> pa.Table:
            found = text_of(file, block).split("\n")
            if not found[-1]:
                found.pop()
            return pa.table([pa.array([line.removesuffix("\r") for line in found], pa.string())], schema=SCHEMA)

        for block, table in in_order(line_blocks(file, begin), lines):
            yield RecordBlock(table, block.begin, block.read)
