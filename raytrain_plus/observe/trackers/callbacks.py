"""Call the methods of a task that hear of its run: `on_step`, `on_evaluate`, `on_checkpoint`.

    controller   events -> the run's log, events.ndjson
                              |
    `calling`, a process      +-> reads it, calls the task; answers with its place in the log
                                                              |
    controller   Callbacks: keeps that place, begins the process again there   <-+

The log is the queue: a slow method delays no step and loses no call. The place is stored in the run's folder, so that
the next controller of the run continues there. A run whose task defines none of these methods has no such process.
"""

from __future__ import annotations

import base64
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle

from raytrain_plus.errors import FolderGone, InputError
from raytrain_plus.observe.trackers.side_process import SideProcess, environment_with
from raytrain_plus.observe.trackers.trackers import FOLDER
from raytrain_plus.storage import json_shape as has
from raytrain_plus.storage.document import read_object
from raytrain_plus.storage.interface import Folder
from raytrain_plus.task import RunFacts, Task

log = logging.getLogger(__name__)

MODULE = "raytrain_plus.observe.trackers.calling"
FILE = f"{FOLDER}/callbacks.json"
CALLS = ("on_step", "on_evaluate", "on_checkpoint")
STORE_S = 2.0
"""Seconds between two writes of the place in the log: what a dead controller's calls may be repeated by."""
END_S = 30.0
"""Maximum seconds for the remaining calls when the run ends."""
AGAIN_S = 1.0
"""Seconds before a process that has died is started again; doubled as long as no call is made in between."""
MOST_AGAIN_S = 60.0
_PLACE = has.object_of(at=has.whole(0), events=has.whole(0))

Place = tuple[int, int]
"""A place in a run's log: see `run_events.Tail`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalledTask:
    """The task whose methods are called, and the run that they hear of."""

    task: str
    """`module:Class`."""
    pickled_task: bytes | None
    """The class by value, if it cannot be imported."""
    roots: tuple[str, ...]
    """Folders from which the task is imported; the process runs in the first one."""
    args: Mapping[str, Any]
    facts: RunFacts
    folder: str
    """The run's folder, as `open_folder` takes it."""
    checkpoints: str
    """The folder of its checkpoints, in the same form."""


def defined_callbacks(task: type[Task]) -> tuple[str, ...]:
    """Return the names of the methods that this class defines and that hear of a run."""
    return tuple(name for name in CALLS if getattr(task, name) is not getattr(Task, name))


class Callbacks:
    """The process that calls a task's methods. Only `finish` waits for it, for a limited time."""

    def __init__(self, called: CalledTask, run: Folder) -> None:
        """Prepare the process; the place in the log is kept in the run's folder `run`."""
        self._first = {"called": base64.b64encode(cloudpickle.dumps(called)).decode()}
        self._called = called
        self._run = run
        self._place: Place = 0, 0
        self._stored: Place | None = None
        self._stored_s = 0.0
        self._news: deque[str] = deque()
        self._reported: set[str] = set()
        self._process: SideProcess | None = None
        self._keeper = threading.Thread(target=self._keep, name="callbacks", daemon=True)
        # Guards the process and the flags: the keeper replaces a dead process, others end it.
        self._changing = threading.Condition()
        self._ending = self._over = self._abandoned = False

    def begin(self, behind: int) -> None:
        """Start the process. It calls what follows the place at which the last one was.

        `behind`: where the log of this controller begins; a run that kept no place is called from there on.
        """
        # A log that a machine lost the end of is shorter than the place.
        self._place = min(self._kept() or (behind, 0), (behind, 0))
        self._keeper.start()

    def news(self) -> list[str]:
        """Return what is to be reported since the last call, as sentences."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def finish(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait for the calls of all that is in the log, but not too long: the run ends.

        `meanwhile` is called about every second.
        """
        deadline = time.monotonic() + END_S
        with self._changing:
            self._ending = True
            self._changing.notify()
            if self._process is not None:
                self._process.say({"end": True})
        while self._keeper.is_alive() and time.monotonic() < deadline:
            self._keeper.join(min(1.0, END_S))
            meanwhile()
        if self._keeper.is_alive():
            self._report("late", f"the task's callbacks did not end within {END_S:.0f} s; some may not be called")
        self.close()

    def close(self) -> None:
        """End the process at once, and store how far it was."""
        with self._changing:
            self._over = True
            self._changing.notify()
            if self._process is not None:
                self._process.kill()
        if self._keeper.ident is not None:
            self._keeper.join(END_S)

    def abandon(self) -> None:
        """End the process at once: the run belongs to another controller."""
        self._abandoned = True
        self.close()

    def _keep(self) -> None:
        """Start the process, and again when it has died; until it has ended by itself."""
        self._store()
        pause_s = AGAIN_S
        while not self._over:
            before = self._place
            try:
                code = self._once()
                failing = f"the process of the task's callbacks ended with code {code} and is started again"
            except OSError as error:
                code, failing = 1, f"the task's callbacks cannot be called: {error}"
            self._store()
            if code == 0 or self._over:
                return
            self._report(failing, failing)
            pause_s = AGAIN_S if self._place != before else min(2 * pause_s, MOST_AGAIN_S)
            with self._changing:
                self._changing.wait_for(lambda: self._over, pause_s)

    def _once(self) -> int:
        """Run one process to its end and return its exit code. Raises `OSError` if it cannot be started."""
        roots = self._called.roots
        with self._changing:
            if self._over:
                return 0
            self._process = SideProcess(MODULE, (), environment_with({}, roots), roots[0] if roots else "")
            self._process.say({**self._first, "place": self._place})
            if self._ending:
                self._process.say({"end": True})
        code = self._process.listen(self._hear)
        self._process.kill()
        return code

    def _hear(self, told: Mapping[str, Any]) -> None:
        if "place" in told:
            at, events = told["place"]
            self._place = at, events
            if time.monotonic() - self._stored_s > STORE_S:
                self._store()
        else:
            self._report(told["cause"], told["text"])

    def _report(self, cause: str, text: str) -> None:
        if cause not in self._reported:
            self._reported.add(cause)
            self._news.append(text)

    def _kept(self) -> Place | None:
        """Return the stored place; None if there is none."""
        try:
            kept = read_object(self._run, FILE, "", _PLACE)
            return kept["at"], kept["events"]
        except FileNotFoundError:
            return None
        except (OSError, InputError) as error:
            log.warning("cannot read which callbacks were called; calling those of new steps: %s", error)
            return None

    def _store(self) -> None:
        place = self._place
        if place == self._stored or self._abandoned:
            return
        self._stored_s = time.monotonic()
        try:
            text = json.dumps({"at": place[0], "events": place[1]})
            self._run.write(FILE, [text.encode() + b"\n"])
            self._stored = place
        except (OSError, FolderGone) as error:
            log.warning("cannot store which callbacks were called: %s", error)
