"""The process that runs one tracker's library, which may be slow, unreachable or broken.

Metrics arrive on standard input as lines of JSON: {run, title, settings} first, then lists of metrics, at last
{end, dropped}. If the input ends without the last one, the controller is dead and the run has failed. The output is
lines of JSON: {run} once the tracker's run is known, and {warning} with a message.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

from raytrain_plus.credentials import without_credentials
from raytrain_plus.observe.trackers.event_metrics import MetricValue
from raytrain_plus.observe.trackers.trackers import END_S, LOAD_S, Tracker

PERIOD_S = 1.0
"""Seconds for which metrics are collected before they are delivered."""
AGAIN_S = 15.0
"""Seconds before a failed tracker is retried."""
MOST = 1000
"""Maximum metrics delivered together."""
KEPT = 100_000
"""Maximum metrics kept while they cannot be delivered; beyond that the oldest are dropped."""

Tell = Callable[[Mapping[str, str]], None]


class Queue:
    """Metrics between the thread that reads them and the one that delivers them."""

    def __init__(self, kept: int = KEPT) -> None:
        """Begin without metrics; of more than `kept` the oldest are dropped."""
        self._news = threading.Condition()
        self._metrics: deque[MetricValue] = deque(maxlen=kept)
        self._kept = kept
        self._taken: list[MetricValue] = []
        self.dropped = 0
        self.status = ""
        """The status with which the run has ended; empty while it runs."""

    def put(self, metrics: Sequence[MetricValue]) -> None:
        """Add metrics; never waits."""
        with self._news:
            self.dropped += max(0, len(self._metrics) + len(metrics) - self._kept)
            self._metrics.extend(metrics)

    def end(self, status: str) -> None:
        """Record that the run has ended with `status`; no more metrics will come."""
        with self._news:
            self.status = status
            self._news.notify_all()

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until the run has ended."""
        with self._news:
            self._news.wait_for(lambda: self.status, seconds)

    def first(self) -> list[MetricValue]:
        """Return the next metrics to deliver: the same ones until `done` is called."""
        with self._news:
            while self._metrics and len(self._taken) < MOST:
                self._taken.append(self._metrics.popleft())
            return self._taken

    def done(self) -> None:
        """Record that the metrics of `first` are delivered."""
        with self._news:
            self._taken = []

    @property
    def missing(self) -> int:
        """The number of metrics that were dropped or are not delivered yet."""
        with self._news:
            return self.dropped + len(self._taken) + len(self._metrics)


def deliver(queue: Queue, begin: Callable[[], tuple[str, Tracker]], tell: Tell) -> None:
    """Deliver metrics until the run has ended. A failure is reported once and retried while the run continues.

    `begin` begins or continues the tracker's run; it returns its id and the tracker.
    """
    tracker: Tracker | None = None
    warned = False
    pause_s = PERIOD_S
    while True:
        queue.pause(pause_s)
        status = queue.status
        try:
            if tracker is None:
                run, tracker = begin()
                tell({"run": run})
            while metrics := queue.first():
                tracker.add(metrics)
                queue.done()
            if status:
                tracker.end(status)
                return
            pause_s = PERIOD_S
        # A library may raise anything; the metrics are delivered at the next attempt.
        except Exception as error:
            if not warned:
                tell({"warning": f"it does not accept metrics; retrying: {in_short(error, os.environ)}"})
            warned = True
            pause_s = AGAIN_S
            if status:
                return


def in_short(error: Exception, environment: Mapping[str, str]) -> str:
    """Return the first line of an error without the secrets of this environment and without credentials."""
    text = next(iter(str(error).splitlines()), "")
    for name, value in environment.items():
        if value and re.search("KEY|TOKEN|PASSWORD|SECRET", name):
            text = text.replace(value, "***")
    return f"{type(error).__name__}: {without_credentials(text)[:200]}"


def read(lines: BinaryIO, queue: Queue) -> None:
    """Put the metrics of all input lines into the queue, until the input ends."""
    for line in lines:
        # A line may be incomplete if the controller was killed.
        with contextlib.suppress(ValueError):
            came = json.loads(line)
            if isinstance(came, dict):
                queue.dropped += came["dropped"]
                queue.end(came["end"])
            else:
                queue.put([MetricValue(*values) for values in came])
    if not queue.status:
        queue.end("failed")


def main(end_s: float = END_S) -> None:
    """Run the tracker whose name is the first argument; it has `end_s` seconds after the end of the run."""
    name = sys.argv[1]
    lines = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    # Keep the library's own input and output away from the protocol.
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.disable(logging.WARNING)

    def tell(what: Mapping[str, str]) -> None:
        with contextlib.suppress(BrokenPipeError):
            answers.write(json.dumps(what).encode() + b"\n")

    first: dict[str, Any] = json.loads(lines.readline())
    queue = Queue()
    loaded = threading.Event()

    def begin() -> tuple[str, Tracker]:
        try:
            module = importlib.import_module(f"raytrain_plus.observe.trackers.{name}")
        finally:
            loaded.set()
        begun: tuple[str, Tracker] = module.begin(first["run"], first["title"], first["settings"])
        return begun

    thread = threading.Thread(target=deliver, args=(queue, begin, tell), daemon=True)
    thread.start()
    read(lines, queue)
    # A short run may end before its library is loaded.
    loaded.wait(LOAD_S)
    thread.join(end_s)
    if queue.missing:
        tell({"warning": f"{queue.missing} metric values were not delivered; the run's events contain them"})
    elif thread.is_alive():
        tell({"warning": "it could not be notified in time that the run has ended"})
    # A normal exit would wait for threads that the library may have.
    os._exit(0)


if __name__ == "__main__":
    main()
