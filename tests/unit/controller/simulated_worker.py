"""A worker of a simulated run: it runs the real loop of training, replayed from the history of what has happened to it.

As in `membership.switching`, a worker is a function of its history: a sum that is complete, a request, a share that is
written. Its state is numbers that tell the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reading.microbatches import StepBatches
from raytrain_plus.errors import Interrupted
from raytrain_plus.job.settings import Job
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.membership.pieces import Piece, Pieces
from raytrain_plus.parallel.pipeline.partition import Layer
from raytrain_plus.state.entry import StateTensor
from raytrain_plus.state.held import HeldTensor
from raytrain_plus.state.named import entry_of
from raytrain_plus.state.stages import REST, layer_of
from raytrain_plus.state.stored.checkpoint import Copy
from raytrain_plus.state.stored.shares import share_of
from raytrain_plus.task import Task
from raytrain_plus.training.exchange.applied import Applied
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.early_stop import Evaluations
from raytrain_plus.training.exchange.header import Flags
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.passes.metric_sums import Means, MetricSums
from raytrain_plus.training.step.loop import Companions, Evaluation, Span, StepTimeouts, train
from raytrain_plus.workers.messages import Assignment, Layers, ShareOf, Written
from tests.unit.controller.fakes import NOTES, SHARDS

ROWS = 4
METRIC = "m"

Entries = tuple[Any, ...]


class Waits(BaseException):
    """The history ends: the worker waits. No error, which the code under test might handle."""

    def __init__(self, what: str, step: int = -1, flags: Flags | None = None) -> None:
        super().__init__(what)
        self.what, self.step, self.flags = what, step, flags


class SimulatedTask(Task):
    """A task without a summary."""


# The state, which tells its step


def whole_state(step: int, layers: Sequence[Layer], slices: int) -> dict[str, torch.Tensor]:
    """Return the tensors of the whole state after `step`."""
    units = [f"{layer.name}@{number}" for layer in layers for number in range(slices) if layer.sliced_bytes]
    weights = [f"{unit}.w" for unit in (*(layer.name for layer in layers), *units)] or ["w"]
    tensors = {f"param/{name}": torch.full((ROWS, 2), float(step)) for name in weights}
    tensors |= {f"optim/{name}/m": torch.full((ROWS, 2), float(step)) for name in weights}
    return tensors | {"scheduler/t": torch.tensor(float(step), dtype=torch.float64)}


def weights_in(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return [name.removeprefix("param/") for name in tensors if name.startswith("param/")]


def written_rows(name: str, rows: Pieces) -> list[Piece]:
    """Return the rows that a writer writes of a tensor, of the rows of weights that it writes."""
    weight = name.split("/")[1]
    return [Piece(name, first, last) for held, first, last in rows if held == weight]


def copies_of(tensors: Mapping[str, torch.Tensor], share: ShareOf) -> list[Copy]:
    """Return what a writer writes of the tensors that it holds, as `state.hostcopy` does."""
    by_rows = [name for name in tensors if share.rows is not None and name.startswith(("param/", "optim/"))]
    shapes = {name: (tuple(value.shape), value.nbytes) for name, value in tensors.items() if name not in by_rows}
    pieces = share_of(share.writer, shapes, lambda name: share.holders_of(layer_of(name) or REST))
    pieces += [piece for name in by_rows for piece in written_rows(name, share.rows or Pieces())]
    found = []
    for piece in pieces:
        value = tensors[piece.name]
        rows = value[piece.first : piece.last] if value.dim() else value
        data = np.frombuffer(rows.numpy().tobytes(), np.uint8)
        found.append(Copy(piece, str(value.dtype).removeprefix("torch."), tuple(value.shape), data))
    return found


def tree_of(tensors: Mapping[str, torch.Tensor], share: ShareOf) -> Any:
    names = weights_in(tensors)
    rest: dict[str, Any] = {
        "scheduler": None,
        "scales": {},
        "persistent": [],
        "classes": None,
        "counts": {},
        "rules": {},
    }
    tree: Any = {"optimizer": {name: {} for name in names}, "groups": [{"parameters": names, "settings": {}}], **rest}
    return share.own_tree(tree)


def entries_of(name: str, value: torch.Tensor, owned: Pieces | None) -> list[StateTensor]:
    """Return the entries of what a worker has of a tensor."""
    if owned is None or not name.startswith("optim/"):
        return [entry_of(name, value)]
    rows = written_rows(name, owned)
    return [HeldTensor(name, value[first:last], first, last, ROWS).entry for _, first, last in rows]


# A worker


@dataclass(frozen=True, slots=True)
class Shared:
    """A share of a checkpoint that is copied, and not written yet."""

    step: int
    share: ShareOf
    metrics: Mapping[str, float]
    layers: Layers


@dataclass
class Part:
    """A worker's part in a generation."""

    assignment: Assignment
    open_before: tuple[int, int] | None
    """The checkpoint that it knows to be in progress when the generation begins."""
    free_before: bool
    history: list[Entries] = field(default_factory=list)
    takes: tuple[str, ...] | None = None
    """The workers that provide the state that it lacks; None before they are named."""
    joined: bool = False
    before: tuple[int | None, Stage | None, Pieces | None] | None = None
    """What it held before it took another stage; until the first step it may go back to that."""
    reported: int = 0
    left: bool = False


