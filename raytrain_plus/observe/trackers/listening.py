"""Run the listeners of one run, each on a thread of its own, in whatever process this is.

    controller      events -> the run's log, events.ndjson
                                 |
    listeners                    +-> TensorBoard's files in the run's folder
                                 +-> MLflow, Weights & Biases
                                 +-> on_step, on_evaluate, on_checkpoint of the task

Only `controller.record.listeners_actor` decides where they run: in the controller's process or in a Ray actor.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import NamedTuple

import yaml

from raytrain_plus.observe.trackers.bookmark import Bookmark
from raytrain_plus.observe.trackers.listened import CALLBACKS, TENSORBOARD, CalledTask, Listened
from raytrain_plus.observe.trackers.listener import Follower, Listener, RunEnd
from raytrain_plus.observe.trackers.tensorboard import TensorBoard
from raytrain_plus.observe.trackers.trackers import CLIENT_TIMEOUTS, Tracked
from raytrain_plus.storage.folders.claimed import Claimed
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.interface import Folder

Metrics = Mapping[int, Mapping[str, float]]
"""Metrics of evaluations, by step."""


class News(NamedTuple):
    """What the listeners have to say."""

    reports: Sequence[tuple[str, str]]
    """Causes, and sentences for the run's user: see `Report`."""
    left: Sequence[str]
    """The names of those that have not heard of the whole run yet."""


class Listening:
    """The listeners of a run, from a start of this process on."""

    def __init__(self, listened: Listened, behind: int, evaluated: Metrics, stop: Callable[[], None]) -> None:
        """Begin. `behind`: see `Bookmark`; `evaluated`: the metrics of the evaluations up to now.

        `stop` asks the run to stop, which only the task's callbacks do.
        """
        self._stop_run = stop
        self._run: Folder = Claimed(open_folder(listened.folder), listened.claim)
        self._behind = behind
        self._end = RunEnd()
        self._changed = threading.Condition()
        self._news: deque[tuple[str, str]] = deque()
        self._reported: set[str] = set()
        self._left: list[str] = []
        self._told: Sequence[str] = listened.names
        """Those that the last news named as left."""
        self._threads: list[threading.Thread] = []
        self._begin(TENSORBOARD, "tensorboard", lambda _: TensorBoard(self._run.inside("tensorboard"), evaluated))
        settings = yaml.safe_load(listened.job_yaml)
        for name in listened.trackers:
            self._begin(name, name, partial(Tracked, name, settings))
        if listened.task is not None:
            self._begin(CALLBACKS, "callbacks", partial(self._callbacks, listened.task))

    def _callbacks(self, called: CalledTask, bookmark: Bookmark) -> Listener:
        # It loads torch: more than a second, and 200 MB.
        from raytrain_plus.observe.trackers.callbacks import Callbacks

        return Callbacks(called, bookmark, self.report, self._stop_run)

    def _begin(self, name: str, file: str, make: Callable[[Bookmark], Listener]) -> None:
        bookmark = Bookmark(self._run, file, self._behind)
        follower = Follower(
            name,
            lambda: make(bookmark),
            self._run,
            bookmark,
            self._end,
            lambda cause, text: self.report(f"{name} {cause}", text),
        )
        self._left.append(name)
        thread = threading.Thread(target=self._follow, args=(follower,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _follow(self, follower: Follower) -> None:
        try:
            follower.follow()
        finally:
            with self._changed:
                self._left.remove(follower.name)
                self._changed.notify_all()

    def report(self, cause: str, text: str) -> None:
        """See `Report`."""
        with self._changed:
            if cause not in self._reported:
                self._reported.add(cause)
                self._news.append((cause, text))
                self._changed.notify_all()

    def news(self, timeout_s: float) -> News:
        """Return what is new since the last call; wait up to `timeout_s` for a report, or for a listener's end."""
        with self._changed:
            self._changed.wait_for(lambda: self._news or not self._left or len(self._left) < len(self._told), timeout_s)
            self._told = tuple(self._left)
            return News([self._news.popleft() for _ in range(len(self._news))], self._told)

    def end(self, status: str) -> None:
        """Have all listeners hear of the rest of the log, and of the run's end; returns at once."""
        self._end.ended(status)

    def stop(self, timeout_s: float) -> None:
        """Stop all listeners after what they hear now, and wait for each of them, but not too long."""
        self._end.stop()
        for thread in self._threads:
            thread.join(timeout_s)


def settle_process(listened: Listened, environment: MutableMapping[str, str]) -> None:
    """Give this process the listeners' `environment`, working directory and search path.

    The trackers' libraries take seconds to load, and change the environment of their process while Ray's threads read
    it: before glibc 2.41 that can crash. So neither the controller nor the driver loads them.
    """
    # WANDB_SERVICE refers to one of W&B's own processes, on the machine where the run was started.
    environment.pop("WANDB_SERVICE", None)
    theirs = {**{name: environment.get(name, value) for name, value in CLIENT_TIMEOUTS.items()}, **listened.environment}
    environment.update({name: value for name, value in theirs.items() if name != "WANDB_SERVICE"})
    sys.path[:0] = [root for root in listened.roots if root not in sys.path]
    with contextlib.suppress(OSError):
        os.chdir(listened.roots[0])
