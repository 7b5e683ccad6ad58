"""Hold where a run's journal writes: the events in its folder, those who hear of them, and the ledger."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raytrain_plus.controller.record.event_feed import EventFeed
from raytrain_plus.controller.record.ownership import Ownership
from raytrain_plus.credentials import hide_credentials
from raytrain_plus.data.ledger.ledger_files import LedgerFiles
from raytrain_plus.errors import RunError
from raytrain_plus.observe.gauges import Gauges
from raytrain_plus.observe.run_events import EventLog
from raytrain_plus.observe.trackers.callbacks import Callbacks
from raytrain_plus.observe.trackers.trackers import Relay, Trackers
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import Outages
from raytrain_plus.training.exchange.step_records import StepRecord

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
        self._trackers: Trackers | None = None
        self._callbacks: Callbacks | None = None

    def open(
        self,
        generation: int,
        started: dict[str, Any],
        relays: Sequence[Relay],
        metrics: Callable[[int], Mapping[str, float]],
        callbacks: Callbacks | None,
        before_entries: Callable[[], None],
    ) -> None:
        """Begin to write to the folder: `run_started` with these fields, and the events from before.

        `relays` and `callbacks`: see `Journal.open`; `metrics` returns the evaluation metrics of a step;
        `before_entries` is called before anything is entered into the ledger.
        """
        run = self._run
        self._log = EventLog(run, self._clock, self._outages)
        self._followed.read_back(self._log.read)
        self._parts = LedgerFiles(run, before_entries, self._outages)
        self._trackers = Trackers(run, relays, self._outages, metrics)
        self._callbacks = callbacks
        if callbacks is not None:
            callbacks.begin(self._log.behind)
        early, self._early = self._early, []
        self.tell("run_started", generation, None, started)
        for event in early:
            kind, moment, _ = (event.pop(name) for name in ("kind", "time", "generation"))
            self._log.write(kind, generation=generation, time=moment, fields=event)

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
        if self._log is None or self._trackers is None or self._ownership.lost:
            event = {"time": self._clock(), "generation": generation, "kind": kind, **fields}
            self._early.append(dict(event))
        else:
            event = self._log.write(kind, generation=generation, time=time_s, fields=fields)
            self._trackers.add(event)
        self._gauges.add(event)
        self._followed.add(event)

    def news(self) -> Sequence[str]:
        """Return what the task's callbacks have to say to the run's user since the last call."""
        return () if self._callbacks is None else self._callbacks.news()

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

    def finish_callbacks(self, waiting: Callable[[], None]) -> None:
        """Let the task's callbacks hear of all events; `waiting` is called repeatedly meanwhile."""
        if self._callbacks is not None:
            self._callbacks.finish(waiting)

    def abandon(self) -> None:
        """Write nothing more: another controller owns the run."""
        for opened in (self._callbacks, self._trackers, self._parts, self._log):
            if opened is not None:
                opened.abandon()

    def close(self, failed: Callable[[str, OSError], None]) -> None:
        """Close what is open; `failed` gets what the storage does not take, which is lost."""
        for opened in (self._parts, self._log, self._callbacks, self._trackers):
            try:
                if opened is not None:
                    opened.close()
            except OSError as error:
                failed(f"the end of {type(opened).__name__} cannot be written", error)
            except RunError as error:
                log.warning("the end of %s is not written: %s", type(opened).__name__, self._ownership.lost or error)
