"""A storage that does not take what is written: reported once for each cause, and once more when it works again.

    events, ledger, TensorBoard, lease, checkpoints    each writer reports its own failures and successes
    one cause                                          one file system (or object store) and one error number
    it works again                                     every writer that failed for this cause has written since

A full disk meets every writer of a run, on every machine, many times a minute; it is still one thing to say.
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
"""A cause is over when nothing failed for so many seconds: a disk that is nearly full takes a little now and then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outage:
    """One failure of a storage."""

    place: str
    """The file system, by its mount point; on an object store, the bucket."""
    code: int
    """The error number; 0 if the storage gives none."""
    reason: str
    """In the system's words."""
    wanted: int
    """Bytes that were to be written; 0 if nobody knows."""
    free: int | None
    """Bytes that are free there; None if the storage does not say."""

    def __str__(self) -> str:
        return outage_text(self.place, self.reason, self.wanted, self.free)


def outage_text(place: str, reason: str, wanted: int, free: int | None) -> str:
    """What is known of an outage, in one line.

    >>> outage_text("/mnt", "No space left on device", 2_000_000, 512)
    '/mnt: No space left on device (2.0 MB wanted, 512 bytes free)'
    """
    sizes = [f"{size_text(wanted)} wanted"] if wanted else []
    sizes += [] if free is None else [f"{size_text(free)} free"]
    return f"{place}: {reason} ({', '.join(sizes)})" if sizes else f"{place}: {reason}"


def outage_of(error: OSError, folder: Folder, wanted: int = 0) -> Outage:
    """What `error`, raised by a write into `folder`, says about the storage."""
    code = error.errno or 0
    path = folder.path
    if path is None:
        # The bucket: all writers of a run share it.
        bucket = re.match(r"[^:]+://[^/]*", folder.where)
        place = bucket[0] if bucket else folder.where
        return Outage(place=place, code=code, reason=str(error), wanted=wanted, free=None)
    mount = mount_of(path)
    reason = os.strerror(code) if code else str(error)
    free = None
    # Only these are about space; and whoever may not write is not helped by a number.
    if code in (errno.ENOSPC, errno.EDQUOT):
        with contextlib.suppress(OSError):
            found = os.statvfs(mount)
            # If it can hold no more files, free bytes explain nothing.
            if found.f_favail or not found.f_files:
                free = found.f_bavail * found.f_frsize
    return Outage(place=str(mount), code=code, reason=reason, wanted=wanted, free=free)


def mount_of(path: Path) -> Path:
    """Where the file system that holds `path` is mounted."""
    place = Path(os.path.realpath(path))
    while not os.path.ismount(place):
        place = place.parent
    return place


@dataclass
class _Open:
    outage: Outage
    since: float
    writers: set[str] = field(default_factory=set)
    """Those that have failed and not written since."""
    calm_since: float = 0.0


class Outages:
    """The causes that are open. Writers report from any thread; one reader takes the news."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[tuple[str, int], _Open] = {}
        self._untold: list[Outage] = []

    def failed(self, writer: str, outage: Outage) -> None:
        """A writer could not write."""
        with self._lock:
            key = outage.place, outage.code
            if key not in self._open:
                self._open[key] = _Open(outage, self._clock())
                self._untold.append(outage)
            self._open[key].writers.add(writer)

    def worked(self, writer: str) -> None:
        """A writer has written all that it had to write."""
        with self._lock:
            for cause in self._open.values():
                if writer in cause.writers:
                    cause.writers.remove(writer)
                    cause.calm_since = self._clock()

    def knows(self, outage: Outage) -> bool:
        """Whether the cause of an outage is open."""
        with self._lock:
            return (outage.place, outage.code) in self._open

    @contextlib.contextmanager
    def watching(self, writer: str, folder: Folder, wanted: Callable[[], int]) -> Iterator[None]:
        """Reports how the writing ends that is done in this context; its `OSError` goes on to the caller."""
        try:
            yield
        except OSError as error:
            self.failed(writer, outage_of(error, folder, wanted()))
            raise
        self.worked(writer)

    def news(self, last: bool = False) -> list[tuple[str, dict[str, Any]]]:
        """Kinds and fields of the events that are due since the last call; `last`: none come later."""
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
