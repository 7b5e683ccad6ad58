"""Records that come one after another, kept where files cannot grow: in parts, each written whole again as it grows.

    append ... append      kept in memory
    every few seconds      the newest part is written, whole, by a thread of its own
    at 1 MB                the next part begins

A part is created where none of its name is: of two that write at the same time, none touches what is the other's.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from raytrain_plus.errors import FolderGone
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import Outages
from raytrain_plus.storage.periodic import Repeated

REST = 5.0
"""How many times as long as a writing took lies before the next one, at least."""
PART_BYTES = 1 << 20
"""A part ends with the record with which it has so many bytes."""


@dataclass(slots=True)
class _Part:
    data: bytearray
    name: str = ""
    first: bytes = b""
    """What it was created with, or would have been where that failed."""
    written: int = 0


class Growing:
    """What the storage does not take is kept, and written later."""

    def __init__(
        self,
        folder: Folder,
        name: Callable[[], str],
        period_s: float,
        head: bytes = b"",
        writer: str = "",
        outages: Outages | None = None,
    ) -> None:
        """`name` gives the name of the next part, another one each time; a part begins with `head`.

        Writes every `period_s` seconds; where writing takes long, `REST` times as long as it took. `outages` hears from
        `writer` whether the storage takes it.
        """
        self._writer = writer
        self._outages = outages or Outages()
        self._folder = folder
        self._name = name
        self._head = head
        self._entering = threading.Lock()
        self._parts: deque[_Part] = deque()
        self._writing = threading.Lock()
        self._repeated = Repeated(self._sync_or_later, period_s, REST, "growing")

    def append(self, record: bytes) -> None:
        """Enters a record; no part begins within it."""
        with self._entering:
            if not self._parts or len(self._parts[-1].data) >= PART_BYTES:
                self._parts.append(_Part(bytearray(self._head)))
            self._parts[-1].data += record
            self._repeated.start()

    def sync(self) -> None:
        """Returns when all that was entered is written. Raises `OSError` where it cannot be."""
        with self._writing, self._outages.watching(self._writer, self._folder, self._owed):
            while True:
                with self._entering:
                    if not self._parts:
                        return
                    part, last = self._parts[0], len(self._parts) == 1
                    data = bytes(part.data) if part.written < len(part.data) else b""
                if data:
                    self._write(part, data)
                if last:
                    return
                # Full, and followed by another: it does not grow any more.
                self._parts.popleft()

    def close(self) -> None:
        """Writes what is left. Raises `OSError` where that is not possible."""
        self._repeated.stop()
        self.sync()

    def abandon(self) -> None:
        """Forgets what is not written yet."""
        self._repeated.stop()
        with self._writing, self._entering:
            self._parts.clear()

    def _write(self, part: _Part, data: bytes) -> None:
        while not part.written:
            if not part.name:
                part.name, part.first = self._name(), data
            # Where an earlier try failed the part may be there all the same: with the bytes of that try it is ours.
            if self._folder.create(part.name, part.first):
                part.written = len(part.first)
            else:
                part.name = ""
        if part.written < len(data):
            self._folder.write(part.name, [data])
            part.written = len(data)

    def _owed(self) -> int:
        """Bytes that are not written yet."""
        with self._entering:
            return sum(len(part.data) - part.written for part in self._parts)

    def _sync_or_later(self) -> bool:
        try:
            # What fails is reported, and tried again.
            with contextlib.suppress(OSError):
                self.sync()
        except FolderGone:
            # So does whoever holds the run's folder find.
            return False
        return True
