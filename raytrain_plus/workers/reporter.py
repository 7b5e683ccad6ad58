"""Tells the controller of applied steps in batches, from a thread of its own, so that no step waits for it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import ray

PERIOD_S = 0.1
"""Seconds between two batches."""
FLUSH_S = 30.0
"""Limit of a batch's delivery."""


class Reporter:
    """Collects what `tell` is given and passes it on with `send`, which starts a Ray call and returns its reference."""

    def __init__(self, send: Callable[[Sequence[Any]], Any]) -> None:
        self._send = send
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def tell(self, record: Any) -> None:
        """Hands over one record; never blocks."""
        self._queue.put(record)

    def __enter__(self) -> Reporter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Returns when the controller has what was sent; what was not is in `rest`."""
        self._ending.set()
        self._thread.join(FLUSH_S)

    def rest(self) -> list[Any]:
        """What has not been sent."""
        records: list[Any] = []
        while not self._queue.empty():
            records.append(self._queue.get_nowait())
        return records

    def _run(self) -> None:
        pending: Any = None
        while not self._ending.wait(PERIOD_S):
            records = self.rest()
            if records:
                # One batch at a time: the next waits until the controller has taken this one.
                if pending is not None:
                    ray.get(pending, timeout=FLUSH_S)
                pending = self._send(records)
        if pending is not None:
            ray.get(pending, timeout=FLUSH_S)
