"""Write and read a run's events: one JSON object per line, appended, each of a known kind with known fields.

on a file system    events.ndjson
elsewhere           events-00000001.ndjson, ...: parts (`storage.folders.growing`), separate ones for each controller
"""

from __future__ import annotations

import itertools
import os
import re
import time as time_of_day
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raytrain_plus.storage import json_shape as has
from raytrain_plus.storage.document import parse_object
from raytrain_plus.storage.folders.appended import Appended
from raytrain_plus.storage.folders.growing import Growing
from raytrain_plus.storage.folders.local import naming
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.json_text import json_text
from raytrain_plus.storage.outage import Outages

RunEvent = dict[str, Any]
EVENTS = "events.ndjson"
"""The file's name in a run's folder."""
WRITER = "events"
PERIOD_S = 2.0
"""Seconds between two writes of a part."""

FIELDS: dict[str, tuple[str, ...]] = {
    "run_started": ("job", "versions", "address"),
    "controller_started": ("pid", "node", "adopted"),
    "requested": ("what",),
    "view_formed": ("members", "spares", "collective", "moved_bytes"),
    "step_committed": ("step", "epoch", "samples", "loss", "grad_norm", "seconds"),
    "worker_joined": ("worker", "pid", "node"),
    "worker_lost": ("worker", "pid", "node", "cause"),
    "recovered": ("cause", "stall_s", "steps_lost", "steps_recomputed", "kept", "replaced", "phases"),
    "waiting": ("for",),
    "drain_notice": ("node", "deadline"),
    "rescaled": ("from", "to"),
    "experts": ("step", "layers"),
    "evaluated": ("step", "metrics"),
    "checkpoint_saved": ("step", "seconds", "stall_s"),
    "checkpoint_failed": ("step", "error"),
    "saving": ("step", "written", "total", "per_s"),
    "noted": ("text",),
    "resumed": ("step", "checkpoint", "voided_to"),
    "storage_failed": ("place", "error", "wanted", "free"),
    "storage_recovered": ("place", "error", "seconds"),
    "run_finished": ("status", "error", "steps", "samples", "state_sha256"),
}
"""The fields of each kind, besides `time` (Unix seconds), `generation` and `kind`.

`experts` follows the `step_committed` of some steps of a model with experts, soon after; with stages, each has an event
of its own. `layers`: `expert_use.ExpertUse.fields` by layer.
"""
_OPTIONAL = {
    "step_committed": frozenset({"skipped", "rows_skipped", "metrics", "lr", "gpus"}),
    "view_formed": frozenset({"cause", "repartitioned"}),
    "checkpoint_saved": frozenset({"checkpoint"}),
    "resumed": frozenset({"fresh_rates"}),
    "run_finished": frozenset({"saved_step", "unsaved"}),
    "requested": frozenset({"minimum", "maximum", "spares"}),
    "controller_started": frozenset({"claim"}),
}
"""Optional fields of a kind. The cause of a view is what broke the worlds before it, if anything did.

`rows_skipped`: the number of rows that were left out because they cannot be used. `lr`: the learning rate with which
the step was made; a list if the optimizer has several parameter groups. `gpus`: readings of the members' GPUs, as
`gpu_use.GpuUse`, in one step every half a minute or so. `fresh_rates`: the optimizer's settings are those that the task
makes, not those of the checkpoint. A request is to `stop` or to `rescale`, to these numbers of workers. `claim`: the
number of the controller's claim, in `claims/`.
"""
_LATER = {"step_committed": frozenset({"grad_norm"}), "view_formed": frozenset({"moved_bytes"})}
"""Fields that are missing in the events of older versions."""

