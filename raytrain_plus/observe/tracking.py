"""The process that one tracker's library lives in. Figures come on standard input; it may be away for a while, or slow.

Lines of JSON come: {run, title, settings} first, then lists of figures, at last {end, dropped}. Where the input ends
without, the controller is gone, and the run has failed. Lines of JSON go: {run} when the tracker's run is known, and
{warning} where something is wrong, in words.
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
from raytrain_plus.observe.metrics import Figure
from raytrain_plus.observe.trackers import END_S, LOAD_S, Tracker

PERIOD_S = 1.0
"""Seconds in which figures are gathered."""
AGAIN_S = 15.0
"""Seconds after which a tracker that failed is tried again."""
MOST = 1000
"""Figures handed over together."""
KEPT = 100_000
"""Figures kept while they cannot be handed over; then the oldest go."""

Tell = Callable[[Mapping[str, str]], None]


class Queue:
    """Figures between the thread that reads them and the one that hands them over."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._figures: deque[Figure] = deque(maxlen=KEPT)
        self._taken: list[Figure] = []
        self.dropped = 0
        self.status = ""
        """How the run has ended; empty while it goes on."""

    def put(self, figures: Sequence[Figure]) -> None:
        """Takes figures; never waits."""
        with self._news:
            self.dropped += max(0, len(self._figures) + len(figures) - KEPT)
            self._figures.extend(figures)

    def end(self, status: str) -> None:
        """Nothing comes after."""
        with self._news:
            self.status = status
            self._news.notify_all()

    def pause(self, seconds: float) -> None:
        """Waits, unless the run has ended."""
        with self._news:
            self._news.wait_for(lambda: self.status, seconds)

    def first(self) -> list[Figure]:
        """The next ones to hand over: the same until they are `done`."""
        with self._news:
            while self._figures and len(self._taken) < MOST:
                self._taken.append(self._figures.popleft())
            return self._taken

    def done(self) -> None:
        """The `first` are handed over."""
        with self._news:
            self._taken = []

    @property
    def missing(self) -> int:
        """How many were not handed over, or will not be where nothing more is."""
        with self._news:
            return self.dropped + len(self._taken) + len(self._figures)


def deliver(queue: Queue, begin: Callable[[], tuple[str, Tracker]], tell: Tell) -> None:
    """Hands figures over until the run has ended. A failure is told once; it is tried again while the run goes on.

    `begin`: the tracker's run, new or gone on with, and the tracker.
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
            while figures := queue.first():
                tracker.add(figures)
                queue.done()
            if status:
                tracker.end(status)
                return
            pause_s = PERIOD_S
        # Whatever a library raises, figures come again.
        except Exception as error:
            if not warned:
                tell({"warning": f"it takes no figures; trying again: {in_short(error, os.environ)}"})
            warned = True
            pause_s = AGAIN_S
            if status:
                return


def in_short(error: Exception, environment: Mapping[str, str]) -> str:
    """The first line of an error, without the secrets that this environment holds."""
    text = next(iter(str(error).splitlines()), "")
    for name, value in environment.items():
        if value and re.search("KEY|TOKEN|PASSWORD|SECRET", name):
            text = text.replace(value, "***")
    return f"{type(error).__name__}: {without_credentials(text)[:200]}"


def read(lines: BinaryIO, queue: Queue) -> None:
    """Takes what comes, to its end."""
    for line in lines:
        # The end of one may be missing, where the controller was killed.
        with contextlib.suppress(ValueError):
            came = json.loads(line)
            if isinstance(came, dict):
                queue.dropped += came["dropped"]
                queue.end(came["end"])
            else:
                queue.put([Figure(*values) for values in came])
    if not queue.status:
        queue.end("failed")


def main() -> None:
    """Runs the tracker of this name."""
    name = sys.argv[1]
    lines = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    # What a library reads or prints is not ours.
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
            module = importlib.import_module(f"raytrain_plus.observe.{name}")
        finally:
            loaded.set()
        begun: tuple[str, Tracker] = module.begin(first["run"], first["title"], first["settings"])
        return begun

    thread = threading.Thread(target=deliver, args=(queue, begin, tell), daemon=True)
    thread.start()
    read(lines, queue)
    # A short run may be over before its library is there.
    loaded.wait(LOAD_S)
    thread.join(END_S)
    if queue.missing:
        tell({"warning": f"{queue.missing} figures are missing there; the run's events have them all"})
    elif thread.is_alive():
        tell({"warning": "it was not told in time that the run has ended"})
    # A library may have threads of its own, which would wait.
    os._exit(0)


if __name__ == "__main__":
    main()
