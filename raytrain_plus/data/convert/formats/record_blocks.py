"""Interface of what reads a format's files: tables in the order of the file, from any position on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import pyarrow as pa


class RecordBlock(NamedTuple):
    """Consecutive rows of a file."""

    table: pa.Table
    begin: int
    """The position of its first row, from which `Records.blocks` can begin again."""
    read: int
    """Bytes of the file that have been read so far; some may belong to later rows."""


class Records(Protocol):
    """The rows of a dataset's files."""

    def schema(self, files: Sequence[Path], *, whole: bool) -> pa.Schema:
        """Return the columns of all files, from a sample of their rows, or from all if `whole`.

        Raises `DataError` if files, or rows, have columns of types that no type can hold.
        """

    def blocks(self, file: Path, schema: pa.Schema, begin: int) -> Iterator[RecordBlock]:
        """Yield the rows of a file with these columns, from a position on; 0 is its begin.

        Raises `Unfit` if a row has other columns, or values of another type, and `DataError` if it cannot be read.
        """


class Unfit(Exception):
    """A row does not have the columns that a sample of the rows has."""

    def __init__(self, error: Exception) -> None:
        """`error`: what is to be said if it does not fit the columns of all rows either."""
        super().__init__(str(error))
        self.error = error
