"""Manage the workers' Ray side: one placement group and one actor each, started, adopted and ended one by one.

The place of a worker whose process died is kept for a moment: a standby on its node takes it, see `standby`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorPlacementGroupRemoved, ActorUnavailableError, GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raytrain_plus.errors import Interrupted, RunError, StaleController, WorkerLost
from raytrain_plus.membership.timeouts import START_S
from raytrain_plus.ray_compat import accelerator_resource
from raytrain_plus.runs.process import this_process
from raytrain_plus.workers.controller_watch import ControllerProcess
from raytrain_plus.workers.imports import Imports
from raytrain_plus.workers.messages import AdoptionReport
from raytrain_plus.workers.run_actors import (
    WORKERS,
    NamedGroup,
    actors_of,
    clear,
    end_actor,
    name_in,
    places_of,
    remove,
)
from raytrain_plus.workers.standby import Standby, Standbys, nodes_with_standby
from raytrain_plus.workers.worker_actor import WorkerActor

CALLS = 32
"""Concurrent calls that a worker answers: those that stay pending, short ones, and copies sent by others."""

KILLED = "its process was killed or crashed"
OUT_OF_MEMORY = "out of memory: its node ran low, and Ray ended it"
PROCESS_ONLY = frozenset({KILLED, OUT_OF_MEMORY})
"""Causes of death that leave the worker's node and placement group as they were."""

LOOK_S = 5.0
"""Seconds between two looks whether there is room for a worker."""
FREE_S = 5.0
"""Maximum seconds to wait at the end for Ray to remove placement groups; without its GCS each takes a minute."""


log = logging.getLogger(__name__)


@dataclass(slots=True)
class WorkerHandle:
    """One started worker."""

    actor: Any
    place: NamedGroup
    standby: Standby | None = None
    """The standby that the process was before; None if it was started for this worker."""
    began: float = 0.0
    """When its start was requested, or found to have room, in seconds by the pool's clock."""
    placed: bool = False
    """Whether its placement group is known to have room."""
    room: Future[bool] | None = None
    """Ray's answer to the question whether it has room, if it was asked."""
    refused: bool = False
    """Whether Ray has answered that it has no room for it."""
    tries: int = 0
    """How many processes were started for this worker before."""


