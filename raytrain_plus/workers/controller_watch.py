"""Watch a run's controller from one of its workers: end its process if that sleeps, and this one if none comes back.

Ray starts a controller that has died again, and repeats what was asked of it. So only a controller that is dead for
good, or silent for long, ends its workers.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import ray
from ray.exceptions import ActorDiedError, RayError

from raytrain_plus.runs.process import lives
from raytrain_plus.workers.run_actors import NAMESPACE, actors_of, clear, hear, leave, wait_for_writers

LOOK_S = 0.5
"""Seconds between two looks at the clock."""
PAUSED_S = 3.0
"""Seconds between two looks from which on this process was stopped, too, and heard nothing for that reason."""
ASK_S = 1.0
"""Seconds between an answer of the controller and the next question."""
SLEEPS_S = 10.0
"""Seconds of silence after which the controller's process is ended, if it is on this machine."""
RESTART_S = 20.0
"""Seconds in which a controller that sleeps is found and replaced: workers never wait less for one."""
TURN_S = 2.0
"""Seconds in which a worker ends the others of its run, before the next one tries."""

log = logging.getLogger(__name__)

Verdict = Literal["wait", "wake", "alone", "over"]


@dataclass(frozen=True, slots=True)
class ControllerProcess:
    """The controller of a run, and the process that it is now."""

    run: str
    """The name of its actor."""
    pid: int
    identity: Mapping[str, str]
    """See `runs.process.this_process`."""
    wait_s: float
    """For how many seconds the workers of its run wait for a controller."""


def verdict(*, dead: bool, silent_s: float, sleeps: bool, wait_s: float) -> Verdict:
    """Return what a worker does about its controller.

    `dead`: whether Ray will not start it again; `silent_s`: seconds since it was heard; `sleeps`: whether its process
    is alive on this machine; `wait_s`: how long workers wait for a controller.

    >>> [verdict(dead=False, silent_s=11, sleeps=sleeps, wait_s=60) for sleeps in (True, False)]
    ['wake', 'wait']
    """
    if dead:
        return "over"
    if silent_s > max(wait_s, RESTART_S):
        return "alone"
    return "wake" if sleeps and silent_s > SLEEPS_S else "wait"


class ControllerWatch:
    """Looks after the controller on a thread of its own."""

    def __init__(
        self,
        process: ControllerProcess,
        others_hear: Callable[[], bool],
        leave: Callable[[], None],
        written: Callable[[], object],
        end: Callable[[Callable[[], bool]], None],
    ) -> None:
        """Begin to watch that process.

        `others_hear`: returns whether another worker hears a controller; `leave`: writes what the next one needs of
        this worker; `written`: how far it is with that; `end`: ends the run's workers, and this one, unless what it is
        given returns true: whether a controller has come.
        """
        self._process = process
        self._others_hear, self._leave, self._written, self._end = others_hear, leave, written, end
        self._heard = self._looked = time.monotonic()
        self._asked = -ASK_S
        self._actor: Any = None
        self._answer: Future[Any] | None = None
        threading.Thread(target=self._run, name="controller watch", daemon=True).start()

    def heard(self) -> None:
        """Note a sign of life of the controller."""
        self._heard = time.monotonic()

    def hears(self) -> bool:
        """Return whether the controller was heard a moment ago."""
        return time.monotonic() - self._heard <= SLEEPS_S

    def follow(self, process: ControllerProcess) -> None:
        """Watch this process from now on, which Ray has started in place of the other."""
        self._process = process
        self.heard()

    def _run(self) -> None:
        while True:
            time.sleep(LOOK_S)
            doing = self._look(time.monotonic())
            if doing == "wake":
                log.warning("the controller has been silent for %g s, so its process is ended", SLEEPS_S)
                with suppress(OSError):
                    os.kill(self._process.pid, signal.SIGKILL)
            if doing in ("alone", "over"):
                self._finish(doing)

    def _finish(self, why: Verdict) -> None:
        """End the run's workers once all have written what the next controller needs; return only if one has come."""
        heard = self._heard

        def led() -> bool:
            # A worker that is cut off from the controller must not end others, which it leads.
            return why == "alone" and (self._heard != heard or self._others_hear())

        if led():
            return
        if why == "alone":
            log.warning("no controller came back within elastic.wait_s, so the workers end")
        # A storage may hang.
        leaving = threading.Thread(target=self._leave, name="leaving", daemon=True)
        leaving.start()
        wait_for_writers(partial(_ended, leaving), self._written)
        # Writing takes a while.
        if not led():
            self._end(led)

    def _look(self, now: float) -> Verdict:
        if now - self._looked > PAUSED_S:
            self._heard += now - self._looked
        self._looked = now
        dead = self._dead(now)
        silent_s = now - self._heard
        process = self._process
        sleeps = silent_s > SLEEPS_S and bool(process.identity and lives(process.pid, **process.identity))
        return verdict(dead=dead, silent_s=silent_s, sleeps=sleeps, wait_s=process.wait_s)

    def _dead(self, now: float) -> bool:
        """Return whether the controller is dead for good; ask it for a sign of life, unless it owes one."""
        try:
            if self._actor is None:
                self._actor = ray.get_actor(self._process.run, namespace=NAMESPACE)
        except ValueError:
            return True
        except RayError:
            return False
        if self._answer is None:
            if now - self._asked >= ASK_S:
                # Ray shows the user each call that it repeats.
                call = self._actor.__ray_ready__.options(max_task_retries=0)
                self._asked, self._answer = now, call.remote().future()
        elif self._answer.done():
            error, self._answer = self._answer.exception(), None
            if error is None:
                self.heard()
            return isinstance(error, ActorDiedError)
        return False


def others_hear(run: str) -> bool:
    """Return whether another worker of the run hears a controller."""
    with suppress(RayError):
        return hear(_others_of(run).values())
    return False


def end_workers(run: str, place: str, led: Callable[[], bool]) -> None:
    """End all workers of a run, this process last; `place`: the name of its placement group, if it has one.

    One of them does so, once all have written what they leave. The others take their turn only if that one does not get
    it done: if two ended one another, nobody would be left to remove the last placement group. Returns only if a
    controller has come meanwhile: then `led` returns true.
    """
    own = _own_name()
    with suppress(RayError):
        others = _others_of(run)
        leave(others.values())
        time.sleep(TURN_S * sum(name < own for name in others))
    if led():
        return
    clear(run, own, place)
    os._exit(1)


def _ended(thread: threading.Thread, limit_s: float) -> bool:
    thread.join(limit_s)
    return not thread.is_alive()


def _own_name() -> str:
    return ray.get_runtime_context().get_actor_name() or ""


def _others_of(run: str) -> dict[str, Any]:
    own = _own_name()
    return {name: actor for name, actor in actors_of(run).items() if name != own}