class Member:
    """A worker in a generation while its history is replayed; also its stand-ins for what it trains with."""

    begun, every = -1, 1

    def __init__(self, part: Part, job: Job, steps: int, metric: Callable[[int], float]) -> None:
        self.part, self.job, self.metric = part, job, metric
        self.control = Control()
        self.control.begin(part.assignment.generation)
        self.applied = part.assignment.first_step - 1
        self.records: list[Any] = []
        self.shares: list[tuple[int, Mapping[str, float]]] = []
        self.copied: list[int] = []
        self.open, self.free = part.open_before, part.free_before
        self.saved = -1
        self._steps = steps
        self._history = list(part.history)
        self.heard = len(part.history)
        """How many entries of its history it has heard."""
        self.state: Any = SimpleNamespace(
            stepwise=None,
            train=lambda on=True: None,
            restore_buffers=lambda: None,
            averaged=lambda context: contextlib.nullcontext(),
            task=object.__new__(SimulatedTask),
        )
        self.passes: Any = SimpleNamespace(bars=(), metric_sums=self._metric_sums)
        self.waits: Waits | None = None
        self.why = ""

    def run(self) -> None:
        """Replay; then either `waits` says what it waits for, or `why` says why it has come out."""
        assignment, job = self.part.assignment, self.job
        evaluation = (
            None
            if job.evaluate is None
            else Evaluation(every_steps=job.evaluate.every_steps, batches=lambda shard: (), made=assignment.evaluated)
        )
        try:
            self.why = train(
                self,
                Span(
                    first_step=assignment.first_step,
                    end=self._steps,
                    hosted=range(SHARDS),
                    shards=SHARDS,
                    saved=assignment.saved,
                ),
                (SoloWorld(), None),
                Companions(feed=self, saving=Writer(self), copying=_Copier(self), tell=self.records.append),
                evaluation=evaluation,
                evaluations=Evaluations(job.best, assignment.history),
                timeouts=StepTimeouts(step_s=1.0, first_step_s=1.0, wait_s=1.0),
                control=self.control,
            )
        except Waits as waits:
            self.waits = waits
        except Interrupted:
            self.why = "interrupted"

    # The history

    def take(self, what: str, step: int = -1, flags: Flags | None = None) -> Any:
        """Return what came of a wait, after what happened meanwhile."""
        while True:
            entry = self.next(what, step, flags)
            if entry[0] == what:
                return entry[1]

    def next(self, what: str, step: int = -1, flags: Flags | None = None) -> Entries:
        """Return what happened next."""
        self.control.check()
        if not self._history:
            raise Waits(what, step, flags)
        entry = self._history.pop(0)
        if entry[0] == "pause":
            self.control.pause(self.control.generation)
        elif entry[0] == "save":
            self.control.save(self.control.generation)
        elif entry[0] == "interrupt":
            self.control.interrupt(self.control.generation)
        elif entry[0] == "settled" and self.open == entry[1]:
            self.open = None
        elif entry[0] == "wrote":
            self.free = True
        self.control.check()
        return entry

    # As the source of its batches, and as its steps

    def get(self, step: int, timeout_s: float, check: Callable[[], None]) -> StepBatches:
        return StepBatches({}, 0.0)

    def more(self) -> None:
        """There is nothing to prepare."""

    def make(self, steps: range, batches: Callable[[int], Any], context: StepContext) -> list[Applied]:
        [step] = steps
        flags = self.take("step", step, context.flags())
        self.applied = step
        return [Applied(rows=8, loss=1.0, flags=flags, notes=NOTES, grad_norm=1.0, reduce_s=0.0)]

    def complete(self, context: StepContext) -> None:
        """Nothing is sharded here."""

    def _metric_sums(self, batches: Any, hosted: Any, context: Any) -> MetricSums:
        value = self.metric(self.take("evaluation", self.applied))
        sums = MetricSums()
        for shard in range(SHARDS):
            sums.add(shard, 1, Means({METRIC: value}, {}, 1.0))
        return sums