class Pool:
    """The worker actors of one run. They outlive this process, unless `shutdown` ends them.

    A worker that the cluster has no room for yet waits for it; that is also how an autoscaler learns of the demand.
    """

    def __init__(
        self,
        run: str,
        cpus: float,
        gpus: float,
        imports: Imports | None,
        clock: Callable[[], float] = time.monotonic,
        accelerator: str | None = None,
        epoch: int = 0,
        *,
        wait_s: float,
    ) -> None:
        """Create an empty pool.

        `run`: the name of the controller's actor; `cpus`, `gpus`: what each worker needs; `imports`: what standbys
        import, or None for a pool without standbys; `clock`: seconds; `accelerator`: Ray's accelerator type that the
        node of each worker must have; `epoch`: rises with each process of the controller;
        `wait_s`: how long the processes wait for another one.
        """
        self._epoch = epoch
        self._process = ControllerProcess(run, os.getpid(), this_process(), wait_s)
        self._numbers = itertools.count()
        """Of the actors that this process has started."""
        self._clock = clock
        self._keeps_standbys = imports is not None
        self._need = {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
        self._accelerator = accelerator
        self._handles: dict[str, WorkerHandle] = {}
        self._nodes: dict[str, str] = {}
        """The node of each member."""
        self._vacant: dict[str, WorkerHandle] = {}
        """The places of workers whose processes died a moment ago."""
        self._freeing: list[threading.Thread] = []
        # Once: Ray keeps each class that is made remote for as long as the process lives.
        self._remote = ray.remote(WorkerActor)
        self._standbys = Standbys(self._start_standby, end_actor, imports or Imports(), clock)

    @property
    def need(self) -> str:
        """The resources of one worker, in words."""
        needed = [f"{amount:g} {name}" for name, amount in self._need.items()]
        if self._accelerator is not None:
            needed.append(f"a node with {self._accelerator}")
        return ", ".join(needed) or "nothing"

    def start(self, name: str) -> None:
        """Start a worker; it comes up on its own. Raises `RunError` if Ray's GCS does not answer within a minute."""
        if not self._vacant:
            self._handles[name] = self._started(self._new_place(name), name)
            return
        dead = max(self._vacant, key=lambda one: self._standbys.waits(self._nodes[one]))
        place, node = self._vacant.pop(dead).place, self._nodes.pop(dead)
        standby = self._standbys.take(node)
        if standby is None:
            self._handles[name] = self._started(place, name)
            self._handles[name].placed = True
        else:
            self._handles[name] = WorkerHandle(standby.actor, place, standby, self._clock(), placed=True)
            standby.actor.become.remote(name, place.name)

    def adopt(self, epoch: int, limit_s: float) -> dict[str, AdoptionReport]:
        """Take over the workers that an earlier process of the controller has left, and return what each says.

        `epoch`: of the calls from now on. Ends all that are not prepared, and those that do not answer within
        `limit_s`. Raises `StaleController` if a newer process has taken them over.
        """
        self._epoch = epoch
        found = actors_of(self._process.run)
        asked = {name: actor.standing.remote(epoch, self._process) for name, actor in found.items()}
        done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=limit_s) if asked else ([], [])
        standing = {name: _standing(asked[name]) for name in found if asked[name] in done}
        places, taken = {place.name: place for place in places_of(self._process.run)}, {}
        for name, actor in found.items():
            held, report = standing.get(name) or ("", None)
            if report is None or held not in places:
                end_actor(actor)
                continue
            taken[report.location.worker] = report
            place = places.pop(held)
            self._handles[report.location.worker] = WorkerHandle(actor, place, began=self._clock(), placed=True)
        for place in places.values():
            self._free(place)
        return taken

    def start_left_s(self, name: str) -> float:
        """Return for how many seconds the start of a worker may still last; 0 or less if it is to be restarted."""
        handle, now = self._handles[name], self._clock()
        if not handle.placed:
            if handle.room is None or not handle.room.done() or not handle.room.result():
                if handle.room is None or handle.room.done():
                    handle.refused = handle.room is not None
                    handle.room = _asked_for_room(handle.place.group)
                return LOOK_S
            handle.placed, handle.began = True, now
        left_s = handle.began + START_S * 2.0**handle.tries - now
        return left_s if handle.standby is None else min(left_s, handle.standby.left_s(now))

    def lacks_room(self, name: str) -> bool:
        """Return whether Ray has said that it has no room for a worker, and not yet that it has."""
        handle = self._handles[name]
        return handle.refused and not handle.placed

    def restart(self, name: str) -> None:
        """Start a new process in the place of one that has not come up as a worker, and end that one."""
        before = self._handles[name]
        # First, so that the end of the other process is not taken for the worker's.
        new = self._handles[name] = self._started(before.place, name)
        new.placed, new.tries = True, before.tries + (before.standby is None)
        end_actor(before.actor)

    def stand_by(self, nodes: Mapping[str, str]) -> None:
        """Keep standbys for these members, given the node of each: see `nodes_with_standby`.

        Workers with a GPU get none: Ray shows a GPU only to the process that was started for it.
        """
        self._nodes = {**{name: self._nodes[name] for name in self._vacant}, **nodes}
        if self._keeps_standbys and "GPU" not in self._need:
            try:
                self._standbys.keep(nodes_with_standby(nodes))
            except RunError as error:
                log.warning("the run goes on without standbys: %s", error)

    def _new_place(self, name: str) -> NamedGroup:
        bundle = {**self._need, **accelerator_resource(self._accelerator)} or {"CPU": 0.001}
        # Ray may still know what an earlier process has removed.
        place = name_in(self._process.run, f"{name}#{self._epoch}")
        with _starting(name):
            return NamedGroup(place, placement_group([bundle], strategy="PACK", name=place, lifetime="detached"))

    def _started(self, place: NamedGroup, name: str) -> WorkerHandle:
        with _starting(name):
            actor = self._options(
                name,
                num_cpus=self._need.get("CPU", 0),
                num_gpus=self._need.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(place.group, 0),
            ).remote(self._process, name, place.name)
        return WorkerHandle(actor, place, began=self._clock())

    def _start_standby(self, node: str) -> tuple[Any, Future[Any]]:
        # It takes the worker's CPUs with its place.
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        with _starting("a standby"):
            actor = self._options(f"standby-{next(self._numbers)}", num_cpus=0, scheduling_strategy=strategy).remote(
                self._process, cpus=self._need.get("CPU", 0)
            )
        return actor, actor.live.remote(self._epoch).future()

    def _options(self, name: str, **options: Any) -> Any:
        return self._remote.options(
            name=name_in(self._process.run, f"{name}#{self._epoch}.{next(self._numbers)}"),
            namespace=WORKERS,
            lifetime="detached",
            max_restarts=0,
            max_concurrency=CALLS,
            # Otherwise Ray's head keeps a record of each call, up to 100,000 of them: 5 MB a minute of pulses.
            enable_task_events=False,
            **options,
        )

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._handles))

    def actor(self, name: str) -> Any:
        """Return a worker's actor, for others to call."""
        return self._handles[name].actor

    def call(self, name: str, method: str, *arguments: Any) -> Any:
        """Start a worker's method and return the reference of its answer."""
        return self._handles[name].actor.call.remote(self._epoch, method, *arguments)

    def ask(self, name: str, answered: Callable[[Future[Any]], None], method: str, *arguments: Any) -> None:
        """Start a worker's method; `answered` gets its answer's future, on one of Ray's threads, when it is there."""
        handle = self._handles[name]

        def told(future: Future[Any]) -> None:
            # Not the answer of a process in whose place another one was started.
            if self._handles.get(name, handle) is handle:
                answered(future)

        self.call(name, method, *arguments).future().add_done_callback(told)

    def begin(self, name: str, method: str, *arguments: Any) -> Callable[[float], Any]:
        """Start a worker's method and return a function that waits for its answer, up to the given seconds.

        That function raises like `answer`. Raises `WorkerLost` if the worker is gone.
        """
        if name not in self._handles:
            raise WorkerLost(f"{name} is gone")
        future = self.call(name, method, *arguments).future()
        return lambda limit_s: answer(future, name, limit_s)

    def watch(self, name: str, died: Callable[[Future[Any]], None]) -> None:
        """Call `died` as soon as the worker's process is gone."""

        handle = self._handles[name]

        def told(future: Future[Any]) -> None:
            if self._handles.get(name) is not handle:
                # It was ended, and perhaps another process was started in its place.
                return
            # A broken connection may come back, and then the process was never gone.
            if isinstance(future.exception(), ActorUnavailableError):
                handle.actor.live.remote(self._epoch).future().add_done_callback(told)
            else:
                died(future)

        handle.actor.live.remote(self._epoch).future().add_done_callback(told)

    def end(self, name: str, *, vacate: bool = False, withhold: bool = False) -> None:
        """End a worker, whatever it does, and free its place; with `vacate`, keep the place for the next one.

        A place is kept until `release`, and only if a standby waits on its node. With `withhold` it stays reserved and
        idle until the pool is shut down: Ray chooses devices, and would give this one to the next worker.
        """
        handle = self._handles.pop(name)
        end_actor(handle.actor)
        if withhold:
            self._nodes.pop(name, None)
        elif vacate and name in self._nodes and self._standbys.waits(self._nodes[name]):
            self._vacant[name] = handle
            # The answer is there when the others have formed their group.
            self._standbys.ask(self._nodes[name])
        else:
            self._nodes.pop(name, None)
            self._free(handle.place)

    def release(self, name: str) -> None:
        """Free the place of a worker that has ended, unless another has taken it."""
        if name in self._vacant:
            self._nodes.pop(name)
            self._free(self._vacant.pop(name).place)

    def shutdown(self) -> None:
        """End all of the run; wait at most `FREE_S` until Ray has removed the placement groups."""
        self._standbys.close()
        for name in self:
            self.end(name)
        # Also what this process has not started, or has forgotten.
        self._freeing.append(_background("clear", clear, self._process.run))
        until = time.monotonic() + FREE_S
        for thread in self._freeing:
            thread.join(max(0.0, until - time.monotonic()))

    def _free(self, place: NamedGroup) -> None:
        self._freeing = [*(thread for thread in self._freeing if thread.is_alive()), _freed(place)]


