"""Record a data file's `stat` when a node first sees it, and detect later changes."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Sight:
    """One `stat` of a file. Equal ones mean the same, unchanged file."""

    size: int
    """Bytes."""
    modified_ns: int
    """Modification time, in nanoseconds since 1970."""
    changed_ns: int
    """Time of the last change of content, owner, mode or links, in nanoseconds since 1970."""
    inode: int


def sight_of(file: Path) -> Sight:
    """Return a file's `stat`. Raises `OSError` if it cannot be read."""
    found = file.stat()
    return Sight(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def footer_of(file: Path) -> bytes:
    """Return the bytes of a Parquet file's footer; the file's last eight bytes hold its length."""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 8))
        length = int.from_bytes(stream.read(4), "little")
        stream.seek(max(0, size - 8 - length))
        return stream.read(length)


def change_of(file: Path, first: Sight, footer_sha256: str) -> str:
    """Describe what has changed in a file since `first`, when its footer had that hash; empty if nothing.

    Costs one `stat` if nothing has changed; otherwise the footer is read. A new inode or owner alone does not count as
    a change, because a copy that keeps the modification time is the same data. Raises `OSError` if the file cannot be
    accessed.
    """
    try:
        now = sight_of(file)
        if now == first:
            return ""
        if now.size != first.size:
            return f"its size changed: {first.size:,} -> {now.size:,} bytes"
        if hashlib.sha256(footer_of(file)).hexdigest() != footer_sha256:
            return f"its footer changed{_when(first, now)}"
    except (FileNotFoundError, NotADirectoryError):
        return "it was removed"
    return f"its modification time changed{_when(first, now)}" if now.modified_ns != first.modified_ns else ""


def _when(first: Sight, now: Sight) -> str:
    if first.modified_ns == now.modified_ns:
        return ""
    return f": {_utc(first.modified_ns)} -> {_utc(now.modified_ns)}"


def _utc(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S}.{rest // 1000:06d} UTC"
