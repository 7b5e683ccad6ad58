"""Run the controller on one thread: an inbox, timers, and all calls to workers.

Every answer, death, report and request goes through the inbox and is handled in order. The controller never delays a
step: workers report in batches, and one never-answering call to each worker reveals a death at once.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from raytrain_plus.errors import DeviceBroken, RaytrainError, StaleController, WorkerLost
from raytrain_plus.membership import events as e
from raytrain_plus.membership.group_state import Group
from raytrain_plus.workers.messages import AdoptionReport
from raytrain_plus.workers.pool import answer

TICK_S = 0.05
"""Maximum seconds between two looks at the clock."""
VACANT_S = 5.0
"""Seconds for which the place of a worker that died is kept for the next one."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Clock:
    """The two clocks of the controller."""

    now: Callable[[], float] = time.monotonic
    """Seconds that only rise: for limits and pauses."""
    unix: Callable[[], float] = time.time
    """Unix seconds: for what is written down, and for deadlines set by others."""


class WorkerGroup(Protocol):
    """The workers of a run: see `workers.pool.Pool`."""

    @property
    def need(self) -> str: ...
    def __contains__(self, name: str) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def start(self, name: str) -> None: ...
    def adopt(self, epoch: int, limit_s: float) -> Mapping[str, AdoptionReport]: ...
    def start_left_s(self, name: str) -> float: ...
    def lacks_room(self, name: str) -> bool: ...
    def restart(self, name: str) -> None: ...
    def stand_by(self, nodes: Mapping[str, str]) -> None: ...
    def watch(self, name: str, died: Callable[[Future[Any]], None]) -> None: ...
    def actor(self, name: str) -> Any: ...
    def call(self, name: str, method: str, *arguments: Any) -> Any: ...
    def ask(self, name: str, answered: Callable[[Future[Any]], None], method: str, *arguments: Any) -> None: ...
    def begin(self, name: str, method: str, *arguments: Any) -> Callable[[float], Any]: ...
    def end(self, name: str, *, vacate: bool = False, withhold: bool = False) -> None: ...
    def release(self, name: str) -> None: ...
    def shutdown(self) -> None: ...


class Machine(Protocol):
    """Interface of the group's state machine; only it changes the group."""

    @property
    def group(self) -> Group: ...
    def feed(self, event: e.Event) -> None: ...


class Host(Protocol):
    """Where the controller runs."""

    @property
    def address(self) -> str:
        """The address of its node."""

    @property
    def node(self) -> str:
        """The id of its node."""

    @property
    def cluster(self) -> str:
        """The address of its Ray cluster."""

    @property
    def name(self) -> str:
        """Its actor's name on that cluster; empty if it has none."""

    @property
    def actor(self) -> Any:
        """Its actor, for workers to call."""

    def move(self) -> None:
        """Have another process on another node take its place, if there is such a node; return at once."""


@dataclass(frozen=True, slots=True)
class Died:
    """A worker's process is gone."""

    worker: str
    cause: str
    broken: DeviceBroken | None = None
    """The error of its device, if that has failed."""


@dataclass(frozen=True, slots=True)
class _Answered:
    """A worker's call has ended."""

    worker: str
    future: Future[Any]
    then: Callable[[Any], None]
    failed: Callable[[Any], None] | None
    errors: type[Exception] | tuple[type[Exception], ...]


@dataclass(frozen=True, slots=True)
class _Ended:
    """A worker's call that never answers has ended."""

    worker: str
    future: Future[Any]


