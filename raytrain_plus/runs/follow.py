"""Follows a run from its folder alone: whoever sees the storage can, whatever became of the driver."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TextIO

from raytrain_plus.data.of_job import steps_of
from raytrain_plus.errors import InputError, RunError
from raytrain_plus.observe.events import Event, Tail, glance
from raytrain_plus.observe.page import Page
from raytrain_plus.observe.progress import PLAIN_S, View
from raytrain_plus.observe.run_progress import Standing, plural
from raytrain_plus.result import Result
from raytrain_plus.runs.folder import DATASET, LEASE_S, holder_lives, job_of, lease_document
from raytrain_plus.runs.status import what_is_kept
from raytrain_plus.storage import json_shape as has
from raytrain_plus.storage.address import split
from raytrain_plus.storage.document import read_object
from raytrain_plus.storage.interface import Folder

HERE_S = 0.25
"""Seconds between two looks into a folder on a file system."""
ELSEWHERE_S = 2.0
"""The same on an object store, where parts are written as often."""
_DATASET = has.object_of(rows=has.whole(1, 2**48))


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
    tail, pulse = Tail(run), _Pulse(run)
    until = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        while True:
            heard()
            # Before the events: none comes after it.
            result = Result.load(run)
            if view is not None:
                for event in tail.read():
                    view.event(event)
            if result is not None:
                break
            if not pulse.felt() and Result.load(run) is None:
                raise RunError(f"{name}: {pulse.end}; {what_is_kept(run)}")
            if until is not None and time.monotonic() > until:
                raise TimeoutError(f"{name} goes on after {timeout_s:g} s")
            time.sleep(HERE_S if run.path is not None else ELSEWHERE_S)
    finally:
        if view is not None:
            view.close()
    if view is not None:
        view.finish(result)
    return result


def seen(run: Folder) -> Page:
    """What a notebook shows of the run as it is now, or as it ended; of many steps some are looked at."""
    page = Page(split(run.address)[1], _steps(run))
    # Before the events, as ever.
    result = Result.load(run)
    for event in glance(run):
        page.add(event)
    if result is not None:
        page.finish(result)
    return page


def tell(run: Folder, stream: TextIO, follow: bool) -> None:
    """Writes what has happened, a line each, with the time; and what happens, until the run has ended, if `follow`."""
    standing = Standing(total=_steps(run))
    tail, pulse = Tail(run), _Pulse(run)
    shown, untold = -math.inf, None

    def say(event: Event, line: str) -> None:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
        print(f"{moment}  {line}", file=stream, flush=True)

    while True:
        going_on = Result.load(run) is None and pulse.felt()
        for event in tail.read():
            line = standing.add(event)
            if event["kind"] == "step_committed":
                untold = event
                if event["time"] - shown >= PLAIN_S:
                    line, shown, untold = standing.line(), event["time"], None
            if event["kind"] == "run_finished" and untold is not None:
                say(untold, standing.line())
                untold = None
            if line:
                say(event, line)
            if event["kind"] == "run_finished":
                ended = f"{event['status']}: {plural(event['steps'], 'step')}"
                say(event, "\n".join(filter(None, [ended, event["error"]])))
        if not (follow and going_on):
            if untold is not None:
                say(untold, standing.line())
            return
        time.sleep(HERE_S if run.path is not None else ELSEWHERE_S)


def _steps(run: Folder) -> int:
    """Of the whole run; 0 where its folder does not say it."""
    job = job_of(run)
    try:
        return steps_of(job, read_object(run, DATASET, "", _DATASET)["rows"])
    except (OSError, InputError):
        return job.steps or 0


class _Pulse:
    """Whether somebody goes on with a run: by the lease, which changes then, and by no clock but our own.

    If the holder is a process of this machine, its life decides: on a full disk it cannot renew its lease.
    """

    def __init__(self, run: Folder) -> None:
        self._run = run
        self._seen: bytes | None = None
        self._since = time.monotonic()

    def felt(self) -> bool:
        now = lease_document(self._run)
        if now != self._seen:
            self._seen, self._since = now, time.monotonic()
        alive = holder_lives(now)
        return time.monotonic() - self._since <= LEASE_S if alive is None else alive

    @property
    def end(self) -> str:
        """What is known of the controller that is not felt any more."""
        if holder_lives(lease_document(self._run)) is False:
            return "the controller died"
        return f"the controller has not renewed its lease for {LEASE_S:.0f} s"
