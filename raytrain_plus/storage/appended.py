"""A file on a file system that grows at its end. What the disk does not take is kept, and written later.

The file stays open while it grows, so that it follows its folder wherever that is moved.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path

from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.local import naming
from raytrain_plus.storage.outage import Outages

AGAIN_S = 0.2
"""Seconds after a failure until `append` writes again: a full disk must not cost each step a fraction of itself."""


class Appended:
    """The counterpart of `Growing`, for folders with a path."""

    def __init__(
        self, folder: Folder, path: Path, writer: str, outages: Outages, before: Callable[[], None] = lambda: None
    ) -> None:
        """`path` lies in `folder`; `before` is called before it is opened, at the first write. `outages` hears how each
        write ends, from `writer`."""
        self._folder = folder
        self._path = path
        self._writer = writer
        self._outages = outages
        self._before = before
        self._file: FileIO | None = None
        self._owed = bytearray()
        self._writing = threading.Lock()
        self._again = 0.0

    def open(self) -> None:
        """Opens the file, unless it is open. Raises `OSError` if that is not possible."""
        if self._file is None:
            self._before()
            self._file = self._path.open("ab", buffering=0)

    def append(self, data: bytes) -> None:
        """Takes what comes next, and hands it to the operating system. What that refuses goes with what comes later."""
        self.keep(data)
        if time.monotonic() >= self._again:
            with contextlib.suppress(OSError):
                self._again = time.monotonic() + AGAIN_S
                self.flush()
                self._again = 0.0

    def keep(self, data: bytes) -> None:
        """Takes what comes next, for the next `flush`."""
        with self._writing:
            self._owed += data

    def flush(self) -> None:
        """Hands everything to the operating system. Raises `OSError` if the disk does not take it; the rest is kept."""
        with self._writing:
            if self._owed:
                with naming(self._path), self._outages.watching(self._writer, self._folder, lambda: len(self._owed)):
                    self._write()

    def sync(self) -> None:
        """Makes everything durable. Raises `OSError` if the disk does not take it."""
        self.flush()
        if self._file is not None:
            with naming(self._path), self._outages.watching(self._writer, self._folder, lambda: 0):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Makes everything durable, and closes the file. Raises `OSError` if the disk does not take it."""
        try:
            self.sync()
        finally:
            with self._writing:
                self._owed.clear()
                if self._file is not None:
                    self._file.close()
                    self._file = None

    def abandon(self) -> None:
        """Forgets what is not written yet."""
        with self._writing:
            self._owed.clear()

    def place(self) -> Path | None:
        """Where the file lies now; None if it was removed, or if this system does not say."""
        if self._file is None or not os.fstat(self._file.fileno()).st_nlink:
            return None
        with contextlib.suppress(OSError):
            return Path(os.readlink(f"/proc/self/fd/{self._file.fileno()}"))
        return None

    def _write(self) -> None:
        self.open()
        assert self._file is not None
        while self._owed:
            del self._owed[: self._file.write(self._owed)]
