"""The controller's Ray actor: the calls that workers, driver and users make."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import ray

from raytrain_plus.controller.engine import Engine
from raytrain_plus.controller.event_loop import Clock
from raytrain_plus.controller.group.formation import InWorld
from raytrain_plus.controller.group.members import Reported
from raytrain_plus.controller.group.nodes import Nodes
from raytrain_plus.controller.record.listeners_actor import listeners_on
from raytrain_plus.controller.record.metrics import Metrics
from raytrain_plus.controller.rescaling import effect, requested
from raytrain_plus.controller.run_order import Closing, Driver, RunOrder
from raytrain_plus.membership import events as e
from raytrain_plus.membership.group_state import Limits
from raytrain_plus.runs.process import lives
from raytrain_plus.training.exchange.step_records import Record
from raytrain_plus.workers.imports import imports_of
from raytrain_plus.workers.messages import Sent, Written
from raytrain_plus.workers.pool import Pool

LOOK_S = 0.5
"""Seconds between two looks at the driver of an attached run."""
UNHEARD_S = 60.0
"""Seconds without a call of the driver after which it counts as gone, if its process cannot be seen from here."""
LINGER_S = 5.0
"""Seconds for which the controller of a detached run can still be asked how the run ended."""


class RayHost:
    """The Ray node and actor that this process is."""

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


def drives(lives: bool | None, unheard_s: float) -> bool:
    """Return whether the driver is still there: its process `lives` if known, else it was heard a moment ago."""
    return unheard_s <= UNHEARD_S if lives is None else lives


class Controller:
    """The controller; `launch.cluster.begin` creates its Ray actor. Public methods may run while `run` does."""

    def __init__(self, order: RunOrder, limits: Limits, began: float, driver: Driver | None = None) -> None:
        """Prepare the run of this order; `began`: Unix seconds at which Ray was available.

        An attached run has a `driver`, and this process ends with it.
        """
        job = order.plan.job
        self._job = job
        self._over = True
        """Whether the job has not started or has ended."""
        self._ended = threading.Event()
        self._heard = time.monotonic()
        """When the driver called last."""
        self._engine = Engine(
            order,
            limits,
            began,
            workers=Pool(
                job.workers.cpus,
                job.workers.gpus,
                imports_of(order.plan) if job.workers.standby else None,
                accelerator=job.workers.accelerator,
            ),
            nodes=Nodes(),
            metrics=Metrics(job.name),
            host=RayHost(),
            clock=Clock(),
            listeners=listeners_on,
        )
        if driver is not None and driver.identity:
            # Here, and not in `run`: a driver that dies before it calls that would leave this process behind.
            threading.Thread(target=self._end_with, args=(driver,), name="driver", daemon=True).start()

    def run(self, detached: bool = False) -> Closing:
        """Run the job to its end. Input errors that only a worker can see are raised before a folder is made.

        If `detached`, nobody else ends this actor: it exits `LINGER_S` seconds after the run, so that followers hear
        the end.
        """
        self._over = False
        me = ray.get_runtime_context().current_actor
        try:
            return self._engine.run()
        finally:
            self._over = True
            self._ended.set()
            if detached:
                threading.Timer(LINGER_S, ray.kill, [me]).start()

    def report(self, worker: str, generation: int, records: Sequence[Record]) -> None:
        """Accept a batch of applied steps and evaluations from a worker."""
        self._engine.loop.put(Reported(worker, generation, records))

    def written(self, told: Written) -> None:
        """Record that a worker has written its share of a checkpoint, or could not."""
        self._engine.loop.put(told)

    def joined(self, worker: str, generation: int, form_s: float, moved_bytes: int) -> None:
        """Record that a worker is in its world and has the state: see `InWorld`."""
        self._engine.loop.put(InWorld(worker, generation, form_s, moved_bytes))

    def copied(self, sent: Sent) -> None:
        """Record that a copy of a worker's state is in its buddy's memory."""
        self._engine.loop.put(sent)

    def follow(self, cursor: int, timeout_s: float) -> list[dict[str, Any]]:
        """Return the events from number `cursor` on; wait up to `timeout_s` for the first of them."""
        self._heard = time.monotonic()
        return self._engine.journal.follow(cursor, timeout_s)

    def folder(self) -> str | None:
        """Return the run's folder; None if nobody runs the job."""
        return None if self._over else self._engine.run_folder.where

    def stop(self) -> None:
        """Ask the run to stop at the next step boundary."""
        self._engine.loop.put(e.Stop())

    def _end_with(self, driver: Driver) -> None:
        """End this process when the driver's has ended; a stop that was requested before is completed first."""
        while drives(lives(driver.pid, **driver.identity), time.monotonic() - self._heard):
            time.sleep(LOOK_S)
        # Each wait of a run that stops has a limit.
        while self._engine.stopping and not self._ended.wait(LOOK_S):
            continue
        os._exit(0)

    def rescale(self, minimum: int | None, maximum: int | None, spares: int | None) -> str:
        """Request other numbers of workers; None keeps a number. Return what that changes, in words.

        Raises `InputError` if the job does not support them.
        """
        group = self._engine.machine.group
        wanted = requested(self._job, group.limits, minimum, maximum, spares)
        self._engine.loop.put(wanted)
        return effect(group.limits, wanted, len(group.seats))