_WHO = {"worker": has.text, "pid": has.whole(0), "node": has.text}
_SECONDS = has.number(0, 1e12)
_MEMBER = has.object_of(
    worker=has.text,
    replica=has.whole(0),
    stage=has.whole(0),
    params=has.whole(0),
    shards=has.list_of(has.whole(0)),
)
_RATES = has.list_of(has.number_or_nonfinite)
_GPU = has.object_of(
    utilisation=has.maybe(has.number(0)), memory_bytes=has.maybe(has.whole(0)), power_w=has.maybe(has.number(0))
)
_COUNTS = has.list_of(has.whole(0))
_EXPERTS = has.object_of(
    load=lambda value: _COUNTS(value) or ("" if any(value) else "has no choices"),
    max_vio=has.number(0),
    dropped=has.number(0, 1),
    entropy=has.number(0),
)
_SHAPES: dict[str, has.JsonShape] = {
    "time": _SECONDS,
    "generation": has.whole(-1),
    "kind": has.text,
    "job": has.text,
    "versions": has.table_of(has.text),
    "address": has.text,
    "members": has.list_of(lambda member: _MEMBER(_renamed(member))),
    "spares": lambda value: (has.list_of(has.text) if isinstance(value, list) else has.whole(0))(value),
    "adopted": has.list_of(has.text),
    "claim": has.whole(1),
    "what": has.text,
    "minimum": has.whole(0),
    "maximum": has.whole(0),
    "collective": has.text,
    "moved_bytes": has.whole(0),
    "repartitioned": has.truth,
    "step": has.whole(-1),
    "epoch": has.whole(0),
    "samples": has.whole(0),
    "loss": has.number_or_nonfinite,
    "grad_norm": has.number_or_nonfinite,
    "skipped": has.truth,
    "rows_skipped": has.whole(1),
    "fresh_rates": has.truth,
    "lr": lambda value: (_RATES if isinstance(value, list) else has.number_or_nonfinite)(value),
    "gpus": has.table_of(_GPU),
    "layers": has.table_of(_EXPERTS),
    "seconds": _SECONDS,
    **_WHO,
    "cause": has.text,
    "stall_s": _SECONDS,
    "steps_lost": has.whole(0),
    "steps_recomputed": has.whole(0),
    "kept": has.list_of(has.anything),
    "replaced": has.list_of(has.anything),
    "phases": has.table_of(has.number()),
    "for": has.text,
    "text": has.text,
    "deadline": has.maybe(has.number()),
    "from": has.whole(0),
    "to": has.whole(0),
    "metrics": has.table_of(has.number_or_nonfinite),
    "error": has.maybe(has.text),
    "place": has.text,
    "wanted": has.whole(0),
    "free": has.maybe(has.whole(0)),
    "checkpoint": has.maybe(has.text),
    "voided_to": has.whole(-1),
    "written": has.whole(0),
    "total": has.whole(0),
    "per_s": has.maybe(has.number(0)),
    "saved_step": has.maybe(has.whole(0)),
    "unsaved": has.maybe(has.text),
    "status": has.text,
    "steps": has.whole(0),
    "state_sha256": has.maybe(has.text),
}
"""The expected value of each field, in any kind. Readers check it: a disk or a person may have damaged a line."""
_REMEDY = "repair the line from a copy, or start over with --fresh, which keeps this run's folder"
_STEP = b'"kind": "step_committed"'
"""Occurs only in the lines of steps: inside a string, JSON escapes the quotes."""
_WHOLE = rb"(?:0|[1-9]\d{0,14})"
_POSITIVE = rb"(?:0|[1-9]\d{0,10})(?:\.\d+)?(?:e-\d+)?"
_NUMBER = rb'(?:-?(?:0|[1-9]\d{0,17})(?:\.\d+)?(?:e[-+]?\d+)?|"(?:nan|-?inf)")'
PLAIN_STEP = re.compile(
    rb'\{"time": (%(positive)b), "generation": (%(whole)b), "kind": "step_committed", "step": (%(whole)b), '
    rb'"epoch": %(whole)b, "samples": %(whole)b, "loss": %(number)b, "grad_norm": %(number)b, '
    rb'"seconds": (%(positive)b)(?:, "lr": (?:%(number)b|\[%(number)b(?:, %(number)b)*\]))?\}'
    % {b"whole": _WHOLE, b"positive": _POSITIVE, b"number": _NUMBER}
).fullmatch
"""Match the line of a step that has no optional field but learning rates: its time, generation, step and seconds.

It takes a sixth of the time of `event_of`, and matches only what that accepts: other lines are for that.
"""
_GLANCED = 2000
"""Steps after which a glance skips every other one; after twice as many it skips half of the rest, and so on."""
_BLOCK = 65536
"""Bytes read at a time in the search for the last line end."""