class Writer:
    """The part of `workers.states.saver.Saver` that the loop of training meets."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def busy(self) -> bool:
        return not self._member.free or self._member.open is not None

    def wait(self, check: Callable[[], None]) -> None:
        while self.busy():
            check()
            self._member.next("checkpoint")

    def check(self) -> None:
        """Every state is finite."""

    def due(self, step: int, evaluated: bool) -> bool:
        every = self._member.job.checkpoint.every_steps
        return (every is not None and (step + 1) % every == 0) or (self._member.job.best is not None and evaluated)

    def copy(self, step: int, metrics: Mapping[str, float]) -> None:
        member = self._member
        assert step == member.applied, "the state that is saved is the one that is held"
        assert member.free, "no share is copied over one that is being written"
        member.free, member.open = False, (step, member.part.assignment.share.generation)
        member.saved = step
        member.shares.append((step, dict(metrics)))


class _Copier:
    """The part of `workers.states.state_copier.Copier` that the loop of training meets."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._next = -1

    def ready(self) -> bool:
        return self._member.part.assignment.copies

    def due(self, step: int) -> bool:
        return step >= max(self._next, 0)

    def copy(self, step: int, check: Callable[[], None]) -> None:
        self._next = step + self._member.job.elastic.copy_every
        self._member.copied.append(step)


@dataclass
class Process:
    """A worker's process, as it really is."""

    holds: int | None = None
    stage: Stage | None = None
    owned: Pieces | None = None
    part: Part | None = None
    member: Member | None = None
    """The last replay of that part."""
    open: tuple[int, int] | None = None
    settled: set[tuple[Any, ...]] = field(default_factory=set)
    """The checkpoints that are no longer in progress, as far as it was told."""
    free: bool = True
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    """What its training thread is to do, oldest first."""
    writes: list[Shared] = field(default_factory=list)
    copies: dict[tuple[int, Stage], int] = field(default_factory=dict)
    """Step and stage of the copies in its memory, its own and others', and the generation that made each."""
    sends: list[int] = field(default_factory=list)
    """The steps of its own copies that its buddy does not have yet."""
    buddy: str | None = None
    why: str = "interrupted"
    """How it came out of its last generation."""
    kept: list[tuple[int, Any]] = field(default_factory=list)
    """What no controller has confirmed of what it has reported, each with its generation's number."""
    told: Written | None = None
    """What it has reported of its share of a checkpoint whose end it has not heard of."""
