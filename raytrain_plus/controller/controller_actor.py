"""The controller's Ray actor: the calls that workers, driver and users make."""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import cached_property
from typing import Any

import ray

from raytrain_plus.controller.adopting import requests_of
from raytrain_plus.controller.completing import completed
from raytrain_plus.controller.engine import Engine
from raytrain_plus.controller.event_loop import Clock
from raytrain_plus.controller.group.formation import InWorld
from raytrain_plus.controller.group.members import Reported
from raytrain_plus.controller.group.monitor import Requested
from raytrain_plus.controller.group.nodes import Nodes
from raytrain_plus.controller.record.listeners_actor import listeners_on
from raytrain_plus.controller.record.metrics import Metrics
from raytrain_plus.controller.rescaling import effect, requested
from raytrain_plus.controller.run_order import Closing, Driver, RunOrder
from raytrain_plus.controller.succession import ANSWER_S, MOST_STARTS, Hopeless, Succession, began, take
from raytrain_plus.errors import RaytrainError, RunError, StaleController
from raytrain_plus.membership import events as e
from raytrain_plus.membership.group_state import Limits
from raytrain_plus.ray_compat import draining_nodes, restarts, started_again
from raytrain_plus.result import Result
from raytrain_plus.runs.history import Past
from raytrain_plus.runs.process import lives
from raytrain_plus.storage.retry import LAST_PAUSES_S, retry
from raytrain_plus.training.exchange.step_records import Record
from raytrain_plus.workers.imports import imports_of
from raytrain_plus.workers.messages import Sent, Written
from raytrain_plus.workers.pool import Pool
from raytrain_plus.workers.run_actors import clear

LOOK_S = 0.5
"""Seconds between two looks at the driver of an attached run."""
UNHEARD_S = 60.0
"""Seconds without a call of the driver after which it counts as gone, if its process cannot be seen from here."""
NOTED_S = 5.0
"""Maximum seconds until a request is in the record; then it is answered all the same."""
REPORT_S = 1.0
"""Maximum seconds for which a report waits until this process has taken the run over."""
TAKE_OVER_S = 60.0
"""Maximum seconds until the controller of a driver that has ended has taken its run over, to end it in order."""
LINGER_S = 5.0
"""Seconds for which the controller of a detached run can still be asked how the run ended."""


log = logging.getLogger(__name__)


class RayHost:
    """The Ray node and actor that this process is."""

    def __init__(self, moves: bool) -> None:
        """`moves`: whether the actor may move to another node; beside the driver of an attached run it stays."""
        self._moves = moves

    @cached_property
    def address(self) -> str:
        return str(ray.util.get_node_ip_address())

    @property
    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    @property
    def cluster(self) -> str:
        return str(ray.get_runtime_context().gcs_address)

    @property
    def name(self) -> str:
        return ray.get_runtime_context().get_actor_name() or ""

    @cached_property
    def actor(self) -> Any:
        return ray.get_runtime_context().current_actor

    def move(self) -> None:
        leaving = draining_nodes() or {}
        if self._moves and any(node["Alive"] and node["NodeID"] not in leaving for node in ray.nodes()):
            log.warning("the controller's node will leave, so the controller moves to another one")
            # Ray starts it again where there is room, and not on a node that is draining.
            ray.kill(self.actor, no_restart=False)


def drives(lives: bool | None, unheard_s: float) -> bool:
    """Return whether the driver is still there: its process `lives` if known, else it was heard a moment ago."""
    return unheard_s <= UNHEARD_S if lives is None else lives


def _waits(error: OSError) -> None:
    log.warning("the storage does not let this controller take the run over yet: %s", error)