def _asked_for_room(group: PlacementGroup) -> Future[bool]:
    """Ask Ray whether a placement group has its resources; without its GCS, Ray does not answer."""
    answer: Future[bool] = Future()

    def ask() -> None:
        found = False
        try:
            with contextlib.suppress(RayError):
                found = placement_group_table(group).get("state") == "CREATED"
        finally:
            answer.set_result(found)

    # The thread of whoever asks must not wait.
    threading.Thread(target=ask, name="look for room", daemon=True).start()
    return answer


@contextlib.contextmanager
def _starting(name: str) -> Iterator[None]:
    """Raise `RunError` if Ray's GCS does not answer within a minute."""
    try:
        yield
    except GetTimeoutError:
        raise RunError(f"Ray's GCS does not answer, so {name} cannot be started: the head is gone, or busy") from None


def _standing(reference: Any) -> tuple[str, AdoptionReport] | None:
    """Return a worker's answer to `standing`; None if it is gone, or cannot answer."""
    try:
        found: tuple[str, AdoptionReport] | None = ray.get(reference)
        return found
    except RayTaskError as error:
        if isinstance(error.cause, StaleController):
            raise error.cause from None
        log.warning("a worker cannot be adopted", exc_info=error)
    except RayError:
        pass
    return None


def _freed(place: NamedGroup) -> threading.Thread:
    """Start a thread that frees a placement group."""
    return _background("free a place", remove, place)