class EventLoop:
    """The inbox may be filled from any thread; everything else belongs to the controller's."""

    def __init__(self, workers: WorkerGroup, clock: Clock) -> None:
        self._workers = workers
        self._clock = clock
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._handlers: Mapping[type[Any], Callable[[Any], None]] = {}

    def serve(self, handlers: Mapping[type[Any], Callable[[Any], None]]) -> None:
        """Handle messages by their type from now on: one entry for each kind that anybody puts into the inbox."""
        self._handlers = handlers

    def put(self, message: object) -> None:
        """Have the message handled on the controller's thread, when its turn comes."""
        self._inbox.put(message)

    def hear(self, wait_s: float) -> bool:
        """Handle the next message, if one is there within `wait_s`; return whether one was."""
        try:
            message = self._inbox.get(timeout=wait_s)
        except queue.Empty:
            return False
        if isinstance(message, _Answered):
            self._answered(message)
        elif isinstance(message, _Ended):
            self._ended(message)
        else:
            self._handlers[type(message)](message)
        return True

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Run `act` after `seconds`."""
        self._timers.append((self._clock.now() + seconds, act))

    def fire(self, now: float) -> None:
        """Run what is due."""
        for timer in [timer for timer in self._timers if timer[0] <= now]:
            self._timers.remove(timer)
            timer[1]()

    # Workers: those that have been started and not ended

    @property
    def need(self) -> str:
        """The resources of one worker, in words."""
        return self._workers.need

    def __contains__(self, name: str) -> bool:
        return name in self._workers

    def __iter__(self) -> Iterator[str]:
        return iter(self._workers)

    def start(self, name: str) -> None:
        """Start a worker; the loop hears `Died` if its process ends before `end`."""
        self._workers.start(name)
        self._watch(name)

    def start_left_s(self, name: str) -> float:
        """Return for how many seconds the start of a worker may still last; 0 or less if it is to be restarted."""
        return self._workers.start_left_s(name)

    def lacks_room(self, name: str) -> bool:
        """Return whether Ray has said that it has no room for a worker, and not yet that it has."""
        return self._workers.lacks_room(name)

    def restart(self, name: str) -> None:
        """Start a new process in the place of one that has not come up as a worker, and end that one."""
        self._workers.restart(name)
        self._watch(name)

    def adopt(self, name: str) -> None:
        """Watch a worker that another controller has started; the loop hears `Died` if its process ends."""
        self._watch(name)

    def _watch(self, name: str) -> None:
        self._workers.watch(name, lambda future: self.put(_Ended(name, future)))

    def stand_by(self, nodes: Mapping[str, str]) -> None:
        """Keep processes ready to replace these members, given the node of each: see `workers.standby`."""
        self._workers.stand_by(nodes)

    def end(self, name: str, *, vacate: bool = False, withhold: bool = False) -> None:
        """End a worker, whatever it does; with `vacate`, keep its place for `VACANT_S` for the next one.

        With `withhold`, nobody gets its place in this run.
        """
        if name in self._workers:
            self._workers.end(name, vacate=vacate, withhold=withhold)
            if vacate:
                self.later(VACANT_S, partial(self._workers.release, name))

    def actor(self, name: str) -> Any:
        """Return a worker's actor, for others to call."""
        return self._workers.actor(name)

    def tell(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a worker without waiting for the answer; return its reference, for other workers.

        A worker that is gone is not called: what follows from that is decided elsewhere.
        """
        return self._workers.call(name, method, *arguments) if name in self._workers else None

    def ask(
        self,
        name: str,
        method: str,
        *arguments: Any,
        then: Callable[[Any], None] = lambda _: None,
        failed: Callable[[Any], None] | None = None,
        errors: type[Exception] | tuple[type[Exception], ...] = RaytrainError,
    ) -> None:
        """Call a worker; `then` gets its answer, on the controller's thread, when it is there.

        `failed` gets the error that the call raised if it is one of `errors`; every other error ends the run, and so
        do all without `failed`. Neither is called if the worker is lost: its death is reported by itself.
        """
        if name in self._workers:
            self._workers.ask(
                name, lambda future: self.put(_Answered(name, future, then, failed, errors)), method, *arguments
            )

    def _answered(self, message: _Answered) -> None:
        try:
            found = answer(message.future, message.worker)
        except WorkerLost:
            return
        except StaleController:
            raise
        except Exception as error:
            if message.failed is None or not isinstance(error, message.errors):
                raise
            message.failed(error)
            return
        message.then(found)

    def _ended(self, message: _Ended) -> None:
        name = message.worker
        if name not in self._workers:
            return
        try:
            answer(message.future, name)
        except StaleController:
            # The worker lives, and obeys another controller.
            raise
        except RaytrainError as error:
            broken = error if isinstance(error, DeviceBroken) else None
            died = Died(name, str(error).removeprefix(f"{name} died: "), broken)
            self._handlers[Died](died)


def stale(group: Group, generation: int, what: str) -> bool:
    """Return whether a message belongs to another generation; log it as refused then."""
    if generation == group.generation:
        return False
    log.warning("refused: %s in generation %d; the current one is %d", what, generation, group.generation)
    return True
