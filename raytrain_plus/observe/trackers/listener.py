"""Follow a run's log for one listener: TensorBoard, a tracker, or the task's callbacks.

The log is the queue: a slow or absent listener delays no step and loses nothing while the run lasts. The events that
the controller serves to other followers would not do: an earlier controller's are not among them, and their numbers
begin again with each controller, so that they make no bookmark.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Protocol

from raytrain_plus.credentials import without_credentials
from raytrain_plus.errors import FolderGone, InputError
from raytrain_plus.observe.run_events import RunEvent, Tail
from raytrain_plus.observe.trackers.bookmark import Bookmark
from raytrain_plus.storage.interface import Folder

REMOTE_S = 2.0
"""Minimum seconds between two looks at a log in remote storage, where each look costs requests."""
AGAIN_S = 15.0
"""Seconds before a failed listener is retried."""
STORE_S = 2.0
"""Seconds between two writes of a bookmark: what the next process may repeat."""

Report = Callable[[str, str], None]
"""Called with a cause and a sentence for the run's user; a cause is reported once."""


class StorageAway(Exception):
    """The run's own storage does not take what a listener writes: the controller, which writes there, reports it."""


class Listener(Protocol):
    """Something that hears of a run's events, on a thread of its own."""

    period_s: float
    """Seconds between two looks at the log."""
    most: int
    """Maximum events that it hears of together."""

    def hear(self, events: Sequence[RunEvent]) -> None:
        """Hear of the next events; called again with them if it fails."""

    def end(self, status: str) -> None:
        """Hear that the run has `finished`, `stopped` or `failed`, after all of its events."""


class RunEnd:
    """Tells all followers of a run that its log is complete, or that they must stop."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.status = ""
        """The status with which the run has ended; empty while it runs."""
        self.stopped = False

    def ended(self, status: str) -> None:
        """Record that the log is complete."""
        with self._changed:
            self.status = status
            self._changed.notify_all()

    def stop(self) -> None:
        """Stop all followers after the events that their listeners hear now: the controller is dead."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait for `seconds`, or for either of them."""
        with self._changed:
            self._changed.wait_for(lambda: self.status or self.stopped, seconds)


class Follower:
    """Reads a run's log from a bookmark on, and has one listener hear of it."""

    def __init__(
        self,
        name: str,
        make: Callable[[], Listener],
        run: Folder,
        bookmark: Bookmark,
        end: RunEnd,
        report: Report,
    ) -> None:
        """Prepare the listener that reports call `name`.

        `make` returns it, and is called again if it fails; it raises `InputError` if that cannot help.
        """
        self.name = name
        self._make, self._run, self._bookmark, self._end = make, run, bookmark, end
        self._report = report
        self._tail: Tail | None = None
        self._listener: Listener | None = None
        self._batch: list[RunEvent] = []
        """What the listener has not heard yet of what was read."""
        self._stored_s = 0.0

    def follow(self) -> None:
        """Return when the listener has heard of the whole run, or never will."""
        while not self._end.stopped:
            # Asked before the log is read: all of it is there then.
            status = self._end.status
            try:
                pause_s = self._catch_up(status)
            except InputError as error:
                self._report("given up", f"{self.name}: no event of this run is delivered: {error}")
                break
            # A library may raise anything.
            except Exception as error:
                if not isinstance(error, StorageAway):
                    text = f"{self.name} does not accept events; retrying: {in_short(error, os.environ)}"
                    self._report("retried", text)
                if status:
                    self._report("lost", f"{self.name} lacks the end of the run, which the run's events contain")
                pause_s = AGAIN_S
            if status:
                break
            self._end.wait(pause_s)
        self._store()

    def _catch_up(self, status: str) -> float:
        """Have the listener hear of all that is in the log by now; return the seconds until the next look at it."""
        tail = self._tail = self._tail or self._opened()
        listener = self._listener = self._listener or self._make()
        if self._batch:
            self._hear(listener, tail)
        for self._batch in _batches(tail.read(), listener.most):
            if self._end.stopped:
                return 0.0
            self._hear(listener, tail)
        if status:
            listener.end(status)
        return max(listener.period_s, REMOTE_S if self._run.path is None else 0.0)

    def _hear(self, listener: Listener, tail: Tail) -> None:
        listener.hear(self._batch)
        self._batch = []
        self._bookmark.place = tail.place
        if time.monotonic() - self._stored_s > STORE_S:
            self._store()

    def _opened(self) -> Tail:
        try:
            self._bookmark.load()
        except InputError as error:
            self._report("bookmark", f"{self.name}: new events only, because {error}")
        self._store()
        return Tail(self._run, *self._bookmark.place)

    def _store(self) -> None:
        self._stored_s = time.monotonic()
        # The controller writes there, too, and reports it.
        with contextlib.suppress(OSError, FolderGone):
            self._bookmark.store()


def _batches(events: Iterator[RunEvent], most: int) -> Iterator[list[RunEvent]]:
    while batch := list(islice(events, most)):
        yield batch


def in_short(error: Exception, environment: Mapping[str, str]) -> str:
    """Return the first line of an error without the secrets of this environment and without credentials."""
    text = next(iter(str(error).splitlines()), "")
    for name, value in environment.items():
        if value and re.search("KEY|TOKEN|PASSWORD|SECRET", name):
            text = text.replace(value, "***")
    return f"{type(error).__name__}: {without_credentials(text)[:200]}"
