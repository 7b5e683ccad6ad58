"""Append to a file on a file system. Data that the disk does not accept is kept and written later.

The file stays open while it grows, so that it follows its folder if that is moved.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from io import FileIO
from pathlib import Path

from raytrain_plus.storage.folders.local import naming
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import Outages

Tag = tuple[int, int] | None
"""What a caller calls the data that it has appended so far, or nothing."""
AGAIN_S = 0.2
"""Seconds after a failure until `append` writes again, so that a full disk does not slow down every step."""


class Appended:
    """A file that grows at its end: the counterpart of `Growing` for folders with a path."""

    def __init__(self, folder: Folder, path: Path, writer: str, outages: Outages) -> None:
        """Create the appender of the file `path` inside `folder`; the file is opened at the first write.

        Each write reports its outcome to `outages` as `writer`.
        """
        self._folder = folder
        self._path = path
        self._writer = writer
        self._outages = outages
        self._file: FileIO | None = None
        self._owed = bytearray()
        self._tag: Tag = None
        self.kept: Tag = None
        """The newest tag up to which the operating system has all data: no kill of this process loses it."""
        self._writing = threading.Lock()
        self._again = 0.0

    def open(self) -> None:
        """Open the file if it is not open. Raises `OSError` if that fails."""
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)

    def append(self, data: bytes, tag: Tag = None) -> None:
        """Append `data` and hand it to the operating system; data that is refused is written with later data.

        `tag`: see `kept`.
        """
        with self._writing:
            self._owed += data
            self._tag = tag
        if time.monotonic() >= self._again:
            with contextlib.suppress(OSError):
                self._again = time.monotonic() + AGAIN_S
                self.flush()
                self._again = 0.0

    def flush(self) -> None:
        """Hand all data to the operating system. Raises `OSError` if the disk refuses it; the rest is kept."""
        with self._writing:
            if self._owed:
                with naming(self._path), self._outages.watching(self._writer, self._folder, lambda: len(self._owed)):
                    self._write()
                self.kept = self._tag

    def sync(self) -> None:
        """Make all data durable. Raises `OSError` if the disk refuses it."""
        self.flush()
        if self._file is not None:
            with naming(self._path), self._outages.watching(self._writer, self._folder, lambda: 0):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Make all data durable and close the file. Raises `OSError` if the disk refuses it."""
        try:
            self.sync()
        finally:
            with self._writing:
                self._owed.clear()
                if self._file is not None:
                    self._file.close()
                    self._file = None

    def abandon(self) -> None:
        """Discard the data that is not written yet."""
        with self._writing:
            self._owed.clear()

    def place(self) -> Path | None:
        """Return the current path of the file; None if it was removed or the system does not tell."""
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
