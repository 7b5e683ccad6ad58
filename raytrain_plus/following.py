"""Follows a run from its folder alone: whoever sees the storage can, whatever became of the driver."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TextIO

from raytrain_plus.data.of_job import steps_of
from raytrain_plus.errors import RunError
from raytrain_plus.observe.events import Tail
from raytrain_plus.observe.progress import PLAIN_S, View
from raytrain_plus.observe.standing import Standing
from raytrain_plus.result import Result
from raytrain_plus.runfolder import DATASET, LEASE_S, job_of, lease_holder
from raytrain_plus.storage.document import read_object
from raytrain_plus.storage.folder import Folder, split

HERE_S = 0.25
"""Seconds between two looks into a folder on a file system."""
ELSEWHERE_S = 2.0
"""The same on an object store, where parts are written as often."""


def watch(
    run: Folder, view: View | None, heard: Callable[[], None] = lambda: None, timeout_s: float | None = None
) -> Result:
    """Tells `view` of all that has happened and happens, until the run has ended; its result.

    `heard` is called at each look. Raises `RunError` where the run's controller is gone without a word, and
    `TimeoutError` where the run goes on after `timeout_s`.
    """
    name = split(run.address)[1]
    if view is not None:
        view.start(name, _steps(run))
    tail = Tail(run)
    pause_s = HERE_S if run.path is not None else ELSEWHERE_S
    until = None if timeout_s is None else time.monotonic() + timeout_s
    silent_since: float | None = None
    try:
        while True:
            heard()
            # Before the events: none comes after it.
            result = Result.load(run)
            for event in tail.read():
                if view is not None:
                    view.event(event)
            if result is not None:
                break
            if lease_holder(run) is not None:
                silent_since = None
            elif silent_since is None:
                silent_since = time.monotonic()
            elif time.monotonic() - silent_since > LEASE_S:
                raise RunError(
                    f"{name} has ended without a word: its controller is gone; go on with: raytrain resume {run.where}"
                )
            if until is not None and time.monotonic() > until:
                raise TimeoutError(f"{name} goes on after {timeout_s:g} s")
            time.sleep(pause_s)
    finally:
        if view is not None:
            view.close()
    if view is not None:
        view.finish(result)
    return result


def tell(run: Folder, stream: TextIO, follow: bool) -> None:
    """Writes what has happened, a line each, with the time; and what happens, until the run has ended, if `follow`."""
    standing = Standing(total=_steps(run))
    shown = -math.inf
    tail, pause_s = Tail(run), HERE_S if run.path is not None else ELSEWHERE_S
    while True:
        going_on = lease_holder(run) is not None
        for event in tail.read():
            line = standing.add(event)
            if line is None and event["kind"] == "step_committed" and event["time"] - shown >= PLAIN_S:
                line, shown = standing.line(), event["time"]
            if line:
                moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
                print(f"{moment}  {line}", file=stream, flush=True)
        if not (follow and going_on):
            return
        time.sleep(pause_s)


def _steps(run: Folder) -> int:
    return steps_of(job_of(run), read_object(run, DATASET, "start the run over with --fresh")["rows"])
