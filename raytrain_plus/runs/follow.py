"""Follow a run from its folder alone: from any machine that sees the storage, with or without its driver."""

from __future__ import annotations

import math
import time
from typing import TextIO

from raytrain_plus.data.of_job import steps_of
from raytrain_plus.errors import InputError, RunError
from raytrain_plus.observe.run_events import RunEvent, Tail, glance
from raytrain_plus.observe.run_progress import RunProgress, plural
from raytrain_plus.observe.views.page import Page
from raytrain_plus.observe.views.progress import PLAIN_S, ProgressView
from raytrain_plus.result import Result
from raytrain_plus.runs.folder import DATASET, LEASE_S, holder_lives, job_of, lease_document, lost_holder
from raytrain_plus.runs.status import what_is_kept
from raytrain_plus.storage import json_shape as has
from raytrain_plus.storage.address import split
from raytrain_plus.storage.document import read_object
from raytrain_plus.storage.interface import Folder

HERE_S = 0.25
"""Seconds between two reads of a folder on a file system."""
ELSEWHERE_S = 2.0
"""Seconds between two reads on an object store, where parts are written as often."""
_DATASET = has.object_of(rows=has.whole(1, 2**48))


def watch(run: Folder, view: ProgressView | None, timeout_s: float | None = None) -> Result:
    """Show all past and new events in `view` until the run ends; return its result.

    Raises `RunError` if the run's controller is gone and left no result, and
    `TimeoutError` if the run is still running after `timeout_s`.
    """
    name = split(run.address)[1]
    if view is not None:
        view.start(name, _steps(run))
    tail, liveness = Tail(run), _Liveness(run)
    until = None if timeout_s is None else time.monotonic() + timeout_s
    try:
        while True:
            # Read before the events: the result is written after the last event.
            result = Result.load(run)
            if view is not None:
                for event in tail.read():
                    view.event(event)
            if result is not None:
                break
            if not liveness.alive() and Result.load(run) is None:
                raise RunError(f"{name}: {liveness.end}; {_waiting(run)}{what_is_kept(run)}")
            if until is not None and time.monotonic() > until:
                raise TimeoutError(f"{name} is still running after {timeout_s:g} s")
            time.sleep(HERE_S if run.path is not None else ELSEWHERE_S)
    finally:
        if view is not None:
            view.close()
    if view is not None:
        view.finish(result)
    return result


def seen(run: Folder) -> Page:
    """Return a notebook's page of the run as it is now, or as it ended; of many steps only some are read."""
    page = Page(split(run.address)[1], _steps(run))
    # Read before the events, as in `watch`.
    result = Result.load(run)
    for event in glance(run):
        page.add(event)
    if result is not None:
        page.finish(result)
    return page


def print_events(run: Folder, stream: TextIO, follow: bool) -> None:
    """Write the past events to `stream`, a line each, with the time; if `follow`, continue until the run ends."""
    progress = RunProgress(total=_steps(run))
    tail, liveness = Tail(run), _Liveness(run)
    shown, unwritten = -math.inf, None

    def say(event: RunEvent, line: str) -> None:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
        print(f"{moment}  {line}", file=stream, flush=True)

    while True:
        continues = Result.load(run) is None and liveness.alive()
        for event in tail.read():
            line = progress.add(event)
            if event["kind"] == "step_committed":
                unwritten = event
                if event["time"] - shown >= PLAIN_S:
                    line, shown, unwritten = progress.line(), event["time"], None
            if event["kind"] == "run_finished" and unwritten is not None:
                say(unwritten, progress.line())
                unwritten = None
            if line:
                say(event, line)
            if event["kind"] == "run_finished":
                ended = f"{event['status']}: {plural(event['steps'], 'step')}"
                say(event, "\n".join(filter(None, [ended, event["error"]])))
        if not (follow and continues):
            if unwritten is not None:
                say(unwritten, progress.line())
            return
        time.sleep(HERE_S if run.path is not None else ELSEWHERE_S)


def _steps(run: Folder) -> int:
    """Return the number of steps of the whole run; 0 if its folder does not tell."""
    job = job_of(run)
    try:
        return steps_of(job, read_object(run, DATASET, "", _DATASET)["rows"])
    except (OSError, InputError):
        return job.steps or 0


def _waiting(run: Folder) -> str:
    """Return for how long the workers of a run may still wait for another controller, in words."""
    lost = lost_holder(run)
    left_s = 0.0 if lost is None else job_of(run).elastic.wait_s - lost.unresponsive_s
    return (
        f"its workers may wait {left_s:.0f} s more for another one, and then save their state; " if left_s > 0 else ""
    )


class _Liveness:
    """Detect whether a run's controller is alive: its lease changes then. Only this machine's clock is used.

    If the holder is a process of this machine, its existence decides: on a full disk it cannot renew its lease.
    """

    def __init__(self, run: Folder) -> None:
        self._run = run
        self._seen: bytes | None = None
        self._since = time.monotonic()

    def alive(self) -> bool:
        now = lease_document(self._run)
        if now != self._seen:
            self._seen, self._since = now, time.monotonic()
        lives = holder_lives(now)
        return time.monotonic() - self._since <= LEASE_S if lives is None else lives

    @property
    def end(self) -> str:
        """Why the controller counts as gone, in words."""
        if holder_lives(lease_document(self._run)) is False:
            return "the controller died"
        return f"the controller has not renewed its lease for {LEASE_S:.0f} s"
