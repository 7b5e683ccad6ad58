"""The run's events: one JSON object a line, appended, each of a known kind with known fields.

on a file system    events.ndjson
elsewhere           events-00000001.ndjson, ...: parts (`storage.growing`), other ones for each controller
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time as time_of_day
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raytrain_plus.errors import InputError
from raytrain_plus.jsontext import json_text
from raytrain_plus.storage.document import parse_object
from raytrain_plus.storage.folder import Folder
from raytrain_plus.storage.growing import Growing
from raytrain_plus.storage.local import naming

Event = dict[str, Any]
EVENTS = "events.ndjson"
"""The file's name in a run's folder."""
PERIOD_S = 2.0
"""Seconds between two writings of a part."""

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

_REMEDY = "mend the line if you have a copy; or start over with --fresh, which keeps this run's folder"
_STEP = b'"kind": "step_committed"'
"""What the line of a step has, and no other: in a text, quotes are written otherwise."""
_GLANCED = 2000
"""Steps that a glance looks at before it passes over every other one, and again after twice as many."""
_BLOCK = 65536
"""Bytes looked at together in the search for the last line end."""


class EventLog:
    """Appends events to those that a run has. What the storage does not take is kept, and written later."""

    def __init__(self, run: Folder, clock: Callable[[], float] = time_of_day.time) -> None:
        """Behind what earlier controllers have told; a last line that was torn by a crash is cut off first."""
        self._clock = clock
        self._run = run
        self._lines: _File | Growing
        path = run.path_of(EVENTS)
        if path is not None:
            self._lines = _File(path)
            self._behind = self._lines.size
        else:
            self._behind = max(_parts(run), default=0)
            numbers = itertools.count(self._behind + 1)
            self._lines = Growing(run, lambda: _part(next(numbers)), PERIOD_S)

    def write(self, kind: str, *, generation: int, time: float | None = None, fields: Event) -> Event:
        """Appends one event, stamped now unless `time` is given; the event, as handed in.

        Raises ValueError for an unknown kind and for other fields than the kind has: a fault of ours.
        """
        if kind not in FIELDS:
            raise ValueError(f"there is no event '{kind}'; the kinds are {tuple(FIELDS)}")
        if set(fields) != set(FIELDS[kind]):
            raise ValueError(f"the event '{kind}' has the fields {FIELDS[kind]}, not {tuple(fields)}")
        event = {"time": self._clock() if time is None else time, "generation": generation, "kind": kind, **fields}
        self._lines.append(json_text(event).encode() + b"\n")
        return event

    def sync(self) -> None:
        """Makes all events durable. Raises `OSError` where the storage does not take them."""
        self._lines.sync()

    def close(self) -> None:
        """Makes all events durable, and closes. Raises `OSError` where the storage does not take what is left."""
        self._lines.close()

    def abandon(self) -> None:
        """Forgets what is not written yet."""
        self._lines.abandon()

    def read(self) -> Iterator[Event]:
        """The events of this log alone, as far as they are written."""
        return _events(self._run, self._behind)


class _File:
    """Hands each line to the operating system as soon as it is written.

    What another process reads is then never behind what the driver was told. An event costs less than 10 us: batches of
    them would save nothing that a step could notice.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        cut_torn_line(path)
        self._file = path.open("ab", buffering=0)
        self.size = self._file.seek(0, os.SEEK_END)
        # One that grows in place, and is cut in place: a disk may be full for hours.
        self._owed = bytearray()
        self._writing = threading.Lock()

    def append(self, line: bytes) -> None:
        """See `Growing`."""
        with self._writing:
            self._owed += line
            with contextlib.suppress(OSError):
                self._flush()

    def sync(self) -> None:
        """See `Growing`."""
        with naming(self._path):
            with self._writing:
                self._flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """See `Growing`."""
        try:
            self.sync()
        finally:
            self._file.close()

    def abandon(self) -> None:
        """See `Growing`."""
        with self._writing:
            self._owed.clear()

    def _flush(self) -> None:
        while self._owed:
            del self._owed[: self._file.write(self._owed)]