def _background(name: str, work: Callable[..., None], *arguments: Any) -> threading.Thread:
    """Start a thread that does some work with Ray's GCS: without that it takes a minute, and nobody may be blocked."""

    def run() -> None:
        work(*arguments)
        _return_memory()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def _return_memory() -> None:
    """Return free memory to the system. Each loss leaves some in the malloc arenas of many threads: 50 KB, measured."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    # Only glibc has it, and only glibc has such arenas.
    if trim is not None:
        trim(0)


def answer(future: Future[Any], worker: str, limit_s: float = 0) -> Any:
    """Return a worker's answer.

    Errors of the call are raised as themselves, Ray's own errors as `WorkerLost`. Raises `Interrupted` if the answer is
    not there within `limit_s`.
    """
    try:
        return future.result(timeout=limit_s)
    # First: Ray raises a worker's own TimeoutError as an error of both types.
    except RayTaskError as error:
        raise error.cause from None
    except FutureTimeoutError:
        raise Interrupted(f"{worker} did not answer within {limit_s:g} s") from None
    except RayError as error:
        raise WorkerLost(f"{worker} died: {cause_of_death(error)}") from None


def cause_of_death(error: BaseException) -> str:
    """Return the cause in Ray's message, which is many lines long, in a few words."""
    text = str(error)
    if isinstance(error, ActorPlacementGroupRemoved):
        return "its placement group was removed"
    if "NODE_OUT_OF_MEMORY" in text or "running low on memory" in text:
        return OUT_OF_MEMORY
    if "connection error code 2" in text:
        return KILLED
    if isinstance(error, ActorUnavailableError) or ("node" in text.lower() and "died" in text.lower()):
        return "its node is gone"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    causes = [line for line in lines if "cause" in line.lower() or "exit" in line.lower()]
    return (causes or lines or [type(error).__name__])[0]
