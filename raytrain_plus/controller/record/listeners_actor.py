"""Run a run's listeners in a Ray actor on the controller's node, start it again if it dies, and end it.

Only a run with trackers or callbacks has this actor. It uses no CPU. Nobody waits for it before the end of the run, and
then for a limited time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_plus.controller.record.listeners import ALIVE_S, END_S, Listeners, LocalListeners, late
from raytrain_plus.observe.trackers.listened import Listened
from raytrain_plus.observe.trackers.listening import Listening, Metrics, News, settle_process
from raytrain_plus.runs.process import lives, this_process

NEWS_S = 10.0
"""Maximum seconds for which a call for news waits in the actor."""
MOST_STARTS = 4
"""Maximum starts of the process, each within `STEADY_S` after the last one."""
STEADY_S = 60.0
LOOK_S = 0.5
"""Seconds between two looks whether the controller lives."""
GOING_S = 5.0
"""Maximum seconds for the call in progress when the controller has died."""


def listeners_on(listened: Listened, node: str, controller: Any) -> Listeners:
    """Return what runs these listeners: this process if TensorBoard is the only one, else an actor on this node.

    TensorBoard's writer is ours and loads nothing. A tracker's library and a task's methods may load anything, and may
    end their process.
    """
    return RayListeners(listened, node, controller) if listened.trackers or listened.task else LocalListeners(listened)


class ListenersActor:
    """The listeners' process: see `observe.trackers.listening`. It ends with its controller."""

    def __init__(
        self,
        listened: Listened,
        behind: int,
        evaluated: Metrics,
        controller: Any,
        pid: int,
        identity: Mapping[str, str],
    ) -> None:
        """Begin to listen for a controller with this process: see `runs.process.this_process`."""
        settle_process(listened, os.environ)
        self._listening = Listening(listened, behind, evaluated, lambda: controller.stop.remote())
        if identity:
            threading.Thread(target=self._end_with, args=(pid, identity), name="controller", daemon=True).start()

    def news(self, timeout_s: float) -> News:
        """See `Listening`."""
        return self._listening.news(timeout_s)

    def end(self, status: str) -> None:
        """See `Listening`."""
        self._listening.end(status)

    def _end_with(self, pid: int, identity: Mapping[str, str]) -> None:
        """End this process when the controller is dead: the next one calls the rest.

        Ray does so too, but some seconds later, in which the next one may begin.
        """
        while lives(pid, **identity) is not False:
            time.sleep(LOOK_S)
        self._listening.stop(GOING_S)
        os._exit(0)


class RayListeners:
    """The `Listeners` of a run, in an actor. Called by the controller's loop; `abandon` also by other threads."""

    def __init__(self, listened: Listened, node: str, controller: Any) -> None:
        """Prepare the actor on this node; callbacks can stop the run of this controller's actor."""
        self._listened, self._node, self._controller = listened, node, controller
        self._behind = 0
        self._evaluated: Callable[[], Metrics] = dict
        self._actor: Any = None
        self._asked: Future[News] | None = None
        """The call for news; None if the actor has not begun, or if it has nothing to do any more."""
        self._left = listened.names
        self._texts: list[str] = []
        self._reported: set[str] = set()
        self._status = ""
        self._starts: list[float] = []
        """When the latest starts were, each within `STEADY_S` after the one before."""
        # Guards the actor: the loop replaces one that has died, another thread may end it.
        self._changing = threading.RLock()

    def begin(self, behind: int, evaluated: Callable[[], Metrics]) -> None:
        """See `Listeners`; does not wait for the process."""
        self._behind, self._evaluated = behind, evaluated
        self._start()

    def news(self) -> Sequence[str]:
        """See `Listeners`."""
        self._hear()
        texts, self._texts = self._texts, []
        return texts

    def finish(self, status: str, meanwhile: Callable[[], None]) -> None:
        """See `Listeners`."""
        deadline = time.monotonic() + END_S
        with self._changing:
            self._status = status
            if self._actor is not None:
                self._actor.end.remote(status)
        while (asked := self._asked) is not None and (left_s := deadline - time.monotonic()) > 0:
            wait([asked], min(ALIVE_S, left_s))
            self._hear()
            meanwhile()
        if self._asked is not None:
            self._say("late", late(self._left, END_S))
        self.abandon()

    def abandon(self) -> None:
        """See `Listeners`."""
        with self._changing:
            self._asked = None
            if self._actor is not None:
                ray.kill(self._actor)
            self._actor = None

    def _start(self) -> None:
        now = time.monotonic()
        steady = not self._starts or now - self._starts[-1] > STEADY_S
        self._starts = [now] if steady else [*self._starts, now]
        self._actor = (
            ray.remote(ListenersActor)
            .options(
                num_cpus=0,
                # One waits for news.
                max_concurrency=2,
                enable_task_events=False,
                scheduling_strategy=NodeAffinitySchedulingStrategy(self._node, soft=False),
            )
            # The environment may hold secrets, and Ray's dashboard shows a `runtime_env`.
            .remote(self._listened, self._behind, self._evaluated(), self._controller, os.getpid(), this_process())
        )
        if self._status:
            self._actor.end.remote(self._status)
        self._ask()

    def _ask(self) -> None:
        self._asked = self._actor.news.remote(NEWS_S).future()

    def _hear(self) -> None:
        """Take the news, if there are any, and ask for the next; never waits."""
        with self._changing:
            if self._asked is None or not self._asked.done():
                return
            try:
                reports, self._left = self._asked.result()
            except RayError:
                self._died()
                return
            for cause, text in reports:
                self._say(cause, text)
            if self._left:
                self._ask()
            else:
                self._asked = None

    def _say(self, cause: str, text: str) -> None:
        # Another process may report what an earlier one has reported.
        if cause not in self._reported:
            self._reported.add(cause)
            self._texts.append(text)

    def _died(self) -> None:
        self._asked = None
        if len(self._starts) < MOST_STARTS:
            self._say("died", "the process of the run's listeners died and is started again")
            self._start()
        else:
            names = ", ".join(self._left)
            self._say("gone", f"the process of the run's listeners died {MOST_STARTS} times; without it: {names}")
