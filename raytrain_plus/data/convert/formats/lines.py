"""Read text files in blocks that end at the end of a line, and parse several at once, in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import pyarrow as pa

from raytrain_plus.data.convert.formats.formats import PACKED
from raytrain_plus.errors import DataError, first_line

BLOCK_BYTES = 4 << 20
"""Bytes of a block; a longer line makes a longer one."""

Parsed = TypeVar("Parsed")


class LineBlock(NamedTuple):
    """Whole lines."""

    content: bytes
    begin: int
    """The position of the first byte, in the uncompressed file."""
    read: int
    """Bytes of the file, as it is on disk, that have been read so far."""


def line_blocks(file: Path, begin: int = 0) -> Iterator[LineBlock]:
    """Yield the lines of a file from a position on, which must be the begin of a line.

    Files whose names end in .gz, .bz2 or .zst are uncompressed. Raises `DataError` if the file cannot be read.
    """
    try:
        with pa.OSFile(str(file)) as raw, pa.input_stream(raw, compression=compression_of(file)) as stream:
            _skip(stream, begin)
            rest, at = b"", begin
            while True:
                more = stream.read(BLOCK_BYTES)
                content = rest + more
                cut = content.rfind(b"\n") + 1 if more else len(content)
                if cut:
                    yield LineBlock(content[:cut], at, raw.tell())
                    at += cut
                rest = content[cut:]
                if not more:
                    return
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"cannot be read: {first_line(error)}", where=str(file)) from error


def text_of(file: Path, block: LineBlock) -> str:
    """Return the lines of a block as text, without a byte order mark. Raises `DataError` if they are not UTF-8."""
    try:
        return block.content.decode("utf-8" if block.begin else "utf-8-sig")
    except UnicodeDecodeError as error:
        at = line_number(file, block.begin) + block.content[: error.start].count(b"\n")
        raise DataError("is not UTF-8 text", f"{file}, line {at}", remedy="convert the file to UTF-8") from None


def in_order(items: Iterator[LineBlock], parse: Callable[[LineBlock], Parsed]) -> Iterator[tuple[LineBlock, Parsed]]:
    """Yield each block with what `parse` returns for it, in order; as many are parsed at once as there are CPUs."""
    workers = os.cpu_count() or 1
    pending: deque[tuple[LineBlock, Future[Parsed]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                pending.append((item, pool.submit(parse, item)))
                if len(pending) > workers + 1:
                    first, parsed = pending.popleft()
                    yield first, parsed.result()
            while pending:
                first, parsed = pending.popleft()
                yield first, parsed.result()
        finally:
            for _, parsed in pending:
                parsed.cancel()


def line_number(file: Path, position: int) -> int:
    """Return the number of the line that begins at a position of the uncompressed file; the first line is 1."""
    counted = 1
    for block in line_blocks(file):
        if block.begin >= position:
            break
        counted += block.content[: position - block.begin].count(b"\n")
    return counted


def compression_of(file: Path) -> str | None:
    """Return how a file is compressed, by its name; None if it is not."""
    return PACKED.get(file.suffix.lower())


def _skip(stream: pa.NativeFile, count: int) -> None:
    if stream.seekable():
        stream.seek(count)
        return
    while count:
        count -= len(stream.read(min(count, BLOCK_BYTES)))
