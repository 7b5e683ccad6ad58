"""A model that makes NaN on request."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.job.settings import Schedule
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.membership.view import host_shards
from raytrain_plus.parallel.pipeline.layout import chunk_stages
from raytrain_plus.task import Task
from raytrain_plus.training.model.model import build_chunks
from raytrain_plus.training.passes.pipedream import PipeDream
from raytrain_plus.training.passes.stage import replica_stage
from raytrain_plus.training.passes.synchronous import Synchronous
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.step.window import OverlappingSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from tests.support.stages import Ring, RingWorld
from tests.unit.parallel.pipeline.replicas import Mail, Threads, at_once

CPU = torch.device("cpu")


SHARDS = 4


BUCKET_BYTES = 300


NAMES = ("a", "b", "c", "d")


BAD = (2, 1)
"""Step and shard whose gradient is not finite."""


class Root(torch.autograd.Function):
    """The identity; its derivative is NaN for marked rows, like that of sqrt at 0."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(bad)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (bad,) = ctx.saved_tensors
        return torch.where(bad.any(), torch.nan, gradients[0]), None


class Layer(nn.Module):
    """The third layer has the derivative above; the last column of the input marks bad rows."""

    def __init__(self, name: str, statistics: bool) -> None:
        super().__init__()
        self.last = name == NAMES[-1]
        self.risky = name == "c"
        self.linear = nn.Linear(5, 5)
        self.normal = nn.BatchNorm1d(5) if statistics else nn.Identity()
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, mark = x[:, :5], x[:, 5:]
        values = torch.tanh(self.normal(self.linear(values)))
        if self.risky:
            values = Root.apply(values, mark > 0)  # type: ignore[no-untyped-call]
        return values if self.last else torch.cat([values, mark], 1)


class Risky(Task):
    statistics = True

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return {name: partial(Layer, name, self.statistics) for name in NAMES}

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([value for _, value in parameters], lr=1e-2)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        # A task may write into its batch: a recomputed step must see the original batch.
        x = batch["x"] * batch["times"].add_(1)
        return nn.functional.mse_loss(model(x), x[:, :5].cumsum(1)) + batch["shift"].sum()


class Flat(Risky):
    """Its buffers do not change, as pipedream requires."""

    statistics = False


def batches(
    step: int, hosted: Sequence[int], data: bool = True, bad: tuple[int, int] = BAD, shift: float = 0.0
) -> dict[int, list[Microbatch]]:
    made: dict[int, list[Microbatch]] = {}
    for shard in hosted:
        draw = torch.Generator().manual_seed(100 * step + shard)
        for number in range(2):
            x = torch.randn(4, 6, generator=draw)
            x[:, 5] = float((step, shard) == bad and number == 1)
            given = {"x": x, "times": torch.zeros(1), "shift": torch.full((1,), shift)}
            made.setdefault(shard, []).append(Microbatch(given if data else None, 4, start=step, ids=step + shard))
    return made


def together(
    shape: Shape,
    schedule: Schedule,
    act: Callable[..., Any],
    *,
    exact: bool = False,
    skip: bool = False,
    task: Task | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[Any]:
    """Return each worker's results for so many replicas of so many stages."""
    where = chunk_stages(schedule, shape.stages)
    each = len(NAMES) // len(where)
    rings = [Ring(shape.replicas) for _ in range(shape.stages)]
    mails: list[Mail] = [defaultdict(queue.SimpleQueue) for _ in range(shape.replicas)]
    hosted = host_shards(SHARDS, shape.replicas)
    task = task or (Flat() if schedule == "pipedream" else Risky())

    def worker(seat: int) -> Any:
        replica, stage, _ = shape.place(seat)
        chunks = [NAMES[n * each : (n + 1) * each] for n, holder in enumerate(where) if holder == stage]
        built = build_chunks(task, 1, CPU, chunks)
        state = TrainState(task, built, Summing(SHARDS, exact=exact, bucket_bytes=bucket_bytes), seed=1)
        peers, split = Threads(stage, mails[replica]), partial(replica_stage, schedule=schedule, stages=shape.stages)
        one: Any
        if schedule == "pipedream":
            counted = partial(batches, hosted=hosted[replica], data=False)
            one = OverlappingSteps(state, split(PipeDream, state, peers), every=4, counted=counted)
        else:
            one = SynchronousSteps(state, split(Synchronous, state, peers), skip_nonfinite=skip)
        return act(one, RingWorld(replica, rings[stage]), hosted[replica], stage == 0)

    return at_once(worker, range(shape.size))
