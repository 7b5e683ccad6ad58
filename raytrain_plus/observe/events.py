"""The run's events: one JSON object a line, appended, each of a known kind with known fields."""

from __future__ import annotations

import json
import math
import os
import time as clock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]

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


class EventLog:
    """Appends events to a file, and hands each to the operating system as soon as it is written."""

    def __init__(self, path: Path) -> None:
        """Opens `path` for appending; a last line that was torn by a crash is cut off first."""
        cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, *, generation: int, time: float | None = None, fields: Event) -> Event:
        """Appends one event, stamped now unless `time` is given; the event as written."""
        if set(fields) != set(FIELDS[kind]):
            raise ValueError(f"the event '{kind}' has the fields {FIELDS[kind]}, not {tuple(fields)}")
        event = {"time": clock.time() if time is None else time, "generation": generation, "kind": kind, **fields}
        self._file.write(json.dumps(_plain(event), allow_nan=False) + "\n")
        self._file.flush()
        return event

    def close(self) -> None:
        """Makes the file durable and closes it."""
        os.fsync(self._file.fileno())
        self._file.close()


def read_events(path: Path) -> Iterator[Event]:
    """The events in a file; a torn last line is passed over."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def cut_torn_line(path: Path) -> None:
    """Cuts what follows the last line end, if anything."""
    if not path.exists() or not path.stat().st_size:
        return
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def _plain(value: Any) -> Any:
    """`value` with what JSON has no word for (NaN, infinities) as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value
