"""Models in stages on threads of one process, and one worker beside them."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.collective.world import Operation
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.job.settings import Schedule
from raytrain_plus.membership.mesh import Shape, Stage
from raytrain_plus.membership.view import host_shards
from raytrain_plus.parallel.pipeline.layout import chunk_stages
from raytrain_plus.parallel.pipeline.partition import Layer, balanced_spans
from raytrain_plus.parallel.pipeline.timeline import Kind
from raytrain_plus.state.holding import saved_model, scale_values
from raytrain_plus.state.named import optimizer_state, state_sha256
from raytrain_plus.state.weight_rows import name_of
from raytrain_plus.training.exchange.applied import Applied
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.header import Flags
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.model.model import build_chunks, build_model, layer_names
from raytrain_plus.training.passes.held_out import HeldOut
from raytrain_plus.training.passes.stage import replica_stage
from raytrain_plus.training.passes.step_work import StepWork
from raytrain_plus.training.passes.synchronous import Synchronous
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.step_options import PLAIN, Technique
from raytrain_plus.workers.messages import Layers
from tests.unit.parallel.pipeline.replicas import COMPUTES, Mail, Threads, at_once
from tests.unit.training.group import context

SHARDS, MICROBATCHES, ROWS, STEPS, SEED = 4, 2, 3, 4, 3


CPU = torch.device("cpu")


class Checkpointed(nn.Module):
    """A block that is recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


class Drifts(nn.Module):
    """Multiplies by a buffer that it has just written to, so the backward pass needs that value."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return torch.tanh(x * self.mean * self.weight)


class Deep(Task):
    """BatchNorm, dropout, a frozen layer, a counter, noise in the loss, weights, clipping, AdamW with a scheduler."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return {
            "in": lambda: nn.Linear(6, 8, bias=False),
            "norm": lambda: nn.BatchNorm1d(8),
            "drop": lambda: nn.Dropout(0.3),
            "again": Checkpointed,
            "frozen": lambda: nn.Linear(8, 8).requires_grad_(False),
            # No bias before BatchNorm: its gradient is only rounding error, which AdamW turns into full steps.
            "middle": lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)),
            "act": Drifts,
            "out": lambda: nn.Linear(8, 3),
        }

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        scores = model(batch["x"] + 0.1 * torch.randn_like(batch["x"])) + 0.01 * torch.randn(3)
        return {"loss": F.cross_entropy(scores, batch["y"]), "weight": float(1 + batch["y"].sum())}


def batches(step: int, hosted: tuple[int, ...], data: bool = True) -> dict[int, list[Microbatch]]:
    """For a stage that reads no data, without the batches. Step 2 needs another grid; the last step is short."""
    made: dict[int, list[Microbatch]] = {}
    for shard in hosted:
        draw = torch.Generator().manual_seed(1000 * step + shard)
        for index in range(MICROBATCHES):
            rows = ROWS - (step == STEPS - 1 and index == 1)
            x = torch.randn(rows, 6, generator=draw) * (1000 if step == 2 else 1)
            batch = {"x": x, "y": torch.randint(0, 3, (rows,), generator=draw)}
            one = Microbatch(batch, rows, start=step * MICROBATCHES * ROWS, ids=1000 * step + 10 * shard + index)
            made.setdefault(shard, []).append(one if data else replace(one, batch=None, ids=0))
    return made


@dataclass
class Ring:
    """A world of threads, with its members' submitted tensors."""

    size: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    submitted: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))


