"""Hold where a run's journal writes: the events in its folder, those who hear of them, and the ledger."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from raytrain_plus.controller.record.event_feed import EventFeed
from raytrain_plus.controller.record.listeners import Evaluations, Listeners
from raytrain_plus.controller.record.ownership import Ownership
from raytrain_plus.credentials import hide_credentials
from raytrain_plus.data.ledger.ledger_files import LedgerFiles
from raytrain_plus.errors import RunError
from raytrain_plus.observe.gauges import Gauges
from raytrain_plus.observe.run_events import EventLog
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import Outages
from raytrain_plus.training.exchange.step_records import StepRecord

Newest = tuple[int, int]
"""The generation and number of a step."""
NONE: Newest = -1, -1
"""Stands for it while there is none."""

log = logging.getLogger(__name__)


class Outlets:
    """Opened with the run's folder. Events from before are kept, and go there then."""

    def __init__(
        self,
        run: Folder,
        clock: Callable[[], float],
        ownership: Ownership,
        outages: Outages,
        followed: EventFeed,
        gauges: Gauges,
    ) -> None:
        """Write nothing to the folder yet: events go only to `followed` and `gauges`."""
        self._run = run
        self._clock = clock
        self._ownership = ownership
        self._outages = outages
        self._followed = followed
        self._gauges = gauges
        self._early: list[dict[str, Any]] = []
        self._log: EventLog | None = None
        self._parts: LedgerFiles | None = None
        self._listeners: Listeners | None = None
        self._earlier_entry = NONE
        """The newest step in the ledger that another controller has entered."""

    def open(
        self,
        generation: int,
        started: dict[str, Any],
        controller: dict[str, Any],
        evaluated: Callable[[], Evaluations],
        listeners: Listeners | None,
        before_entries: Callable[[], None],
    ) -> None:
        """Begin to write to the folder: `run_started` and `controller_started` with these fields, then earlier events.

        `evaluated` and `listeners`: see `Journal.open`; `before_entries` is called before anything is entered
        into the ledger.
        """
        lines = EventLog(self._run, self._clock, self._outages)
        early = self._begin(lines, evaluated, listeners, before_entries)
        self.tell("run_started", generation, None, started)
        self.tell("controller_started", generation, None, controller)
        _write(lines, generation, early)
        # A controller that adopts the run's workers finds where this log begins.
        with contextlib.suppress(OSError):
            self.sync()

    def adopt(
        self,
        generation: int,
        behind: int,
        told: int,
        kept: tuple[Newest, Newest],
        evaluated: Callable[[], Evaluations],
        listeners: Listeners | None,
        before_entries: Callable[[], None],
    ) -> None:
        """Continue the log that begins `behind`, with so many events.

        `kept`: generation and number of the newest step in the events, and in the ledger. For the others see `open`.
        """
        lines = EventLog(self._run, self._clock, self._outages, behind=behind, newest=kept[0])
        early = self._begin(lines, evaluated, listeners, before_entries)
        self._followed.go_on(told)
        self._earlier_entry = kept[1]
        _write(lines, generation, early)

    def _begin(
        self,
        lines: EventLog,
        evaluated: Callable[[], Evaluations],
        listeners: Listeners | None,
        before_entries: Callable[[], None],
    ) -> list[dict[str, Any]]:
        """Open ledger and listeners beside the log; return the events that were told before."""
        self._log = lines
        self._followed.read_back(lines.read)
        self._parts = LedgerFiles(self._run, before_entries, self._outages)
        self._listeners = listeners
        if listeners is not None:
            listeners.begin(lines.behind, evaluated)
        early, self._early = self._early, []
        return early

    @property
    def kept(self) -> tuple[Newest, Newest]:
        """The generation and number of the newest step in the events, and in the ledger, that a kill does not lose."""
        if self._log is None or self._parts is None:
            return NONE, NONE
        return self._log.kept or NONE, self._parts.kept or self._earlier_entry

    @property
    def opened(self) -> bool:
        """Whether they are open."""
        return self._log is not None

    def place(self) -> Path | None:
        """Return where the file of the run's events is now, if that is known."""
        return None if self._log is None else self._log.place()

    def tell(self, kind: str, generation: int, time_s: float | None, fields: dict[str, Any]) -> None:
        """Write an event, and tell it to all who hear of the run; `time_s` in Unix seconds, None for now."""
        # Some fields hold messages of Ray and of the task, and followers see them as they are here.
        fields = hide_credentials(fields)
        if self._log is None or self._ownership.lost:
            event = {"time": self._clock(), "generation": generation, "kind": kind, **fields}
            self._early.append(dict(event))
        else:
            event = self._log.write(kind, generation=generation, time=time_s, fields=fields)
        self._gauges.add(event)
        self._followed.add(event)

    def news(self) -> Sequence[str]:
        """Return what the listeners have to say to the run's user since the last call."""
        return () if self._listeners is None else self._listeners.news()

    def enter(self, generation: int, record: StepRecord) -> None:
        """Enter a step into the ledger. Raises `FolderGone` or `RunError` as `LedgerFiles.add` does."""
        if self._parts is not None:
            self._parts.add(generation, record.step, record.notes, record.skipped_rows)

    def settle(self) -> None:
        """Make ledger and events durable. Raises `OSError` if that fails."""
        if self._parts is not None:
            self._parts.flush()
        self.sync()

    def sync(self) -> None:
        """Make the events durable. Raises `OSError` if that fails."""
        if self._log is not None:
            self._log.sync()

    def finish_listeners(self, status: str, waiting: Callable[[], None]) -> None:
        """Let the listeners hear of all events, and of the run's end; `waiting` is called repeatedly meanwhile."""
        if self._listeners is not None:
            self._listeners.finish(status, waiting)

    def abandon(self) -> None:
        """Write nothing more: another controller owns the run."""
        for opened in (self._listeners, self._parts, self._log):
            if opened is not None:
                opened.abandon()

    def close(self, failed: Callable[[str, OSError], None]) -> None:
        """Close what is open; `failed` gets what the storage does not take, which is lost."""
        for opened in (self._parts, self._log):
            try:
                if opened is not None:
                    opened.close()
            except OSError as error:
                failed(f"the end of {type(opened).__name__} cannot be written", error)
            except RunError as error:
                log.warning("the end of %s is not written: %s", type(opened).__name__, self._ownership.lost or error)
        # A run whose end could not be written has not finished them.
        self.finish_listeners("failed", lambda: None)
        for text in self.news():
            log.warning(text)


def _write(lines: EventLog, generation: int, early: list[dict[str, Any]]) -> None:
    """Write events that were told before there was a log."""
    for event in early:
        kind, moment, _ = (event.pop(name) for name in ("kind", "time", "generation"))
        lines.write(kind, generation=generation, time=moment, fields=event)
