"""A controller without Ray: its real loop and parts, with workers, nodes and clocks that a test moves by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from raytrain_plus.controller.engine import Engine
from raytrain_plus.controller.event_loop import Clock
from raytrain_plus.controller.group.formation import InWorld
from raytrain_plus.controller.group.members import Reported
from raytrain_plus.controller.run_order import RunOrder
from raytrain_plus.data.ledger.ledger import NOTE
from raytrain_plus.data.sources.parquet_source import ParquetSource
from raytrain_plus.data.sources.source import Source
from raytrain_plus.errors import WorkerLost
from raytrain_plus.job.data_settings import Data
from raytrain_plus.job.settings import Job, Workers
from raytrain_plus.membership.group_state import Limits
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.observe.gauges import GaugeValues
from raytrain_plus.parallel.sizing import size_table
from raytrain_plus.runs.history import Past
from raytrain_plus.training.exchange.step_records import StepRecord
from raytrain_plus.workers.messages import AdoptionReport, Assignment, Outcome, Plan, PreparedReport, WorkerLocation
from tests.support.listeners import FakeListeners

SHARDS = 2
NOTES = np.zeros(SHARDS, NOTE).tobytes()


class Call(NamedTuple):
    """One call of the controller to a worker."""

    worker: str
    method: str
    arguments: tuple[Any, ...]


class FakeWorkers:
    """The workers of a run, as `workers.pool.Pool` offers them: calls are recorded, and a test answers them."""

    need = "1 CPU"

    def __init__(self) -> None:
        self.calls: list[Call] = []
        """All calls so far, pulses apart."""
        self.exports: Callable[[str, str, tuple[Any, ...]], Any] = lambda worker, method, arguments: []
        """What a call that is waited for returns: of worker, method and arguments."""
        self.reports: Callable[[], Mapping[str, AdoptionReport]] = dict
        """What the workers say that another controller has left."""
        self.stood_by: dict[str, str] = {}
        """The node of each member that a standby was asked for."""
        self.vacant: list[str] = []
        """The workers whose places are kept."""
        self.withheld: list[str] = []
        """The workers whose places nobody gets."""
        self.left_s = dict[str, float]()
        """For how many seconds the starts of these workers may last; an hour for others."""
        self.homeless: set[str] = set()
        """The workers for which there is no room."""
        self.restarted: list[str] = []
        """The workers that were started again."""
        self._taken = 0
        self._alive: dict[str, Callable[[Future[Any]], None]] = {}
        self._asked: dict[tuple[str, str], list[Future[Any]]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._alive

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._alive))

    def start(self, name: str) -> None:
        self._alive[name] = lambda future: None

    def start_left_s(self, name: str) -> float:
        return self.left_s.get(self._known(name), 3600.0)

    def lacks_room(self, name: str) -> bool:
        return self._known(name) in self.homeless

    def restart(self, name: str) -> None:
        self.restarted.append(self._known(name))
        self.left_s.pop(name)
        self._asked = {call: futures for call, futures in self._asked.items() if call[0] != name}

    def watch(self, name: str, died: Callable[[Future[Any]], None]) -> None:
        self._alive[name] = died

    def actor(self, name: str) -> str:
        return f"the actor of {self._known(name)}"

    def call(self, name: str, method: str, *arguments: Any) -> str:
        self.calls.append(Call(self._known(name), method, arguments))
        return f"{method} of {name}"

    def ask(self, name: str, answered: Callable[[Future[Any]], None], method: str, *arguments: Any) -> None:
        if method == "activity":
            return
        self.call(name, method, *arguments)
        future: Future[Any] = Future()
        future.add_done_callback(answered)
        self._asked.setdefault((name, method), []).append(future)

    def begin(self, name: str, method: str, *arguments: Any) -> Callable[[float], Any]:
        return lambda limit_s: self.exports(name, method, arguments)

    def stand_by(self, nodes: Mapping[str, str]) -> None:
        self.stood_by = dict(nodes)

    def end(self, name: str, *, vacate: bool = False, withhold: bool = False) -> None:
        del self._alive[self._known(name)]
        if withhold:
            self.withheld.append(name)
        if vacate:
            self.vacant.append(name)

    def release(self, name: str) -> None:
        self.vacant.remove(name)

    def shutdown(self) -> None:
        self._alive.clear()

    def adopt(self, epoch: int, limit_s: float) -> Mapping[str, AdoptionReport]:
        found = self.reports()
        self._alive = {name: lambda future: None for name in found}
        return found

    def owes(self, name: str, method: str) -> bool:
        """Return whether a call of this method has no answer yet."""
        return bool(self._asked.get((name, method)))

    def answer(self, name: str, method: str, with_: object = None) -> None:
        """Answer the oldest call of this method that has no answer yet."""
        future = self._asked[name, method].pop(0)
        if isinstance(with_, Exception):
            future.set_exception(with_)
        else:
            future.set_result(with_)

    def die(self, name: str, cause: str = "", error: Exception | None = None) -> None:
        """End the worker's process: none of its calls will be answered. `error`: what its endless call raises."""
        lost = WorkerLost(f"{name} died: {cause}") if error is None else error
        died = self._alive[name]
        for (worker, _), futures in self._asked.items():
            while worker == name and futures:
                if error is None:
                    futures.pop().set_exception(lost)
                else:
                    futures.pop()
        future: Future[Any] = Future()
        future.set_exception(lost)
        died(future)

    def take(self, *methods: str) -> list[tuple[str, str]]:
        """Return the calls of these methods, or of all, since the last `take`, in order."""
        told, self._taken = self.calls[self._taken :], len(self.calls)
        return [call[:2] for call in told if call.method in methods or not methods]

    def _known(self, name: str) -> str:
        assert name in self._alive, f"{name} is gone"
        return name


