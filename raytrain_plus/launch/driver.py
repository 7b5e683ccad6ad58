"""Drive a run from the process that a user started: show its events and forward signals."""

from __future__ import annotations

import signal
import sys
import threading
import time
from dataclasses import replace
from types import FrameType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from raytrain_plus.controller.run_order import Closing, RunOrder
from raytrain_plus.errors import InputError, RunError
from raytrain_plus.launch.cluster import Begun, begin
from raytrain_plus.observe.run_events import RunEvent
from raytrain_plus.observe.views.progress import ProgressView
from raytrain_plus.ray_compat import show_repeated_prints
from raytrain_plus.result import Result, state_text
from raytrain_plus.runs.folder import holder_lives, lease_document
from raytrain_plus.runs.status import newest_saved, what_is_kept
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.interface import Folder
from raytrain_plus.workers.pool import cause_of_death

FOLLOW_S = 0.25
"""Maximum seconds to wait for new events; it also bounds how long a signal waits to be handled."""
ANSWER_S = 10.0
"""Maximum seconds for an answer of the controller."""
REPLACED_S = 30.0
"""Seconds without an answer after which a controller counts as gone, if its process has ended: no other has come."""
CLOSING_S = 10.0
"""Maximum seconds from a run's last event to the end of its controller; then the result in the folder is used."""


def drive(
    order: RunOrder, began: float, view: ProgressView | None, signals: Signals, *, detached: bool = False
) -> Result:
    """Run an order until it ends, on the connected Ray; the run ends with this process, unless `detached`.

    Raises `RunError` if the controller died and left no result.
    """
    run = open_folder(order.plan.folder)
    begun = begin(order, began, detached=detached)
    followed = _Followed(begun.actor, run)
    if view is not None:
        view.start(order.plan.job.name, order.plan.steps)
    try:
        result = _follow(followed, begun.closing, view, signals)
    except RayTaskError as error:
        raise error.cause from None
    except SystemExit:
        # A second SIGTERM: Ray raises `SystemExit` with an exit code of its own.
        raise SystemExit(signals.exit_code) from None
    except (RayActorError, _Gone) as error:
        ended = followed.result()
        if ended is None:
            if isinstance(error, RayActorError):
                _end_without_controller(begun)
            elif not detached:
                # It must not come back meanwhile; that of a detached run may.
                ray.kill(begun.actor)
                _end_without_controller(begun)
            raise _died(_why(error), run) from error
        result = ended
    finally:
        if not detached:
            if signals.again:
                # Workers that only lose their controller write what they have first.
                begun.clear()
            # A controller that has ended the run has ended its workers; others end when they notice.
            ray.kill(begun.actor)
        elif signals.new():
            # Two signals came at once: the controller survives this process and has not received the request.
            ray.wait([begun.actor.stop.remote()], timeout=FOLLOW_S)
        if view is not None:
            view.close()
        if signals.again:
            print(_cut_off(followed.steps, run, detached=detached), file=sys.stderr)
    if result.status == "stopped" and signals.heard:
        result = replace(result, exit_code=signals.exit_code)
    show_repeated_prints()
    if view is not None:
        view.finish(result)
    return result


def _follow(followed: _Followed, closing_ref: Any, view: ProgressView | None, signals: Signals) -> Result:
    """Show a run's events until it ends, and forward signals; return its result."""
    ended = False
    while not ended:
        # No event follows the last one, so wait for the end of the controller then.
        ended = bool(ray.wait([closing_ref], timeout=FOLLOW_S if followed.over else 0)[0])
        for event in followed.news(0.0 if ended or followed.over else FOLLOW_S):
            if view is not None:
                view.event(event)
        if signals.new():
            followed.controller.stop.remote()
        if followed.late and not ended:
            # The controller still releases the run's resources, which a Ray without its GCS never confirms.
            result = followed.result()
            if result is not None:
                return result
    closing: Closing = ray.get(closing_ref)
    return closing.result


class _Gone(Exception):
    """The controller's process has ended, and for long no other has taken its place; the message says so."""


def _end_without_controller(begun: Begun) -> None:
    """End the workers of a run whose controller is gone, once they have written what the next one needs."""
    print("the controller is gone; the workers write the state that they have", file=sys.stderr)
    begun.leave()


def _why(error: RayActorError | _Gone) -> str:
    return str(error) if isinstance(error, _Gone) else cause_of_death(error)


