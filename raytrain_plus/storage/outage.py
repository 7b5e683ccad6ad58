"""Report storage failures: once for each cause, and once more when the storage works again.

    events, ledger, lease, checkpoints    each writer reports its own failures and successes
    one cause                             one file system (or object store) and one error number
    works again                           every writer that failed for this cause has written since

A full disk makes every writer of a run fail, on every machine, many times a minute; it is reported once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.size_text import size_text

SETTLE_S = 5.0
"""Seconds without a failure after which a cause is over: a nearly full disk accepts a little now and then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outage:
    """One failure of a storage."""

    place: str
    """Mount point of the file system, or bucket of the object store."""
    code: int
    """Error number; 0 if the storage gives none."""
    reason: str
    """The system's error text."""
    wanted: int
    """Bytes that were to be written; 0 if unknown."""
    free: int | None
    """Free bytes of the storage; None if unknown."""

    def __str__(self) -> str:
        return outage_text(self.place, self.reason, self.wanted, self.free)


def outage_text(place: str, reason: str, wanted: int, free: int | None) -> str:
    """Return an outage as one line of text.

    >>> outage_text("/mnt", "No space left on device", 2_000_000, 512)
    '/mnt: No space left on device (2.0 MB wanted, 512 bytes free)'
    """
    sizes = [f"{size_text(wanted)} wanted"] if wanted else []
    sizes += [] if free is None else [f"{size_text(free)} free"]
    return f"{place}: {reason} ({', '.join(sizes)})" if sizes else f"{place}: {reason}"


def outage_of(error: OSError, folder: Folder, wanted: int = 0) -> Outage:
    """Return the outage described by `error`, which a write into `folder` raised."""
    code = error.errno or 0
    path = folder.path
    if path is None:
        # All writers of a run share the bucket.
        bucket = re.match(r"[^:]+://[^/]*", folder.where)
        place = bucket[0] if bucket else folder.where
        return Outage(place=place, code=code, reason=str(error), wanted=wanted, free=None)
    mount = mount_of(path)
    reason = os.strerror(code) if code else str(error)
    free = None
    # Only these errors are about space; for others the number of free bytes explains nothing.
    if code in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError):
            found = os.statvfs(mount)
            # If the file system can hold no more files, free bytes explain nothing.
            if found.f_favail or not found.f_files:
                free = found.f_bavail * found.f_frsize
    return Outage(place=str(mount), code=code, reason=reason, wanted=wanted, free=free)


def mount_of(path: Path) -> Path:
    """Return the mount point of the file system that holds `path`."""
    place = Path(os.path.realpath(path))
    while not os.path.ismount(place):
        place = place.parent
    return place


@dataclass
class _OpenOutage:
    outage: Outage
    since: float
    writers: set[str] = field(default_factory=set)
    """Writers that have failed and not written since."""
    calm_since: float = 0.0


class Outages:
    """The open causes. Writers report from any thread; one reader calls `news`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], _OpenOutage] = {}
        self._untold: list[Outage] = []

    def failed(self, writer: str, outage: Outage) -> None:
        """Record that a writer could not write."""
        with self._lock:
            key = outage.place, outage.code
            if key not in self._open:
                self._open[key] = _OpenOutage(outage, self._clock())
                self._untold.append(outage)
            self._open[key].writers.add(writer)

    def worked(self, writer: str) -> None:
        """Record that a writer has written all its data."""
        with self._lock:
            for cause in self._open.values():
                if writer in cause.writers:
                    cause.writers.remove(writer)
                    cause.calm_since = self._clock()

    def knows(self, outage: Outage) -> bool:
        """Return whether the cause of an outage is open."""
        with self._lock:
            return (outage.place, outage.code) in self._open

    @contextlib.contextmanager
    def watching(self, writer: str, folder: Folder, wanted: Callable[[], int]) -> Iterator[None]:
        """Record whether the writing inside this context succeeds; its `OSError` is raised to the caller."""
        try:
            yield
        except OSError as error:
            self.failed(writer, outage_of(error, folder, wanted()))
            raise
        self.worked(writer)

    def news(self, last: bool = False) -> list[tuple[str, dict[str, Any]]]:
        """Return (kind, fields) of the events since the last call; `last`: this is the final call."""
        with self._lock:
            told: list[tuple[str, dict[str, Any]]] = [
                (
                    "storage_failed",
                    {"place": one.place, "error": one.reason, "wanted": one.wanted, "free": one.free},
                )
                for one in self._untold
            ]
            self._untold.clear()
            now = self._clock()
            for key, cause in list(self._open.items()):
                if not cause.writers and (last or now - cause.calm_since >= SETTLE_S):
                    del self._open[key]
                    seconds, was = cause.calm_since - cause.since, cause.outage
                    fields = {"place": was.place, "error": was.reason, "seconds": seconds}
                    told.append(("storage_recovered", fields))
            return told