class FakeNodes:
    """Watches no node; records what it should probe."""

    suspected: Set[str] = frozenset()

    def start(self, put: Callable[[object], None]) -> None: ...

    def suspect(self, nodes: Set[str]) -> None:
        self.suspected = nodes

    def close(self) -> None: ...


class FakeMetrics:
    """Exports no metrics."""

    due = False

    def show(self, values: GaugeValues) -> None: ...


class FakeHost:
    address = "127.0.0.1"
    node = "here"
    cluster = "127.0.0.1:6379"
    name = "run/1"
    actor = "the controller"
    moved = 0

    def move(self) -> None:
        self.moved += 1


class FakeTime:
    """Both clocks, which stand still until a test moves them."""

    def __init__(self) -> None:
        self.now = 1_000.0

    @property
    def clock(self) -> Clock:
        return Clock(now=lambda: self.now, unix=lambda: 1e9 + self.now)


class LaterThread:
    """Stands for an executor of one thread: what is submitted runs when its turn comes."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def submit(self, act: Callable[..., None], *arguments: Any) -> None:
        self.waiting.append(lambda: act(*arguments))

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self.waiting.clear()


def job_of(minimum: int = 1, maximum: int = 2, spares: int = 0, **settings: Any) -> Job:
    data = Data(path="x", batch_size=8, shards=SHARDS)
    workers = Workers(min=minimum, max=maximum, spares=spares)
    return Job(name="x", task="t:T", data=data, workers=workers, **{"steps": 4, **settings})


def source_of(rows: int) -> Source:
    return ParquetSource(
        named="x",
        root="",
        files=("x",),
        file_bytes=(1,),
        file_footers=("f",),
        unit_file=(0,),
        unit_group=(0,),
        unit_rows=(rows,),
        file_groups=((rows,),),
        unit_bytes=(1,),
        schema=pa.schema([("x", pa.float32())]),
        fingerprint="f",
        sights=(),
    )


def order_of(job: Job, folder: Path, past: Past | None = None) -> RunOrder:
    plan = Plan(
        job=job,
        pickled_task=None,
        roots=(".",),
        steps=job.steps or 0,
        data=source_of(80),
        held_out=None,
        collective="torch",
        folder=str(folder),
    )
    return RunOrder(
        plan=plan,
        sizes=size_table(job),
        fresh=False,
        past=past,
        older=False,
        task_modules={},
        job_yaml=job.to_yaml(),
        versions={},
    )


def location_of(name: str, node: str = "n") -> WorkerLocation:
    return WorkerLocation(worker=name, pid=1, node=node, address="127.0.0.1")


def ready_of(**ready: Any) -> PreparedReport:
    return PreparedReport(**{"parameters": 10, "state_bytes": 80, **ready})


class Run:
    """A run whose workers do what a test says, and everything that the controller has told."""

    def __init__(self, folder: Path, job: Job, past: Past | None = None, **changes: Any) -> None:
        """Prepare a run of this job, which `begin` begins.

        `past`: what it resumes from; `changes`: other limits than those of the job.
        """
        order, workers = order_of(job, folder, past), job.workers
        limits = {
            "sizes": order.sizes,
            "spares": workers.spares,
            "steps": order.plan.steps,
            "max_failures": job.elastic.max_failures,
            "expected": (workers.max or workers.min) + workers.spares,
        }
        self.workers, self.nodes, self.time = FakeWorkers(), FakeNodes(), FakeTime()
        self.listeners = FakeListeners()
        self.limits = Limits(**{**limits, **changes})
        self.order = order
        self.engine = self.engine_of(order)

    def engine_of(self, order: RunOrder) -> Engine:
        """Return a controller of the run with this order, and these workers."""
        metrics: Any = FakeMetrics()
        return Engine(
            order,
            self.limits,
            0.0,
            workers=self.workers,
            nodes=self.nodes,
            metrics=metrics,
            host=FakeHost(),
            clock=self.time.clock,
            listeners=lambda listened, node, controller: self.listeners,
        )

    def begin(self) -> None:
        """Start the first workers."""
        self.engine.begin(None)
        self.turn()

    def turn(self, seconds: float = 0.0) -> None:
        """Advance the clock and handle everything due."""
        self.time.now += seconds
        self.engine.turn(0)

    def until(self, done: Callable[[], bool]) -> None:
        """Handle what the controller's own threads report, until something is done."""
        for _ in range(20):
            if done():
                return
            self.engine.turn(1.0)
        raise AssertionError("nothing more happens")

    def put(self, message: object) -> None:
        """Have a message handled."""
        self.engine.loop.put(message)
        self.turn()

    def prepare(self, name: str, node: str = "n", **ready: Any) -> None:
        """Prepare a started worker until it can join."""
        self.workers.answer(name, "location", location_of(name, node))
        self.turn()
        self.workers.answer(name, "clock", 1e9 + self.time.now)
        self.workers.answer(name, "prepare", ready_of(**ready))
        self.turn()

    def train(self, *names: str) -> None:
        """Start a run with these workers, and have them join its first world."""
        for name in names:
            self.prepare(name)
        self.join(*names)

    def join(self, *names: str) -> None:
        """Have these members report that they are in their world."""
        for name in names:
            self.put(InWorld(name, self.generation, 0.25, 0))

    def report(self, name: str, *steps: int) -> None:
        """Have a member report that it has applied these steps."""
        records = [
            StepRecord(step=step, rows=8, loss=1.0, seconds=0.1, waited_s=0.0, time=1e9 + self.time.now, notes=NOTES)
            for step in steps
        ]
        self.put(Reported(name, self.generation, records))

    def leave(self, name: str, holds: int | None, why: Any, **outcome: Any) -> None:
        """Have a member come out of the generation."""
        stage = None if holds is None else Stage()
        self.workers.answer(name, "serve", Outcome(**{"holds": holds, "why": why, "stage": stage, **outcome}))
        self.turn()

    def finish(self, names: Sequence[str], sha: str = "ab") -> None:
        """Have the members make the last step, and come out."""
        for name in names:
            self.leave(name, 3, "finished", state_sha256=sha)

    def export(self, lead: str, show: str | None = None) -> None:
        """Let the exporter's thread end, and show the model."""
        self.until(lambda: self.workers.owes(lead, "show"))
        self.workers.answer(lead, "show", show)
        self.turn()

    def assignment(self, name: str) -> Assignment:
        """Return what a member was given last."""
        found: Assignment = [call for call in self.workers.calls if call[:2] == (name, "serve")][-1].arguments[1]
        return found

    @property
    def generation(self) -> int:
        return self.engine.machine.group.generation

    @property
    def phase(self) -> str:
        return self.engine.machine.group.phase.name

    @property
    def events(self) -> list[dict[str, Any]]:
        return self.engine.journal.follow(0, 0)

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events]

    def told(self, kind: str) -> dict[str, Any]:
        """Return the last event of that kind."""
        return [event for event in self.events if event["kind"] == kind][-1]
