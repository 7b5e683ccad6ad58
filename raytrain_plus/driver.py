"""The process that a user started, while it follows a run: it shows what happens, and hands signals on."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from raytrain_plus.cluster import begin
from raytrain_plus.elastic.order import Closing, Order
from raytrain_plus.errors import RunError
from raytrain_plus.observe.progress import View
from raytrain_plus.result import Result

FOLLOW_S = 0.25
"""Longest wait for news of the run: bounds how soon a signal is heard, too."""


def drive(order: Order, began: float, view: View | None, signals: Signals, *, detached: bool = False) -> Result:
    """Runs what is ordered to its end, on the Ray that is there; the run ends with this process, unless `detached`."""
    controller, closing_ref = begin(order, began, detached=detached)
    if view is not None:
        view.start(order.plan.job.name, order.plan.steps)
    cursor = 0
    over = ended = False
    try:
        while not ended:
            # Nothing is told after the last event: it is the end that is waited for then.
            ended = bool(ray.wait([closing_ref], timeout=FOLLOW_S if over else 0)[0])
            events = ray.get(controller.follow.remote(cursor, 0.0 if ended or over else FOLLOW_S))
            cursor += len(events)
            over = over or any(event["kind"] == "run_finished" for event in events)
            if view is not None:
                for event in events:
                    view.event(event)
            if signals.new():
                controller.stop.remote()
        closing: Closing = ray.get(closing_ref)
    except RayTaskError as error:
        raise error.cause from None
    except SystemExit:
        # A second SIGTERM, which Ray hands on with a code of its own.
        raise SystemExit(signals.exit_code) from None
    except RayActorError as error:
        raise RunError(f"the controller died: {str(error).splitlines()[0]}") from error
    finally:
        if not detached:
            ray.kill(controller)
        elif signals.new():
            # Two came at once: it is not killed with us, and has not heard.
            ray.wait([controller.stop.remote()], timeout=FOLLOW_S)
        if view is not None:
            view.close()
    result = closing.result
    if result.status == "stopped" and signals.heard:
        result = replace(result, exit_code=signals.exit_code)
    if view is not None:
        view.finish(result)
    return result


def launch(order: Order, began: float) -> None:
    """Has what is ordered run on the Ray that is there, whatever becomes of this process; returns when it trains.

    Raises what kept it from that.
    """
    controller, run_ref = begin(order, began, detached=True)
    cursor = 0
    try:
        # The controller itself waits for nothing without a limit.
        while True:
            events = ray.get(controller.follow.remote(cursor, FOLLOW_S))
            cursor += len(events)
            if any(event["kind"] == "view_formed" for event in events):
                return
            if ray.wait([run_ref], timeout=0)[0]:
                ray.get(run_ref)
                return
    except RayTaskError as error:
        raise error.cause from None
    except RayActorError as error:
        raise RunError(f"the controller died: {str(error).splitlines()[0]}") from error
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
