"""Find out which Parquet files have page checksums. The code that reads the pages verifies them.

A footer does not record this. Each page begins with a header in Thrift's compact protocol; field 4 is the checksum:

    1 type i32 | 2 uncompressed_page_size i32 | 3 compressed_page_size i32 | 4 crc i32, optional | 5 ... structs
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_plus.errors import DataError
from raytrain_plus.storage.place import Place, RemotePath, in_parallel

HEADER_BYTES = 64
"""Bytes that are read of a page's header: the four numbers take less than half of them."""
LOOKED_AT = 1000
"""Maximum files of a dataset that are opened to look for checksums."""
HOW = "pq.write_table(..., write_page_checksum=True)"
"""The call that writes a file with page checksums."""

_NEXT_I32 = 0x15
"""The first byte of an i32 field (type 5) whose number is one more than the previous field's; the value is a varint."""
_BEFORE = 3
"""The number of fields before the checksum; none of them is optional."""


def has_checksum(header: bytes) -> bool:
    """Return whether a page's header has a checksum, given its first bytes.

    Raises `ValueError` if the bytes are not a page header.

    >>> has_checksum(bytes.fromhex("150015401540 15d20f 1c")), has_checksum(bytes.fromhex("150015401540 2c"))
    (True, False)
    """
    try:
        at = 0
        for _ in range(_BEFORE):
            if header[at] != _NEXT_I32:
                raise ValueError("not a page header")
            at += 1
            while header[at] & 0x80:
                at += 1
            at += 1
        return header[at] == _NEXT_I32
    except IndexError:
        raise ValueError("not a page header: it ends too early") from None


def without_checksums(files: Sequence[Place]) -> tuple[Place, ...]:
    """Return the files whose first data page has no checksum. Files without rows have no pages and are left out.

    Raises `DataError` if a file cannot be read.
    """
    have = in_parallel(_first_page_has_one, files)
    return tuple(file for file, has in zip(files, have, strict=True) if not has)


def _first_page_has_one(file: Place) -> bool:
    try:
        if isinstance(file, RemotePath):
            return file.read(_has_one)
        with pa.OSFile(str(file)) as opened:
            return _has_one(opened)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(
            f"cannot read the header of the first page: {error}", where=str(file), remedy="write the file again"
        ) from error


def _has_one(opened: pa.NativeFile) -> bool:
    metadata = pq.read_metadata(opened)
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    first = next((group for group in groups if group.num_rows and group.num_columns), None)
    if first is None:
        return True
    return has_checksum(opened.read_at(HEADER_BYTES, first.column(0).data_page_offset))
