"""Serve a run's events to followers: the newest from memory, older ones from the folder."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

KEPT = 250
"""Minimum number of events kept in memory. Followers further back get them from the folder."""
READ_BACK = 10_000
"""Maximum number of events that one call reads from the folder."""

Event = dict[str, Any]


class EventFeed:
    """Filled by the controller's loop; followed from other threads."""

    def __init__(self, failed: Callable[[OSError], None]) -> None:
        """Begin without events; `failed` gets the storage's error if events cannot be read back, which is retried."""
        self._failed = failed
        self._read: Callable[[], Iterable[Event]] | None = None
        self._news = threading.Condition()
        self._told: list[bytes] = []
        """The newest events as JSON: their objects would take many times the memory."""
        self._dropped = 0

    def read_back(self, read: Callable[[], Iterable[Event]]) -> None:
        """Read events that are no longer in memory by this from now on: it returns all events from the first on."""
        self._read = read

    def go_on(self, earlier: int) -> None:
        """Number all events on from so many, which another controller has told; they are to be read back."""
        with self._news:
            self._dropped = earlier
            self._news.notify_all()

    def add(self, event: Event) -> None:
        """Add an event, and wake the followers."""
        with self._news:
            self._told.append(json.dumps(event).encode())
            if len(self._told) > 2 * KEPT:
                del self._told[:KEPT]
                self._dropped += KEPT
            self._news.notify_all()

    @property
    def in_memory(self) -> int:
        """How many events are kept in memory."""
        return len(self._told)

    def follow(self, cursor: int, timeout_s: float) -> list[Event]:
        """Return the events from number `cursor` on; wait up to `timeout_s` for the first of them."""
        with self._news:
            self._news.wait_for(lambda: self._dropped + len(self._told) > cursor, timeout_s)
            if cursor >= self._dropped or self._read is None:
                return [json.loads(event) for event in self._told[max(0, cursor - self._dropped) :]]
            until = min(self._dropped, cursor + READ_BACK)
        try:
            events = list(itertools.islice(self._read(), cursor, until))
        except OSError as error:
            self._failed(error)
            events = []
        if not events:
            # They are still to be written.
            time.sleep(timeout_s)
        return events