class Controller:
    """The controller; `launch.cluster.begin` creates its Ray actor. Public methods may run while `run` does.

    Ray starts it again if its process dies, and repeats the calls that it has not answered.
    """

    def __init__(
        self, limits: Limits, began: float, driver: Driver | None, detached: bool, *pickled_order: bytes
    ) -> None:
        """Prepare the run of this order, in pieces; `began`: Unix seconds at which Ray was available.

        An attached run has a `driver`, and ends with it. If `detached`, nobody else ends this actor: it exits
        `LINGER_S` seconds after the run, so that followers hear the end.
        """
        self._order: RunOrder = pickle.loads(b"".join(pickled_order))
        self._limits, self._began, self._detached = limits, began, detached
        self._host = RayHost(moves=detached)
        self._over = True
        """Whether the job has not started or has ended."""
        self._ended = threading.Event()
        self._heard = time.monotonic()
        """When the driver called last."""
        self._closing: Future[Closing] = Future()
        self._starting = threading.Lock()
        self._started = False
        self._engine: Future[Engine] = Future()
        """Known once this process controls the run, which an earlier one may have left."""
        self._again = started_again()
        self._epoch = max(1, restarts()) if self._again else 0
        """Of the calls to workers: it rises with every process of this controller."""
        if driver is not None and driver.identity:
            # Here, and not in `run`: a driver that dies before it calls that would leave this process behind.
            threading.Thread(target=self._end_with, args=(driver,), name="driver", daemon=True).start()
        if self._again:
            self._start()

    def run(self) -> Closing:
        """Run the job to its end. Input errors that only a worker can see are raised before a folder is made."""
        self._start()
        return self._closing.result()

    def _start(self) -> None:
        """Begin the run, or go on with it, unless that was done before."""
        with self._starting:
            if not self._started:
                self._started = True
                threading.Thread(target=self._run, name="controller", daemon=True).start()

    def _run(self) -> None:
        self._over = False
        try:
            self._closing.set_result(self._continued() if self._again else self._begun(self._order))
        except BaseException as error:
            if isinstance(error, StaleController):
                os._exit(1)
            if not self._engine.done():
                log.exception("the run cannot go on")
                self._engine.set_exception(error)
            elif self._engine.exception() is None and self._engine.result().replaced:
                # The process that took this one's place has the same actor, which must not be ended.
                os._exit(1)
            self._closing.set_exception(error)
        finally:
            self._over = True
            self._ended.set()
            if self._detached:
                threading.Timer(LINGER_S, ray.kill, [self._host.actor]).start()

    def _continued(self) -> Closing:
        """Go on with what an earlier process of this controller has left, or begin if it had not begun."""
        pool = self._pool()
        run = began(self._order, self._host.name)
        if run is None:
            workers = pool.adopt(self._epoch, ANSWER_S).values()
            pool.shutdown()
            if any(one.charter is not None for one in workers):
                raise RunError("another controller has taken this run over; this one stops and writes no more")
            if self._epoch >= MOST_STARTS:
                raise RunError(f"the controller died {MOST_STARTS} times before the run began")
            return self._begun(self._order)

        def taken() -> tuple[RunOrder, Succession | Hopeless | Result | None]:
            return take(run, self._order, pool, self._host.name, self._epoch)

        # The workers train on meanwhile.
        order, left = retry(taken, LAST_PAUSES_S, _waits)
        if isinstance(left, Result):
            self._engine.set_exception(RunError("the run has ended"))
            pool.shutdown()
            return Closing(result=left, error=RunError(left.error) if left.error else None)
        if left is None:
            pool.shutdown()
            return self._begun(order, requests_of(order.past or Past()))
        engine = self._engine_of(order, pool)
        if isinstance(left, Hopeless):
            self._engine.set_exception(left.error)
            return engine.give_up(left)
        return engine.run(left, lambda: self._engine.set_result(engine))

    def _begun(self, order: RunOrder, requests: Sequence[e.Stop | e.Rescale] = ()) -> Closing:
        """Run the job with new workers; `requests`: what the run was asked for before."""
        engine = self._engine_of(completed(order, self._limits, self._host, time.time), self._pool())
        for request in requests:
            engine.loop.put(request)
        self._engine.set_result(engine)
        return engine.run()

    def _pool(self) -> Pool:
        job = self._order.plan.job
        return Pool(
            self._host.name,
            job.workers.cpus,
            job.workers.gpus,
            imports_of(self._order.plan) if job.workers.standby else None,
            accelerator=job.workers.accelerator,
            epoch=self._epoch,
            wait_s=job.elastic.wait_s,
        )

    def _engine_of(self, order: RunOrder, pool: Pool) -> Engine:
        return Engine(
            order,
            self._limits,
            self._began,
            workers=pool,
            nodes=Nodes(),
            metrics=Metrics(order.plan.job.name),
            host=self._host,
            clock=Clock(),
            listeners=listeners_on,
        )

    def report(self, worker: str, generation: int, records: Sequence[Record]) -> int:
        """Accept a batch of applied steps and evaluations from a worker; return up to which step the record is durable.

        What is reported of later steps is lost if this process dies, and the worker keeps it.
        """
        # A worker sends a report again; while this process takes the run over, it has threads for other calls, too.
        engine = self._engine.result(REPORT_S)
        engine.loop.put(Reported(worker, generation, records))
        return engine.record.durable

    def written(self, told: Written) -> None:
        """Record that a worker has written its share of a checkpoint, or could not."""
        self._engine.result().loop.put(told)

    def joined(self, worker: str, generation: int, form_s: float, moved_bytes: int) -> None:
        """Record that a worker is in its world and has the state: see `InWorld`."""
        self._engine.result().loop.put(InWorld(worker, generation, form_s, moved_bytes))

    def copied(self, sent: Sent) -> None:
        """Record that a copy of a worker's state is in its buddy's memory."""
        self._engine.result().loop.put(sent)

    def follow(self, cursor: int, timeout_s: float) -> list[dict[str, Any]]:
        """Return the events from number `cursor` on; wait up to `timeout_s` for the first of them."""
        self._heard = time.monotonic()
        try:
            return self._engine.result().journal.follow(cursor, timeout_s)
        except RaytrainError:
            # There is no record to follow: `run` says why.
            return []

    def folder(self) -> str | None:
        """Return the run's folder; None if nobody runs the job."""
        return None if self._over else self._engine.result().run_folder.where

    def stop(self) -> None:
        """Ask the run to stop at the next step boundary."""
        self._request("stop", e.Stop())

    def _end_with(self, driver: Driver) -> None:
        """End this process and the workers when the driver's process has ended.

        A stop that was requested before is completed first.
        """
        while drives(lives(driver.pid, **driver.identity), time.monotonic() - self._heard):
            time.sleep(LOOK_S)
        if self._again:
            wait([self._engine], TAKE_OVER_S)
        # Each wait of a run that stops has a limit.
        while self._stopping and not self._ended.wait(LOOK_S):
            continue
        try:
            if self._known:
                # Otherwise it would replace the workers that end.
                self._engine.result().halt()
            clear(self._host.name)
        finally:
            # Not started again, as after an exit.
            ray.kill(self._host.actor)

    @property
    def _known(self) -> bool:
        """Whether the engine of the run is known, and has not ended."""
        return self._engine.done() and self._engine.exception() is None and not self._over

    @property
    def _stopping(self) -> bool:
        """Whether the run was asked to stop."""
        return self._known and self._engine.result().stopping

    def rescale(self, minimum: int | None, maximum: int | None, spares: int | None) -> str:
        """Request other numbers of workers; None keeps a number. Return what that changes, in words.

        Raises `InputError` if the job does not support them.
        """
        group = self._engine.result().machine.group
        wanted = requested(self._order.plan.job, group.limits, minimum, maximum, spares)
        self._request("rescale", wanted, minimum=wanted.minimum, maximum=wanted.maximum, spares=wanted.spares)
        return effect(group.limits, wanted, len(group.seats))

    def _request(self, what: str, message: e.Stop | e.Rescale, **numbers: int) -> None:
        """Pass a request on once it is in the record: a controller that takes this one's place must know of it."""
        noted = threading.Event()
        loop = self._engine.result().loop
        loop.put(Requested(what, numbers, noted.set))
        loop.put(message)
        noted.wait(NOTED_S)