class EventLog:
    """Append events to a run's log. Events that the storage does not accept are kept and written later."""

    def __init__(
        self,
        run: Folder,
        clock: Callable[[], float] = time_of_day.time,
        outages: Outages | None = None,
        *,
        behind: int | None = None,
        newest: tuple[int, int] | None = None,
    ) -> None:
        """Open the log after the events of earlier controllers, and remove an incomplete last line left by a crash.

        `outages` records whether the storage accepts the events. A log that another controller has begun, and this one
        continues, begins where that was: `behind`. `newest`: the generation and number of its newest step.
        """
        self._clock = clock
        self._run = run
        # On a file system each line goes to the operating system as soon as it is written, so that other processes
        # read at least what the driver was told. An event costs less than 10 us: batching would save nothing
        # noticeable in a step.
        self._lines: Appended | Growing
        self._newest = self._earlier = newest
        outages = outages or Outages()
        path = run.path_of(EVENTS)
        if path is not None:
            cut_torn_line(path)
            end = path.stat().st_size if path.exists() else 0
            self._lines = Appended(run, path, WRITER, outages)
            self._lines.open()
        else:
            end = max(_parts(run), default=0)
            numbers = itertools.count(end + 1)
            self._lines = Growing(run, lambda: _part(next(numbers)), PERIOD_S, writer=WRITER, outages=outages)
        self._behind = end if behind is None else behind

    def write(self, kind: str, *, generation: int, time: float | None = None, fields: RunEvent) -> RunEvent:
        """Append one event and return it. Its time is now unless `time` (Unix seconds) is given.

        Raises `ValueError` for an unknown kind or wrong fields, which is a programming error.
        """
        if kind not in FIELDS:
            raise ValueError(f"unknown event kind '{kind}'; expected one of {tuple(FIELDS)}")
        if set(fields) - _OPTIONAL.get(kind, frozenset()) != set(FIELDS[kind]):
            raise ValueError(f"the event '{kind}' requires the fields {FIELDS[kind]}, got {tuple(fields)}")
        event = {"time": self._clock() if time is None else time, "generation": generation, "kind": kind, **fields}
        if kind == "step_committed":
            self._newest = generation, event["step"]
        self._lines.append(json_text(event).encode() + b"\n", self._newest)
        return event

    @property
    def kept(self) -> tuple[int, int] | None:
        """The generation and number of the newest step whose event outlives a kill of this process, if there is one."""
        return self._lines.kept or self._earlier

    def sync(self) -> None:
        """Make all events durable. Raises `OSError` if the storage does not accept them."""
        self._lines.sync()

    def close(self) -> None:
        """Make all events durable and close the log. Raises `OSError` if the storage does not accept the rest."""
        self._lines.close()

    def abandon(self) -> None:
        """Discard the events that are not written yet."""
        self._lines.abandon()

    def place(self) -> Path | None:
        """Return the file's current path, if known: it changes if the folder is moved."""
        return self._lines.place() if isinstance(self._lines, Appended) else None

    @property
    def behind(self) -> int:
        """What earlier controllers have written, as the first number of a `Tail.place`."""
        return self._behind

    def read(self) -> Iterator[RunEvent]:
        """Yield the events that this log has written, without those of earlier controllers."""
        return _events(self._run, self._behind)


def read_events(run: Folder) -> Iterator[RunEvent]:
    """Yield the events of the run in a folder; skip an incomplete last line.

    Raises `InputError` if another line is damaged.
    """
    return _events(run, 0)


def glance(run: Folder) -> Iterator[RunEvent]:
    """Yield a run's events as `read_events`, but only some thousands of its steps.

    The newest step before each other event is included. A million steps take about a second.
    """
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


