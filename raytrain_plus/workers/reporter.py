"""Tells the controller of applied steps in batches, from a thread of its own, so that no step waits for it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError

log = logging.getLogger(__name__)

PERIOD_S = 0.25
"""Seconds between two batches: each costs a step of its time, here and where the controller lives."""
FLUSH_S = 30.0
"""Limit of a batch's delivery."""


class Reporter:
    """Collects what `tell` is given and passes it on with `send`, which starts a Ray call and returns its reference."""

    def __init__(self, send: Callable[[Sequence[Any]], Any]) -> None:
        self._send = send
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._kept: list[Any] = []
        self._wake = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def tell(self, record: Any) -> None:
        """Hands over one record; never blocks."""
        self._queue.put(record)

    def soon(self) -> None:
        """What there is goes now: the controller waits for it."""
        self._wake.set()

    def __enter__(self) -> Reporter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Returns when the controller has what was sent; what was not is in `rest`."""
        self._ending = True
        self._wake.set()
        self._thread.join(FLUSH_S)

    def rest(self) -> list[Any]:
        """What has not been sent, or not surely. To be asked for when the thread has ended."""
        return [*self._kept, *self._waiting()]

    def _waiting(self) -> list[Any]:
        records: list[Any] = []
        while not self._queue.empty():
            records.append(self._queue.get_nowait())
        return records

    def _run(self) -> None:
        while True:
            self._wake.wait(PERIOD_S)
            self._wake.clear()
            if self._ending:
                return
            self._kept += self._waiting()
            if not self._kept:
                continue
            try:
                # One batch at a time: the next waits until the controller has taken this one.
                ray.get(self._send(self._kept), timeout=FLUSH_S)
                self._kept = []
            except RayError:
                # Sent again with what comes; that the controller has some of it twice changes nothing.
                log.warning("a report did not reach the controller; trying again", exc_info=True)