class _Followed:
    """Follow a controller's events by long polling; its run's folder decides once the controller is gone."""

    def __init__(self, controller: Any, run: Folder) -> None:
        self.controller = controller
        self._run = run
        self._cursor = 0
        self._kinds: set[str] = set()
        self.steps = 0
        """Committed steps."""
        self._over_since = 0.0
        self._answered = time.monotonic()
        self._gone = False
        """Whether the controller has ended and left a result."""

    def news(self, timeout_s: float) -> list[RunEvent]:
        """Return the events since the last call; wait up to `timeout_s` for the first of them.

        Raises `_Gone` if the controller does not answer and its process has ended.
        """
        try:
            events: list[RunEvent] = ray.get(self.controller.follow.remote(self._cursor, timeout_s), timeout=ANSWER_S)
        except GetTimeoutError:
            late = time.monotonic() - self._answered > REPLACED_S
            # Until this controller has taken the folder, the lease is an earlier controller's.
            if late and self._begun and holder_lives(lease_document(self._run)) is False:
                if self.result() is None:
                    raise _Gone("its process has ended") from None
                self._gone = True
            return []
        self._answered = time.monotonic()
        self._cursor += len(events)
        self._kinds |= {event["kind"] for event in events}
        for event in events:
            if event["kind"] in ("step_committed", "resumed"):
                self.steps = event["step"] + 1
        if self.over and not self._over_since:
            self._over_since = time.monotonic()
        return events

    @property
    def over(self) -> bool:
        """Whether the last event has arrived."""
        return "run_finished" in self._kinds

    @property
    def late(self) -> bool:
        """Whether the controller ended without answering, or should have ended long ago."""
        return self._gone or (self.over and time.monotonic() - self._over_since > CLOSING_S)

    @property
    def trains(self) -> bool:
        """Whether a group of workers has formed."""
        return "view_formed" in self._kinds

    def result(self) -> Result | None:
        """Return the run's result from its folder; None before the end."""
        # An earlier controller's result is removed when the folder is taken, before the first event.
        return Result.load(self._run) if self._begun else None

    @property
    def _begun(self) -> bool:
        """Whether this controller has taken the run's folder."""
        return "run_started" in self._kinds


def _cut_off(steps: int, run: Folder, *, detached: bool) -> str:
    """Return what a second signal leaves of a run that was in this folder after `steps` steps, in words."""
    if detached:
        return f"the run saves its state and ends without this process; see: raytrain status '{run.where}'"
    try:
        saved = newest_saved(run)
    except (OSError, InputError) as error:
        return f"a second signal ended the run, and its checkpoints cannot be read: {error}"
    if saved is not None and saved + 1 >= steps:
        return state_text(saved + 1, None, saved)
    return state_text(steps, "a second signal ended the run", saved)


def _died(why: str, run: Folder) -> RunError:
    return RunError(f"the controller died: {why}; {what_is_kept(run)}")


def launch(order: RunOrder, began: float) -> None:
    """Start a detached run on the connected Ray; return once it trains.

    The run survives this process. Raises the error that prevented the start.
    """
    run = open_folder(order.plan.folder)
    begun = begin(order, began, detached=True)
    followed = _Followed(begun.actor, run)
    try:
        # No limit is needed here: every wait of the controller has one.
        while not followed.trains:
            followed.news(FOLLOW_S)
            if ray.wait([begun.closing], timeout=0)[0]:
                ray.get(begun.closing)
                return
            ended = followed.result() if followed.late else None
            if ended is not None:
                # A Ray without its GCS never says that the controller has ended.
                if ended.status == "failed":
                    raise RunError(ended.error or "the run has failed")
                return
    except RayTaskError as error:
        raise error.cause from None
    except RayActorError as error:
        _end_without_controller(begun)
        raise _died(cause_of_death(error), run) from error
    except _Gone as error:
        ray.kill(begun.actor)
        begun.clear()
        raise _died(_why(error), run) from None
    except BaseException:
        ray.kill(begun.actor)
        begun.clear()
        raise


class Signals:
    """Turn SIGINT and SIGTERM into stop requests while this is open; a second signal interrupts at once."""

    def __init__(self) -> None:
        self._count = 0
        self._reported = 0
        self.exit_code = 130
        self._before: dict[int, Any] = {}

    def new(self) -> bool:
        """Return whether a signal came since the last call."""
        reported, self._reported = self._reported, self._count
        return reported != self._count

    @property
    def heard(self) -> bool:
        """Whether any signal came."""
        return self._count > 0

    @property
    def again(self) -> bool:
        """Whether a second signal came."""
        return self._count > 1

    def listen(self) -> None:
        """Install our handlers; the previous ones are restored on exit. Does nothing outside the main thread."""
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
