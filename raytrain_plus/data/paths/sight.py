"""Record a data file's `stat`, or what a store says about it, when a node first sees it, and detect later changes."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from datetime import datetime, timezone

import pyarrow as pa

from raytrain_plus.storage.place import Place, RemotePath

END_BYTES = 64 << 10
"""Bytes at the end of a remote file that are read first: most footers are smaller."""


@dataclass(frozen=True, slots=True)
class Sight:
    """One `stat` of a file, or what a store says about a remote one. Equal ones mean the same, unchanged file."""

    size: int
    """Bytes."""
    modified_ns: int
    """Modification time, in nanoseconds since 1970."""
    changed_ns: int
    """Time of the last change of content, owner, mode or links, in nanoseconds since 1970; 0 for a remote file."""
    inode: int
    """0 for a remote file."""
    version: str = ""
    """A remote file's ETag, which another content changes; empty if its store has none."""


def sight_of(file: Place) -> Sight:
    """Return a file's `stat`, or what a store says about a remote one. Raises `OSError` if it cannot be read."""
    if isinstance(file, RemotePath):
        return file.read(lambda opened: _sight_of_opened(file, opened))
    found = file.stat()
    return Sight(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def _sight_of_opened(file: RemotePath, opened: pa.NativeFile) -> Sight:
    """Return the sight of a remote file. An object store has said what it knows when the file was opened."""
    said = {key.lower(): bytes(value).decode(errors="replace") for key, value in (opened.metadata() or {}).items()}
    try:
        modified = datetime.strptime(said["last-modified"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
        modified_ns = int(modified.timestamp()) * 10**9
    except (KeyError, ValueError):
        entry = file.look()
        modified_ns = 0 if entry is None else entry.modified_ns
    return Sight(opened.size(), modified_ns, changed_ns=0, inode=0, version=said.get("etag", "").strip('"'))


def remote_end(file: RemotePath) -> tuple[Sight, bytes]:
    """Return the sight of a remote Parquet file and its end, from the begin of its footer, in two or three requests.

    Raises `OSError` if it cannot be read.
    """

    def look(opened: pa.NativeFile) -> tuple[Sight, bytes]:
        sight = _sight_of_opened(file, opened)
        guess = min(sight.size, END_BYTES)
        end = opened.read_at(guess, sight.size - guess)
        needed = min(sight.size, int.from_bytes(end[-8:-4], "little") + 8)
        if needed > len(end):
            end = opened.read_at(needed, sight.size - needed)
        return sight, end[len(end) - needed :]

    return file.read(look)


def footer_of(file: Place) -> bytes:
    """Return the bytes of a Parquet file's footer; the file's last eight bytes hold its length."""
    if isinstance(file, RemotePath):
        return remote_end(file)[1][:-8]
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 8))
        length = int.from_bytes(stream.read(4), "little")
        stream.seek(max(0, size - 8 - length))
        return stream.read(length)


def change_of(file: Place, first: Sight, footer_sha256: str | None) -> str:
    """Describe what has changed in a file since `first`, when its footer had that hash; empty if nothing.

    `footer_sha256`: None for a file without a footer.

    Costs one `stat` if nothing has changed; otherwise the footer is read. A new inode or owner alone does not count as
    a change, because a copy that keeps the modification time is the same data; nor does a new modification time of a
    remote file with the same ETag. Raises `OSError` if the file cannot be accessed.
    """
    try:
        now = sight_of(file)
        if now == first:
            return ""
        if now.size != first.size:
            return f"its size changed: {first.size:,} -> {now.size:,} bytes"
        if now.version and now.version == first.version:
            return ""
        if footer_sha256 is not None and hashlib.sha256(footer_of(file)).hexdigest() != footer_sha256:
            return f"its footer changed{_when(first, now)}"
    except (FileNotFoundError, NotADirectoryError):
        return "it was removed"
    if now.version != first.version:
        return f"its ETag changed{_when(first, now)}"
    return f"its modification time changed{_when(first, now)}" if now.modified_ns != first.modified_ns else ""


def _when(first: Sight, now: Sight) -> str:
    if first.modified_ns == now.modified_ns:
        return ""
    return f": {_utc(first.modified_ns)} -> {_utc(now.modified_ns)}"


def _utc(nanoseconds: int) -> str:
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S}.{rest // 1000:06d} UTC"
