"""The controller: one Ray actor that starts the workers, forms their world, hears of their steps, and writes the run.

It is never in a step's way: workers report in batches, and one long-pending call per worker tells of a death at once.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from raytrain_plus.collective.formation import Formation
from raytrain_plus.collective.rendezvous import RendezvousServer
from raytrain_plus.elastic.commits import Commits
from raytrain_plus.elastic.totals import Totals
from raytrain_plus.elastic.view import View, form_view
from raytrain_plus.errors import Interrupted, RaytrainError, RunError, WaitExpired, WorkerLost
from raytrain_plus.observe.events import EventLog
from raytrain_plus.observe.tensorboard import Scalars
from raytrain_plus.result import Result
from raytrain_plus.runfolder import Lease
from raytrain_plus.training.records import Evaluated, StepRecord
from raytrain_plus.workers.plan import Ended, Export, Place, Plan, Ready
from raytrain_plus.workers.pool import Pool, get

PREPARE_S = 600.0
"""Limit of importing the task, making the data where a node lacks it, and building the model."""
FORM_S = 30.0
"""Limit of forming one world."""
EXPORT_S = 120.0
"""Limit of handing the finished model over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What the driver asks of the controller."""

    plan: Plan
    workers: int
    """How many to start."""
    collective: str
    """`horovod` or `torch`."""
    folder: Path
    """The run's folder; made by the controller once the workers are ready."""
    job_yaml: str
    versions: Mapping[str, str]
    began: float
    """Unix seconds at which Ray was there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Closing:
    """How a run ended, as the driver gets it."""

    result: Result
    error: RaytrainError | None
    """What ended a failed run."""


class Controller:
    """The class behind the actor; the runner makes it one. Methods may run at the same time."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._events: list[dict[str, Any]] = []
        self._stopping = threading.Event()
        self._pool: Pool | None = None
        self._commits: Commits[StepRecord] | None = None
        self._generation = 0
        self._totals = Totals()
        self._metrics: dict[str, float] = {}
        self._evaluated: set[int] = set()
        self._clock_offsets: dict[str, float] = {}
        self._batch_size = self._rows = 1
        self._lease: Lease | None = None
        self._log: EventLog | None = None
        self._scalars: Scalars | None = None

    def run(self, order: Order) -> Closing:
        """Runs the job to its end. Input errors that only a worker can see are raised before a folder is made."""
        self._batch_size, self._rows = order.plan.job.data.batch_size, order.plan.index.rows
        self._pool = Pool(order.plan.job.workers.cpus, order.plan.job.workers.gpus)
        try:
            places, ready = self._bring_up(order)
            self._open(order)
            closing = self._train(order, places, ready)
        finally:
            self._pool.shutdown()
            if self._lease is not None:
                self._lease.release()
            if self._scalars is not None:
                self._scalars.close()
            if self._log is not None:
                self._log.close()
        return closing

    def report(self, worker: str, generation: int, records: Sequence[StepRecord | Evaluated]) -> None:
        """Takes a batch of applied steps and evaluations from a worker; those of another generation are refused."""
        with self._news:
            if generation != self._generation or self._commits is None:
                return
            offset = self._clock_offsets[worker]
            steps = [record for record in records if isinstance(record, StepRecord)]
            for record in self._commits.report(worker, steps):
                self._totals.add(record)
                self._tell(
                    "step_committed",
                    time_s=record.time + offset,
                    step=record.step,
                    epoch=record.step * self._batch_size // self._rows,
                    samples=record.rows,
                    loss=record.loss,
                    seconds=record.seconds,
                )
            for told in records:
                if isinstance(told, Evaluated) and told.step not in self._evaluated:
                    self._evaluated.add(told.step)
                    self._metrics = dict(told.metrics)
                    self._tell("evaluated", step=told.step, metrics=dict(told.metrics))

    def follow(self, cursor: int, timeout_s: float) -> list[dict[str, Any]]:
        """The events from number `cursor` on; waits up to `timeout_s` for the first of them."""
        with self._news:
            self._news.wait_for(lambda: len(self._events) > cursor, timeout_s)
            return self._events[cursor:]

    def stop(self) -> None:
        """Asks the run to stop at the next step boundary."""
        self._stopping.set()

    def _bring_up(self, order: Order) -> tuple[dict[str, Place], dict[str, Ready]]:
        assert self._pool is not None
        names = self._pool.start(order.workers)
        asked = time.time()
        places = self._pool.places(order.plan.job.elastic.wait_s)
        answered = time.time()
        for name, place in places.items():
            # On one machine the clocks are one; between machines this is right to the length of the call.
            offset = (asked + answered) / 2 - place.clock_s
            self._clock_offsets[name] = offset if abs(offset) > answered - asked else 0.0
        ready = self._pool.each("building the task", PREPARE_S, "prepare", dict.fromkeys(names, (order.plan,)))
        return places, ready

    def _open(self, order: Order) -> None:
        order.folder.mkdir(parents=True, exist_ok=True)
        self._lease = Lease(order.folder)
        self._lease.renew()
        (order.folder / "job.yaml").write_text(order.job_yaml)
        self._log = EventLog(order.folder / "events.ndjson")
        self._scalars = Scalars(order.folder / "tensorboard")
        with self._news:
            self._tell(
                "run_started",
                job=order.job_yaml,
                versions=dict(order.versions),
                address=ray.get_runtime_context().gcs_address,
            )

    def _train(self, order: Order, places: Mapping[str, Place], ready: Mapping[str, Ready]) -> Closing:
        assert self._pool is not None
        view = form_view(self._generation, list(places), order.plan.job.data.shards)
        error: RaytrainError | None = None
        ended: dict[str, Ended] = {}
        export: Export | None = None
        try:
            self._form(order, view, places)
            self._announce(order, view, places, ready)
            ended = self._follow_workers(view, order, places)
            digests = {name: end.state_sha256 for name, end in ended.items()}
            if len(set(digests.values())) > 1:
                raise RunError(f"the workers' states differ at the end: {digests}; please report this")
            lead = view.members[0].worker
            export = get(self._pool.call(lead, "export"), lead, EXPORT_S)
            (order.folder / "model.safetensors").write_bytes(export.model)
        except RaytrainError as failure:
            error = failure
        except Exception as failure:
            self._finish("failed", f"{failure}\n{traceback.format_exc()}", None)
            raise
        stopped = any(end.stopped for end in ended.values())
        status = "failed" if error else "stopped" if stopped else "finished"
        sha = next((end.state_sha256 for end in ended.values()), None)
        result = self._totals.result(
            name=order.plan.job.name,
            status=status,
            path=order.folder,
            metrics=self._metrics,
            state_sha256=sha,
            error=str(error) if error else None,
            show=export.show if export else None,
            began=order.began,
        )
        result.save()
        self._finish(status, result.error, sha)
        return Closing(result=result, error=error)

    def _form(self, order: Order, view: View, places: Mapping[str, Place]) -> None:
        """Forms the generation's world of stage 0 over the view's members."""
        assert self._pool is not None
        members = [member.worker for member in view.members]
        server: RendezvousServer | None = None
        where = ("", 0)
        if len(members) > 1 and order.collective == "horovod":
            here = ray.util.get_node_ip_address()
            server = RendezvousServer(here, size=len(members), peers={place.address for place in places.values()})
            where = (here, server.start())
        elif len(members) > 1:
            lead = members[0]
            port = get(self._pool.call(lead, "open_store", FORM_S), lead, FORM_S)
            where = (places[lead].address, port)

        def formation(rank: int, name: str) -> Formation:
            return Formation(
                generation=view.generation,
                name=f"stage0-g{view.generation}",
                rank=rank,
                size=len(members),
                address=places[name].address,
                server=where,
                timeout_s=order.plan.job.elastic.hang_timeout_s,
            )

        calls = {name: (order.collective, formation(rank, name)) for rank, name in enumerate(members)}
        try:
            self._pool.each("forming the world", FORM_S + 5, "form", calls)
        except BaseException:
            if server is not None:
                server.cancel()
            raise
        finally:
            if server is not None:
                server.close()

    def _announce(self, order: Order, view: View, places: Mapping[str, Place], ready: Mapping[str, Ready]) -> None:
        members = [
            {
                "worker": member.worker,
                "pid": places[member.worker].pid,
                "node": places[member.worker].node,
                "cell": member.cell,
                "stage": member.stage,
                "params": ready[member.worker].parameters,
                "shards": list(member.shards),
            }
            for member in view.members
        ]
        with self._news:
            self._commits = Commits([member.worker for member in view.members], first_step=0)
            self._tell(
                "view_formed",
                members=members,
                spares=[],
                collective=order.collective if len(members) > 1 else "none (one worker)",
            )

    def _follow_workers(self, view: View, order: Order, places: Mapping[str, Place]) -> dict[str, Ended]:
        """Waits for the members to train to the end; the first failure that is no echo of another ends the run."""
        assert self._pool is not None
        me = ray.get_runtime_context().current_actor
        pending = {
            self._pool.call(member.worker, "train", me, view.generation, member.shards, 0): member.worker
            for member in view.members
        }
        ended: dict[str, Ended] = {}
        echo: RaytrainError | None = None
        stop_told = False
        deadline: float | None = None
        while pending:
            if self._lease is not None:
                self._lease.renew()
            if self._stopping.is_set() and not stop_told:
                stop_told = True
                deadline = time.monotonic() + order.plan.job.elastic.stop_grace_s
                self._pool.tell("stop")
            ready, _ = ray.wait(list(pending), timeout=0.05)
            for ref in ready:
                name = pending.pop(ref)
                try:
                    ended[name] = get(ref, name, 10.0)
                except (Interrupted, WaitExpired) as error:
                    # A collective that broke: the cause is another worker's, whose own error is on its way.
                    if echo is None:
                        echo = error
                        deadline = deadline or time.monotonic() + 10.0
                except WorkerLost as error:
                    self._lost(places[name], str(error))
                    self._pool.tell("interrupt")
                    raise
                except RaytrainError:
                    self._pool.tell("interrupt")
                    raise
            if pending and deadline is not None and time.monotonic() > deadline:
                break
        if echo is not None:
            raise echo
        if pending:
            raise WaitExpired(f"{', '.join(sorted(pending.values()))} did not come to a step boundary in time to stop")
        return ended

    def _lost(self, place: Place, cause: str) -> None:
        with self._news:
            self._tell("worker_lost", worker=place.worker, pid=place.pid, node=place.node, cause=cause)

    def _finish(self, status: str, error: str | None, sha: str | None) -> None:
        with self._news:
            self._tell(
                "run_finished",
                status=status,
                error=error,
                steps=self._totals.steps,
                samples=self._totals.samples,
                state_sha256=sha,
            )

    def _tell(self, kind: str, *, time_s: float | None = None, **fields: Any) -> None:
        """Writes one event; the caller holds the lock."""
        assert self._log is not None
        assert self._scalars is not None
        event = self._log.write(kind, generation=self._generation, time=time_s, fields=fields)
        self._scalars.add(event)
        self._events.append(event)
        self._news.notify_all()
