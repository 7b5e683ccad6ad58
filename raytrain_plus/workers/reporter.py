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
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

from raytrain_plus.errors import RunError
from raytrain_plus.workers.messages import Written
from raytrain_plus.workers.unconfirmed import Unconfirmed

log = logging.getLogger(__name__)

PERIOD_S = 0.25
"""Seconds between two batches: each costs a step some time, here and where the controller lives."""
FLUSH_S = 30.0
"""Maximum seconds to deliver a batch."""
TELL_TRIES = 3
"""Number of attempts to report a written share to the controller."""


class Reporter:
    """Collects the records of one generation that are given to `tell`, and sends them with `send`.

    `send` starts a Ray call and returns its reference. The call answers with the highest step that is durable.
    """

    def __init__(self, send: Callable[[Sequence[Any]], Any], unconfirmed: Unconfirmed, number: int) -> None:
        """Prepare to send the records of the generation with that number in events; `unconfirmed` keeps them."""
        self._send = send
        self._unconfirmed = unconfirmed
        self._number = number
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._batch: list[Any] = []
        """What was sent, and is not known to have arrived."""
        self._call: Any = None
        """Ray's reference of the call that sends it; None if it must be sent again."""
        self._disturbed = False
        """Whether the log says that reports do not arrive."""
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
        self._keep()
        found = list(self._batch)
        while batch := self._unconfirmed.next(self._number):
            found += batch
        return found

    def _keep(self) -> None:
        """Keep what is queued until it is confirmed."""
        records: list[Any] = []
        while not self._queue.empty():
            records.append(self._queue.get_nowait())
        self._unconfirmed.add(self._number, records)

    def _run(self) -> None:
        while True:
            self._wake.wait(PERIOD_S)
            self._wake.clear()
            if self._ending:
                return
            try:
                self._keep()
                # One batch at a time: the next waits until the controller has taken this one.
                while self._batch or self._next():
                    if not self._arrived():
                        break
            except ActorDiedError:
                # Nobody takes reports any more; this process ends soon.
                return
            except Exception as error:
                # The training thread raises it at the next boundary.
                log.exception("a report cannot be sent")
                self._error = error
                return

    def _next(self) -> bool:
        self._batch = self._unconfirmed.next(self._number)
        return bool(self._batch)

    def _arrived(self) -> bool:
        """Send the batch, unless it is on its way; return whether the controller has it."""
        if self._call is None:
            self._call = self._send(self._batch)
        try:
            durable = ray.get(self._call, timeout=FLUSH_S)
        except ActorDiedError:
            raise
        except RayError as error:
            # A call that is late may still arrive. Another one is sent again; duplicates change nothing in the
            # controller.
            if not isinstance(error, GetTimeoutError):
                self._call = None
            if not self._disturbed:
                self._disturbed = True
                log.warning("a report did not reach the controller; trying until it does", exc_info=True)
            return False
        self._unconfirmed.confirm(durable)
        self._batch, self._call, self._disturbed = [], None, False
        return True


def tell_written(controller: Any, written: Written) -> None:
    """Report to the controller what became of this worker's share of a checkpoint."""
    for _ in range(TELL_TRIES):
        with contextlib.suppress(RayError):
            ray.get(controller.written.remote(written), timeout=FLUSH_S)
            return
