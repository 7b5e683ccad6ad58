"""Build prepared workers and their assignments, without Ray. Not a test itself."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from raytrain_plus.collective.invitation import Invitation
from raytrain_plus.data.reading.microbatches import StepBatches
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.job.data_settings import Data
from raytrain_plus.job.settings import Job
from raytrain_plus.membership.group_state import Group, Limits
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.membership.sizes import SizeTable
from raytrain_plus.parallel.pipeline.message import KNOWN
from raytrain_plus.state.stages import REST
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.training.exchange.thread_control import RowSpan
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.workers.messages import WHOLE, Assignment, Charter, Layers, Plan, PreparedReport, ShareOf
from raytrain_plus.workers.preparation.prepared import Prepared
from raytrain_plus.workers.states.held_state import OwnState
from raytrain_plus.workers.states.saver import Saver
from raytrain_plus.workers.states.state_copier import Copier
from raytrain_plus.workers.states.state_source import StateSource
from raytrain_plus.workers.worker import Worker
from tests.support.datasets import write
from tests.support.exact_steps import SHARDS, batches, state_of

SECOND = Stage(1, 2)
SOLO = Invitation(generation=0, name="ring", rank=0, size=1, address="", server=("", 0), timeout_s=10)

CHARTER = Charter(
    group=Group(
        limits=Limits(
            sizes=SizeTable(minimum=1, maximum=1, shards=SHARDS), spares=0, steps=9, max_failures=None, expected=1
        )
    ),
    number=12,
    first_step=0,
    partitions={},
)


class Feeds:
    """Makes batches in memory; `before` is called before each step's."""

    def __init__(self, before: Callable[[int], None] = lambda step: None) -> None:
        self._before = before

    def of_member(self, stage: Stage, shards: Sequence[int], first_step: int, stack: ExitStack) -> Any:
        return SimpleNamespace(get=functools.partial(self._get, shards), more=lambda: None)

    failed: RowSpan | None = None

    def named(self, place: RowSpan) -> str:
        return f"of shard {place.shard} in step {place.step}"

    def evaluation(self, stage: Stage) -> None:
        return None

    def _get(self, shards: Sequence[int], step: int, timeout_s: float, check: Callable[[], None]) -> StepBatches:
        self._before(step)
        return StepBatches(dict(batches(step, shards)), 0.0)


class Controller:
    """Notes the calls that it gets."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, method: str) -> Any:
        called = SimpleNamespace(remote=lambda *arguments: self.calls.append((method, *arguments)))
        called.options = lambda **_: called
        return called


def plan_of(folder: Path, steps: int = 2) -> Plan:
    """Return the plan of a job whose data, training and held out, is written below `folder`."""
    for name in ("data", "held_out"):
        write(folder / name / "a.parquet", 8 * SHARDS)
    data = Data(path="data", batch_size=4 * SHARDS, shards=SHARDS)
    job = Job(name="small", task="tasks:Small", data=data, steps=steps)
    return Plan(
        job=job,
        pickled_task=None,
        roots=(),
        steps=steps,
        data=parquet_source(folder / "data"),
        held_out=parquet_source(folder / "held_out"),
        collective="torch",
        folder=str(folder / "run"),
    )


def member(
    folder: Path,
    *,
    steps: int = 2,
    build: Callable[[Layers], TrainState] = lambda layers: state_of(),
    feeds: Any = None,
) -> Prepared:
    """Return a prepared worker that holds the whole model of `build`."""
    plan = plan_of(folder, steps)
    own = OwnState(build)
    one = own.build(WHOLE)
    copier = Copier("worker-0", own.holding, 1)
    return Prepared(
        plan=plan,
        task=one.task,
        device=torch.device("cpu"),
        classes=KNOWN,
        feeds=Feeds() if feeds is None else feeds,
        own=own,
        source=StateSource("worker-0", own, copier),
        copier=copier,
        saver=Saver(LocalFolder(folder / "run"), own.holding, None, best=False),
    )


def worker_of(prepared: Prepared, **changes: Any) -> Worker:
    """Return a worker that has been prepared so."""
    ready = PreparedReport(parameters=0, state_bytes=0)
    worker = Worker("worker-0", prepare=lambda name, plan: (prepared, ready), listen=lambda: None, **changes)
    worker.prepare(prepared.plan, 1)
    return worker


def assigned(**changes: Any) -> Assignment:
    """Return the assignment of a worker that trains the whole model alone from step 0 on."""
    assignment = Assignment(
        generation=0,
        layers=WHOLE,
        ring=SOLO,
        replica=None,
        shards=tuple(range(SHARDS)),
        first_step=0,
        lacks=None,
        gives=0,
        buddy=None,
        copies=False,
        share=ShareOf(generation=12, writer=0, writers=1, holders={REST: (0,)}),
        seat=0,
        charter=CHARTER,
        evaluated=-2,
    )
    return replace(assignment, **changes)


def in_background(work: Callable[[], Any]) -> threading.Thread:
    """Start `work` on a thread."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
