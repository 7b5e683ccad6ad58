"""The process that a user started, while it follows a run: it shows what happens, and hands signals on."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace
from types import FrameType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from raytrain_plus.controller.order import Closing, Order
from raytrain_plus.errors import RunError
from raytrain_plus.launch.cluster import begin
from raytrain_plus.observe.events import Event
from raytrain_plus.observe.progress import View
from raytrain_plus.result import Result
from raytrain_plus.runs.folder import holder_lives, lease_document
from raytrain_plus.runs.status import what_is_kept
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.open import open_folder
from raytrain_plus.workers.pool import cause_of_death

FOLLOW_S = 0.25
"""Longest wait for news of the run: bounds how soon a signal is heard, too."""
ANSWER_S = 10.0
"""Seconds without an answer from the controller after which its process is looked for."""
CLOSING_S = 10.0
"""Maximum seconds from a run's last event to the controller's own end; after that the result in the folder decides."""


def drive(order: Order, began: float, view: View | None, signals: Signals, *, detached: bool = False) -> Result:
    """Runs what is ordered to its end, on the Ray that is there; the run ends with this process, unless `detached`.

    Raises `RunError` if the controller died and left no result.
    """
    run = open_folder(order.plan.folder)
    controller, closing_ref = begin(order, began, detached=detached)
    followed = _Followed(controller, run)
    if view is not None:
        view.start(order.plan.job.name, order.plan.steps)
    try:
        result = _follow(followed, closing_ref, view, signals)
    except RayTaskError as error:
        raise error.cause from None
    except SystemExit:
        # A second SIGTERM, which Ray hands on with a code of its own.
        raise SystemExit(signals.exit_code) from None
    except RayActorError as error:
        ended = followed.result()
        if ended is None:
            raise _died(cause_of_death(error), run) from error
        result = ended
    finally:
        if not detached:
            ray.kill(controller)
        elif signals.new():
            # Two came at once: it is not killed with us, and has not heard.
            ray.wait([controller.stop.remote()], timeout=FOLLOW_S)
        if view is not None:
            view.close()
    if result.status == "stopped" and signals.heard:
        result = replace(result, exit_code=signals.exit_code)
    if view is not None:
        view.finish(result)
    return result


def _follow(followed: _Followed, closing_ref: Any, view: View | None, signals: Signals) -> Result:
    """Shows a run's events until it has ended, and hands signals on; its result."""
    ended = False
    while not ended:
        # Nothing is told after the last event: it is the end that is waited for then.
        ended = bool(ray.wait([closing_ref], timeout=FOLLOW_S if followed.over else 0)[0])
        for event in followed.news(0.0 if ended or followed.over else FOLLOW_S):
            if view is not None:
                view.event(event)
        if signals.new():
            followed.controller.stop.remote()
        if followed.late and not ended:
            # It frees what the run held, which a Ray without its GCS never confirms.
            result = followed.result()
            if result is not None:
                return result
    closing: Closing = ray.get(closing_ref)
    return closing.result


class _Followed:
    """A controller's events, by a long poll; and its run's folder, which decides when the controller is gone."""

    def __init__(self, controller: Any, run: Folder) -> None:
        self.controller = controller
        self._run = run
        self._cursor = 0
        self._kinds: set[str] = set()
        self._over_since = 0.0
        self._gone = False
        """Whether it has ended, and its result is there."""

    def news(self, timeout_s: float) -> list[Event]:
        """Return the events since the last call; wait up to `timeout_s` for the first of them.

        Raises `RunError` if the controller does not answer and its process has ended.
        """
        try:
            events: list[Event] = ray.get(self.controller.follow.remote(self._cursor, timeout_s), timeout=ANSWER_S)
        except GetTimeoutError:
            # Before that, the lease is an earlier controller's.
            if self._begun and holder_lives(lease_document(self._run)) is False:
                if self.result() is None:
                    raise _died("its process has ended", self._run) from None
                self._gone = True
            return []
        self._cursor += len(events)
        self._kinds |= {event["kind"] for event in events}
        if self.over and not self._over_since:
            self._over_since = time.monotonic()
        return events

    @property
    def over(self) -> bool:
        """Whether the last event was there."""
        return "run_finished" in self._kinds

    @property
    def late(self) -> bool:
        """Whether the controller has ended unheard, or should have ended long ago."""
        return self._gone or (self.over and time.monotonic() - self._over_since > CLOSING_S)

    @property
    def trains(self) -> bool:
        """Whether a group was formed."""
        return "view_formed" in self._kinds

    def result(self) -> Result | None:
        """Return what the run's folder says of its end; None before the end."""
        # The result of an earlier controller goes when the folder is taken, before anything is told.
        return Result.load(self._run) if self._begun else None

    @property
    def _begun(self) -> bool:
        """Whether this controller has taken the run's folder."""
        return "run_started" in self._kinds


def _died(why: str, run: Folder) -> RunError:
    return RunError(f"the controller died: {why}; {what_is_kept(run)}")


def launch(order: Order, began: float) -> None:
    """Has what is ordered run on the Ray that is there, whatever becomes of this process; returns when it trains.

    Raises what kept it from that.
    """
    run = open_folder(order.plan.folder)
    controller, run_ref = begin(order, began, detached=True)
    followed = _Followed(controller, run)
    try:
        # The controller itself waits for nothing without a limit.
        while not followed.trains:
            followed.news(FOLLOW_S)
            if ray.wait([run_ref], timeout=0)[0]:
                ray.get(run_ref)
                return
    except RayTaskError as error:
        raise error.cause from None
    except RayActorError as error:
        raise _died(cause_of_death(error), run) from error
    except BaseException:
        ray.kill(controller)
        raise


class Signals:
    """SIGINT and SIGTERM become wishes to stop, while this is open; the second one interrupts at once."""

    def __init__(self) -> None:
        self._count = 0
        self._told = 0
        self.exit_code = 130
        self._before: dict[int, Any] = {}

    def new(self) -> bool:
        """Whether a signal came since the last call."""
        told, self._told = self._told, self._count
        return told != self._count

    @property
    def heard(self) -> bool:
        """Whether there was one."""
        return self._count > 0

    def listen(self) -> None:
        """Takes the signals, from whoever had them."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                had = signal.signal(number, self._heard)
                self._before.setdefault(number, had)

    def __enter__(self) -> Signals:
        self.listen()
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.exit_code = 128 + number
        self._count += 1
        if self._count > 1:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(self.exit_code)
