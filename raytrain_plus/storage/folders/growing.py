"""Store a stream of records on storage whose files cannot grow: in parts, each rewritten whole as it grows.

    append ... append      records are kept in memory
    every few seconds      a background thread writes the newest part, whole
    at 1 MB                the next part begins

A part is only created under an unused name: two concurrent writers never touch each other's parts.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from raytrain_plus.errors import FolderGone
from raytrain_plus.storage.folders.appended import Tag
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import Outages
from raytrain_plus.storage.periodic import PeriodicCall

REST = 5.0
"""Minimum pause between two writes, as a multiple of the duration of the first."""
PART_BYTES = 1 << 20
"""A part ends with the record that brings it to at least this many bytes."""


@dataclass(slots=True)
class _StoredPart:
    data: bytearray
    name: str = ""
    first: bytes = b""
    """The bytes that it was created with, or that a failed attempt tried to create it with."""
    written: int = 0


class Growing:
    """A stream of records in parts. Data that the storage does not accept is kept and written later."""

    def __init__(
        self,
        folder: Folder,
        name: Callable[[], str],
        period_s: float,
        writer: str = "",
        outages: Outages | None = None,
    ) -> None:
        """Create a stream; `name` returns a new part name at each call.

        Writes every `period_s` seconds, and pauses at least `REST` times the duration of the last write. Each write
        reports its outcome to `outages` as `writer`.
        """
        self._writer = writer
        self._outages = outages or Outages()
        self._folder = folder
        self._name = name
        self._entering = threading.Lock()
        self._parts: deque[_StoredPart] = deque()
        self._tag: Tag = None
        self.kept: Tag = None
        """The newest tag up to which all records are written: no kill of this process loses them."""
        self._writing = threading.Lock()
        self._periodic = PeriodicCall(self._sync_or_later, period_s, REST, "growing")

    def append(self, record: bytes, tag: Tag = None) -> None:
        """Add a record; records are never split between parts. `tag`: see `kept`."""
        with self._entering:
            if not self._parts or len(self._parts[-1].data) >= PART_BYTES:
                self._parts.append(_StoredPart(bytearray()))
            self._parts[-1].data += record
            self._tag = tag
            self._periodic.start()

    def sync(self) -> None:
        """Return when all records are written. Raises `OSError` if that fails."""
        with self._writing, self._outages.watching(self._writer, self._folder, self._owed):
            while True:
                with self._entering:
                    if not self._parts:
                        return
                    part, last = self._parts[0], len(self._parts) == 1
                    data = bytes(part.data) if part.written < len(part.data) else b""
                    tag = self._tag
                if data:
                    self._write(part, data)
                if last:
                    self.kept = tag
                    return
                # Another part follows, so this one is full and complete.
                self._parts.popleft()

    def close(self) -> None:
        """Write the remaining records and stop. Raises `OSError` if that fails."""
        self._periodic.stop()
        self.sync()

    def abandon(self) -> None:
        """Discard the records that are not written yet."""
        try:
            self._periodic.stop()
        except TimeoutError:
            # Who discards them need not wait for the one that is being written.
            return
        with self._writing, self._entering:
            self._parts.clear()

    def _write(self, part: _StoredPart, data: bytes) -> None:
        while not part.written:
            if not part.name:
                part.name, part.first = self._name(), data
            # A failed attempt may have created the part all the same: with the bytes of that attempt it is ours.
            if self._folder.create(part.name, part.first):
                part.written = len(part.first)
            else:
                part.name = ""
        if part.written < len(data):
            self._folder.write(part.name, [data])
            part.written = len(data)

    def _owed(self) -> int:
        """Return the number of bytes that are not written yet."""
        with self._entering:
            return sum(len(part.data) - part.written for part in self._parts)

    def _sync_or_later(self) -> bool:
        try:
            # Failures are reported to `outages` and retried.
            with contextlib.suppress(OSError):
                self.sync()
        except FolderGone:
            # The holder of the run's folder notices this itself.
            return False
        return True
