"""Report to the controller: applied steps in batches, from a thread, so that no step waits for it; written shares."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import ray
from ray.exceptions import RayError

from raytrain_plus.errors import RunError
from raytrain_plus.workers.messages import Written

log = logging.getLogger(__name__)

PERIOD_S = 0.25
"""Seconds between two batches: each costs a step some time, here and where the controller lives."""
FLUSH_S = 30.0
"""Maximum seconds to deliver a batch."""
TELL_TRIES = 3
"""Number of attempts to report a written share to the controller."""


class Reporter:
    """Collects the records given to `tell` and sends them with `send`.

    `send` starts a Ray call and returns its reference.
    """

    def __init__(self, send: Callable[[Sequence[Any]], Any]) -> None:
        self._send = send
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._kept: list[Any] = []
        self._wake = threading.Event()
        self._ending = False
        self._error: Exception | None = None
        """What ended the thread, if anything did."""
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)

    def tell(self, record: Any) -> None:
        """Enqueue one record; never blocks. Raises `RunError` if records are not sent any more."""
        if self._error is not None:
            what = f"{type(self._error).__name__}: {self._error}"
            raise RunError(f"steps can no longer be reported: {what}; please report this") from self._error
        self._queue.put(record)

    def soon(self) -> None:
        """Send what is queued now: the controller waits for it."""
        self._wake.set()

    def __enter__(self) -> Reporter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Return when the controller has what was sent; unsent records are in `rest`."""
        self._ending = True
        self._wake.set()
        self._thread.join(FLUSH_S)

    def rest(self) -> list[Any]:
        """Return the records that were not sent, or not certainly. Call this when the thread has ended."""
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
                # Sent again with later records; duplicates change nothing in the controller.
                log.warning("a report did not reach the controller; trying again", exc_info=True)
            except Exception as error:
                # The training thread raises it at the next boundary.
                log.exception("a report cannot be sent")
                self._error = error
                return


def tell_written(controller: Any, written: Written) -> None:
    """Report to the controller what became of this worker's share of a checkpoint."""
    for _ in range(TELL_TRIES):
        with contextlib.suppress(RayError):
            ray.get(controller.written.remote(written), timeout=FLUSH_S)
            return