def read_events(run: Folder) -> Iterator[Event]:
    """The events of the run in a folder; a torn last line is passed over.

    Raises `InputError` where another line is damaged.
    """
    return _events(run, 0)


def glance(run: Folder) -> Iterator[Event]:
    """The same of a run whose steps need not all be looked at: of many, some thousands, and the newest before whatever
    else happened. A million steps take about a second."""
    every, seen = 1, 0
    newest: tuple[str, int, bytes] | None = None
    for line in _lines(run, 0):
        if _STEP in line[2]:
            newest = line
            seen += 1
            if seen % every:
                continue
            if seen == every * _GLANCED:
                every *= 2
        if newest is not None:
            yield _event(run, *newest)
        if newest is not line:
            yield _event(run, *line)
        newest = None
    if newest is not None:
        yield _event(run, *newest)


class Tail:
    """Reads a run's events as they are written, each once."""

    def __init__(self, run: Folder) -> None:
        self._run = run
        self._at = 0
        """How much has been read: bytes of the file, or whole parts."""
        self._of_part = 0
        """And events of the part that follows."""

    def read(self) -> Iterator[Event]:
        """What has been written since the last call, one after the other: a long run's events fit into no memory.

        Raises `OSError` where the storage fails, and as `read_events`.
        """
        path = self._run.path_of(EVENTS)
        if path is None:
            yield from self._read_parts()
            return
        if path.exists() and path.stat().st_size < self._at:
            # Another run has begun in the folder.
            self._at = 0
        for name, number, line in _lines(self._run, self._at):
            event = _event(self._run, name, number, line)
            self._at += len(line) + 1
            yield event

    def _read_parts(self) -> Iterator[Event]:
        for name, number, line in _lines(self._run, self._at):
            # The newest part may still grow, and is read again.
            before = int(name.removeprefix("events-").removesuffix(".ndjson")) - 1
            if before == self._at and number <= self._of_part:
                continue
            event = _event(self._run, name, number, line)
            self._at, self._of_part = before, number
            yield event


def event_lines(run: Folder) -> Iterator[str]:
    """The same as they are written, whatever is in them."""
    return (line.decode(errors="replace") for _, _, line in _lines(run, 0))


def _events(run: Folder, behind: int) -> Iterator[Event]:
    for line in _lines(run, behind):
        yield _event(run, *line)


def _event(run: Folder, name: str, number: int, line: bytes) -> Event:
    file = f"{run.where}/{name}"
    event = parse_object(line, file, number, _REMEDY)
    missing = {"time", "generation", "kind", *FIELDS.get(str(event.get("kind")), ())} - event.keys()
    if missing or not all(isinstance(event.get(field, 0), int) for field in ("generation", "step")):
        what = f"the event has no {min(missing)!r}" if missing else "a number is none"
        raise InputError(f"the file is damaged: {what}", where=f"{file}, line {number}", remedy=_REMEDY)
    return event


def _lines(run: Folder, behind: int) -> Iterator[tuple[str, int, bytes]]:
    """The lines behind so many bytes of the file, or parts: the file's name, their number from there, themselves."""
    path = run.path_of(EVENTS)
    if path is None:
        for part in sorted(_parts(run)):
            if part > behind:
                for number, line in enumerate(run.read(_part(part)).removesuffix(b"\n").split(b"\n"), 1):
                    yield _part(part), number, line
    elif path.exists():
        with naming(path), path.open("rb") as file:
            file.seek(behind)
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    # Its rest may be there when it is asked for, and is no line.
                    return
                yield EVENTS, number, line[:-1]


def _part(number: int) -> str:
    return f"events-{number:08d}.ndjson"


def _parts(run: Folder) -> list[int]:
    """Numbers of the parts that there are."""
    names = [name.removeprefix("events-").removesuffix(".ndjson") for name in run.files() if name.startswith("events-")]
    return [int(name) for name in names if name.isdecimal()]


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