LogLine = tuple[int, str, int, bytes]
"""The place where the line begins, as the first number of a `Tail.place`; its file, number and text."""


def log_lines(run: Folder) -> Iterator[LogLine]:
    """Yield the lines of a run's events with their places; skip an incomplete last line."""
    at, grows = 0, run.path_of(EVENTS) is not None
    for name, number, line in _lines(run, 0):
        yield at if grows else _number(name) - 1, name, number, line
        at += len(line) + 1


def event_of(run: Folder, line: LogLine) -> RunEvent:
    """Return the event of a line. Raises `InputError` if it is damaged."""
    return _event(run, *line[1:])


class Tail:
    """Read a run's events as they are written, each once."""

    def __init__(self, run: Folder, at: int = 0, events: int = 0) -> None:
        """Begin at a `place`; by default at the run's first event."""
        self._run = run
        self._at = at
        """The amount that has been read: bytes of the file, or whole parts."""
        self._of_part = events
        """The events that have been read of the next part."""

    @property
    def place(self) -> tuple[int, int]:
        """The place behind the last event that was read: bytes of the file, or whole parts; events of the next part."""
        return self._at, self._of_part

    def read(self) -> Iterator[RunEvent]:
        """Yield the events written since the last call, one by one: those of a long run may not fit into memory.

        Raises `OSError` if the storage fails, and `InputError` as `read_events`.
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

    def _read_parts(self) -> Iterator[RunEvent]:
        for name, number, line in _lines(self._run, self._at):
            # The newest part may still grow, and is read again.
            before = _number(name) - 1
            if before == self._at and number <= self._of_part:
                continue
            event = _event(self._run, name, number, line)
            self._at, self._of_part = before, number
            yield event


def event_lines(run: Folder) -> Iterator[str]:
    """Yield the lines of a run's events as text, without checking them."""
    return (line.decode(errors="replace") for _, _, line in _lines(run, 0))


def _events(run: Folder, behind: int) -> Iterator[RunEvent]:
    for line in _lines(run, behind):
        yield _event(run, *line)


def _event(run: Folder, name: str, number: int, line: bytes) -> RunEvent:
    file = f"{run.where}/{name}"
    event = parse_object(line, file, number, _REMEDY, _misfit)
    if event["kind"] == "view_formed":
        event["members"] = [_renamed(member) for member in event["members"]]
    return event


def _renamed(member: Any) -> Any:
    """Return a member of a view with the field `replica`, which older versions called `cell`."""
    if not isinstance(member, dict) or "cell" not in member:
        return member
    return {"replica" if name == "cell" else name: value for name, value in member.items()}


def _misfit(event: RunEvent) -> str:
    kind = str(event.get("kind"))
    missing = {"time", "generation", "kind", *FIELDS.get(kind, ())} - _LATER.get(kind, frozenset()) - event.keys()
    if missing:
        return f"the event has no field {min(missing)!r}"
    for name, value in event.items():
        if wrong := _SHAPES.get(name, has.anything)(value):
            return f"{name}: {wrong}"
    if event["kind"] == "view_formed" and not event["members"]:
        return "members: the list is empty"
    return ""


def _lines(run: Folder, behind: int) -> Iterator[tuple[str, int, bytes]]:
    """Yield (file name, line number, line) after the first `behind` bytes of the file, or parts."""
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
                    # Still being written: a later read may return only its rest, which is not a line.
                    return
                yield EVENTS, number, line[:-1]


def _part(number: int) -> str:
    return f"events-{number:08d}.ndjson"


def _number(part: str) -> int:
    """Return the number of a part."""
    return int(part.removeprefix("events-").removesuffix(".ndjson"))


def _parts(run: Folder) -> list[int]:
    """Return the numbers of the existing parts."""
    names = [name.removeprefix("events-").removesuffix(".ndjson") for name in run.files() if name.startswith("events-")]
    return [int(name) for name in names if name.isdecimal()]


def cut_torn_line(path: Path) -> None:
    """Truncate a file after its last line end."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = at = file.seek(0, os.SEEK_END)
        # Search backwards in blocks: the file of a long run is large, and a line is short.
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
