"""Read Arrow files, whether of the file format (Feather) or the stream format, as `save_to_disk` writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from typing_extensions import override

from raytrain_plus.data.convert.formats.record_blocks import RecordBlock, Records
from raytrain_plus.data.convert.formats.row_columns import united
from raytrain_plus.errors import DataError, first_line

_MAGIC, _END = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"
"""How a file of the file format begins, and one of the stream format ends."""


class ArrowBatches(Records):
    """A position is the number of a record batch."""

    @override
    def schema(self, files: Sequence[Path], *, whole: bool) -> pa.Schema:

        def schemas() -> Iterator[tuple[Path, pa.Schema]]:
            for file in files:
                with _opened(file) as (schema, _):
                    yield file, schema.remove_metadata()

        return united(schemas())

    @override
    def blocks(self, file: Path, schema: pa.Schema, begin: int) -> Iterator[RecordBlock]:
        with _opened(file) as (_, batches):
            for number, (batch, read) in enumerate(batches):
                if number >= begin and batch.num_rows:
                    table = pa.Table.from_batches([batch]).replace_schema_metadata(None)
                    missing = [one for one in schema if one.name not in table.schema.names]
                    for one in missing:
                        table = table.append_column(one, pa.nulls(table.num_rows, one.type))
                    yield RecordBlock(table.select(schema.names).cast(schema), number, read)


@contextmanager
def _opened(file: Path) -> Iterator[tuple[pa.Schema, Iterator[tuple[Any, int]]]]:
    """Open a file; yield its columns, and its batches with the bytes that are read up to each."""
    try:
        with pa.OSFile(str(file)) as raw:
            of_file = raw.read(len(_MAGIC)) == _MAGIC
            raw.seek(0)
            if of_file:
                reader = pa.ipc.open_file(raw)
                batches = ((reader.get_batch(number), raw.tell()) for number in range(reader.num_record_batches))
            else:
                raw.seek(max(0, raw.size() - len(_END)))
                whole = raw.read() == _END
                raw.seek(0)
                reader = pa.ipc.open_stream(raw)
                if not whole:
                    raise pa.ArrowInvalid("it has no end: the file was cut, or not closed")
                batches = ((batch, raw.tell()) for batch in reader)
            yield reader.schema, batches
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"is not a readable Arrow file: {first_line(error)}", where=str(file)) from error