class RingWorld:
    """A member's interface."""

    def __init__(self, rank: int, of: Ring) -> None:
        self.rank, self.size, self._of = rank, of.size, of
        self._times: dict[str, int] = defaultdict(int)

    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Any:
        self._times[name] += 1
        with self._of.changed:
            parts = self._of.submitted[name, self._times[name]]
            parts.append(tensor)
            if len(parts) == self.size:
                stacked = torch.stack(parts)
                total = stacked.sum(dim=0) if operation == "sum" else stacked.amax(dim=0)
                for part in parts:
                    part.copy_(total)
                parts.append(total)
                self._of.changed.notify_all()
        return _Summed(parts, self._of)

    def gather(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Any:
        into.zero_()
        into[self.rank] = tensor
        return self.reduce(into, name)

    def close(self) -> None:
        """Do nothing."""


@dataclass
class _Summed:
    parts: list[torch.Tensor]
    of: Ring

    def ended(self, within_s: float) -> bool:
        with self.of.changed:
            return self.of.changed.wait_for(lambda: len(self.parts) > self.of.size, within_s)

    def finish(self) -> None:
        """Do nothing: the sum is in place."""


@pytest.fixture(autouse=True)
def one_computes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random generators belong to the process, and its threads stand in for processes."""
    computing = StepWork.computing

    @contextmanager
    def alone(self: Any, *arguments: Any) -> Iterator[None]:
        with COMPUTES, computing(self, *arguments):
            yield

    monkeypatch.setattr(StepWork, "computing", alone)
    evaluating = HeldOut.computing

    @contextmanager
    def evaluates_alone(self: Any, kind: Kind, chunk: int, number: int) -> Iterator[None]:
        with COMPUTES, evaluating(self, kind, chunk, number):
            yield

    monkeypatch.setattr(HeldOut, "computing", evaluates_alone)
    apply = TrainState.apply

    def applies_alone(self: TrainState, *arguments: Any) -> None:
        # It sets the key for optimizers that draw random numbers.
        with COMPUTES:
            apply(self, *arguments)

    monkeypatch.setattr(TrainState, "apply", applies_alone)


Told = tuple[list[Applied], dict[str, torch.Tensor]]


def control() -> Control:
    made = Control()
    made.begin(0)
    return made


def state_of(task: Task, built: Any, exact: bool, technique: Technique = PLAIN) -> TrainState:
    return TrainState(
        task,
        built,
        Summing(SHARDS, exact=exact, bucket_bytes=300),
        seed=SEED,
        technique=replace(technique, clip_norm=0.5),
    )


def tensors_of(one: TrainState) -> dict[str, torch.Tensor]:
    """In the form that its hash takes."""
    model = {name_of(key): value for key, value in saved_model(one.holding()).items()}
    return {**model, **optimizer_state(one.optimizer, one.named), **scale_values(one.counts)}


def alone(exact: bool, task: type[Task] = Deep, technique: Technique = PLAIN) -> Told:
    """Return one worker's results."""
    made = task()
    one = whole_steps(state_of(made, [build_model(made, SEED, CPU)], exact, technique))
    applied = [one.run(step, batches(step, tuple(range(SHARDS))), context(SoloWorld())) for step in range(STEPS)]
    return applied, tensors_of(one.state)


def together(
    shape: Shape,
    schedule: Schedule,
    exact: bool,
    task: type[Task] = Deep,
    wished: Callable[[int, int], Flags] = lambda seat, step: Flags(),
    act: Callable[..., Any] | None = None,
    technique: Technique = PLAIN,
    threads: Callable[..., Any] = Threads,
) -> list[Any]:
    """Return each worker's results for so many replicas of so many stages, or those of `act`."""
    where = chunk_stages(schedule, shape.stages)
    names = list(layer_names(task(), SEED))
    spans = balanced_spans([Layer(name, 1.0, 0) for name in names], len(where))
    assert spans is not None
    where_is = {name: stage for (a, b), stage in zip(spans, where, strict=True) for name in names[a:b]}
    rings = [Ring(shape.replicas) for _ in range(shape.stages)]
    mails: list[Mail] = [defaultdict(queue.SimpleQueue) for _ in range(shape.replicas)]
    hosted = host_shards(SHARDS, shape.replicas)

    def worker(seat: int) -> Any:
        replica, stage, _ = shape.place(seat)
        made = task()
        chunks = [names[first:last] for (first, last), holder in zip(spans, where, strict=True) if holder == stage]
        with COMPUTES:
            state = state_of(made, build_chunks(made, SEED, CPU, chunks), exact, technique)
        tied = Layers(Stage(stage, shape.stages), (), where_is).apart(state.tied)
        peers = threads(stage, mails[replica])
        passes = replica_stage(Synchronous, state, peers, schedule=schedule, stages=shape.stages, tied=tied)
        one = SynchronousSteps(state, passes)
        world = RingWorld(replica, rings[stage])
        if act is not None:
            return act(one, world, hosted[replica], stage == 0)
        applied = [
            one.run(
                step,
                batches(step, hosted[replica], data=stage == 0),
                StepContext(world=world, control=control(), wait_s=5, flags=partial(wished, seat, step)),
            )
            for step in range(STEPS)
        ]
        return applied, tensors_of(one.state)

    return at_once(worker, range(shape.size))


def collected(told: list[Told], shape: Shape, replica: int) -> dict[str, torch.Tensor]:
    """Return the whole state, collected from a replica's stages."""
    whole: dict[str, torch.Tensor] = {}
    for seat in shape.lines("stage")[replica]:
        whole |= told[seat][1]
    return whole


def check_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Assert that two states have the same tensors, bit for bit."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert state_sha256(dict(found)) == state_sha256(dict(expected))


def check_alike(
    told: list[Told],
    shape: Shape,
    expected: Told,
    collected: Callable[[list[Told], Shape, int], Mapping[str, torch.Tensor]] = collected,
) -> None:
    """Assert that all workers have applied the same steps, and that each replica has the same state, bit for bit."""
    applied, state = expected
    for found, _ in told:
        # Each stage knows of its own layers' experts only.
        own = [
            replace(one, experts={name: use for name, use in one.experts.items() if name in here.experts})
            for one, here in zip(applied, found, strict=True)
        ]
        assert found == own
    for step, one in enumerate(applied):
        assert one.experts.keys() == {name for found, _ in told for name in found[step].experts}
    for replica in range(shape.replicas):
        check_same(collected(told, shape, replica), state)


class Tied(Deep):
    """Two parameters tied as one, at both ends and in the middle; the optimizer keeps values for each copy."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        layers = super().layers()
        return {
            "in": lambda: nn.Linear(6, 8, bias=False),
            "back": lambda: nn.Linear(8, 6, bias=False),
            "again": lambda: nn.Linear(6, 8, bias=False),
            **{name: layers[name] for name in ("drop", "middle", "act")},
            "last": lambda: nn.Linear(8, 6, bias=False),
            "out": lambda: nn.Linear(6, 3),
        }

    def tied(self) -> dict[str, str]:
        return {"again.weight": "in.weight", "last.weight": "back.weight"}
