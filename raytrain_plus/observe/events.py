"""The run's events: one JSON object a line, appended, each of a known kind with known fields."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time as time_of_day
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]
EVENTS = "events.ndjson"
"""The file's name in a run's folder."""

FIELDS: dict[str, tuple[str, ...]] = {
    "run_started": ("job", "versions", "address"),
    "view_formed": ("members", "spares", "collective"),
    "step_committed": ("step", "epoch", "samples", "loss", "seconds"),
    "worker_joined": ("worker", "pid", "node"),
    "worker_lost": ("worker", "pid", "node", "cause"),
    "recovered": ("cause", "stall_s", "steps_lost", "steps_recomputed", "kept", "replaced", "phases"),
    "waiting": ("for",),
    "drain_notice": ("node", "deadline"),
    "rescaled": ("from", "to"),
    "evaluated": ("step", "metrics"),
    "checkpoint_saved": ("step", "seconds", "stall_s"),
    "checkpoint_failed": ("step", "error"),
    "resumed": ("step", "checkpoint", "voided_to"),
    "run_finished": ("status", "error", "steps", "samples", "state_sha256"),
}
"""The fields of each kind, beside `time` (Unix seconds), `generation` and `kind`."""

_BLOCK = 65536
"""Bytes looked at together in the search for the last line end."""


class EventLog:
    """Appends events to a file, and hands each to the operating system as soon as it is written.

    What another process reads is then never behind what the driver was told. An event costs less than 10 us: batches of
    them would save nothing that a step could notice. What a full disk does not take is kept, and written later.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time_of_day.time) -> None:
        """Opens `path` for appending; a last line that was torn by a crash is cut off first."""
        cut_torn_line(path)
        self._clock = clock
        self._file = path.open("ab", buffering=0)
        self._owed = b""
        self._writing = threading.Lock()

    def write(self, kind: str, *, generation: int, time: float | None = None, fields: Event) -> Event:
        """Appends one event, stamped now unless `time` is given; the event, as handed in.

        Raises ValueError for an unknown kind and for other fields than the kind has: a fault of ours.
        """
        if kind not in FIELDS:
            raise ValueError(f"there is no event '{kind}'; the kinds are {tuple(FIELDS)}")
        if set(fields) != set(FIELDS[kind]):
            raise ValueError(f"the event '{kind}' has the fields {FIELDS[kind]}, not {tuple(fields)}")
        event = {"time": self._clock() if time is None else time, "generation": generation, "kind": kind, **fields}
        with self._writing:
            self._owed += json.dumps(_plain(event), allow_nan=False).encode() + b"\n"
            with contextlib.suppress(OSError):
                self._flush()
        return event

    def sync(self) -> None:
        """Makes all events durable. Raises `OSError` where the disk does not take them."""
        with self._writing:
            self._flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Makes the file durable and closes it. Raises `OSError` where the disk does not take what is left."""
        try:
            self.sync()
        finally:
            self._file.close()

    def _flush(self) -> None:
        while self._owed:
            self._owed = self._owed[self._file.write(self._owed) :]


def read_events(path: Path) -> Iterator[Event]:
    """The events in a file; a torn last line is passed over."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def cut_torn_line(path: Path) -> None:
    """Cuts what follows the last line end, if anything."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = at = file.seek(0, os.SEEK_END)
        # Backwards in blocks: the file of a long run is large, and a line is short.
        while at > 0:
            start = max(0, at - _BLOCK)
            file.seek(start)
            found = file.read(at - start).rfind(b"\n")
            if found >= 0:
                at = start + found + 1
                break
            at = start
        if at < end:
            file.truncate(at)


def _plain(value: Any) -> Any:
    """`value` with what JSON has no word for (NaN, infinities) as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value
