"""Stages whose steps overlap, on threads of one process."""

from __future__ import annotations

import queue
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Task
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.membership.view import host_shards
from raytrain_plus.training.exchange.applied import Applied
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.header import Flags
from raytrain_plus.training.model.model import build_chunks
from raytrain_plus.training.passes.pipedream import PipeDream
from raytrain_plus.training.passes.stage import replica_stage
from raytrain_plus.training.step.window import OverlappingSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.step_options import PLAIN, Technique
from tests.support.stages import CPU, Ring, RingWorld, control
from tests.unit.parallel.pipeline.replicas import Mail, Threads, at_once

SHARDS, MICROBATCHES, ROWS, SEED = 2, 3, 4, 5


NAMES = ("a", "b", "c", "d")


class Scale(nn.Module):
    """Its backward pass reads the weight itself; a linear layer's reads a view, which stays unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class Smooth(Task):
    """Four layers without random numbers; the rows' labels are their weights."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        hidden = {name: lambda: nn.Sequential(nn.Linear(6, 6), Scale(), nn.Tanh()) for name in NAMES[:-1]}
        return {**hidden, NAMES[-1]: lambda: nn.Linear(6, 3)}

    def loss(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": F.cross_entropy(model(batch["x"]), batch["y"]), "weight": float(1 + batch["y"].sum())}

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([value for _, value in parameters], lr=0.05)


def batches(step: int, hosted: tuple[int, ...], data: bool = True) -> dict[int, list[Microbatch]]:
    made: dict[int, list[Microbatch]] = {}
    for shard in hosted:
        draw = torch.Generator().manual_seed(100 * step + shard)
        for _ in range(MICROBATCHES):
            x = torch.randn(ROWS, 6, generator=draw)
            batch = {"x": x, "y": (x.sum(1) > 0).long() + (x[:, 0] > 1).long()}
            made.setdefault(shard, []).append(Microbatch(batch if data else None, ROWS, start=step, ids=step + shard))
    return made


def chunks_of(stages: int) -> list[tuple[str, ...]]:
    each = len(NAMES) // stages
    return [NAMES[stage * each : (stage + 1) * each] for stage in range(stages)]


def together(
    shape: Shape,
    windows: list[range],
    act: Callable[[int, OverlappingSteps], None] = lambda seat, one: None,
    task: type[Task] = Smooth,
    wished: Callable[[int], bool] = lambda seat: False,
    technique: Technique = PLAIN,
    threads: Callable[..., Any] = Threads,
) -> list[tuple[list[Applied], dict[str, torch.Tensor], OverlappingSteps]]:
    """Return, for each worker after these windows, what it applied, its final weights, and itself."""
    rings = [Ring(shape.replicas) for _ in range(shape.stages)]
    mails: list[Mail] = [defaultdict(queue.SimpleQueue) for _ in range(shape.replicas)]
    hosted = host_shards(SHARDS, shape.replicas)
    workers = []
    for seat in range(shape.size):
        replica, stage, _ = shape.place(seat)
        made = task()
        built = build_chunks(made, SEED, CPU, [chunks_of(shape.stages)[stage]])
        state = TrainState(made, built, Summing(SHARDS, bucket_bytes=300), seed=SEED, technique=technique)
        peers = threads(stage, mails[replica])
        passes = replica_stage(PipeDream, state, peers, schedule="pipedream", stages=shape.stages)
        counted = partial(batches, hosted=hosted[replica], data=False)
        one = OverlappingSteps(state, passes, every=1, counted=counted)
        act(seat, one)
        workers.append(one)

    def worker(seat: int) -> Any:
        replica, stage, _ = shape.place(seat)
        one, world = workers[seat], RingWorld(replica, rings[stage])
        applied = [
            told
            for window in windows
            for told in one.make(
                window,
                lambda step: batches(step, hosted[replica]),
                StepContext(world=world, control=control(), wait_s=5, flags=lambda: Flags(pause=wished(seat))),
            )
        ]
        return applied, {name: value.detach().clone() for name, value in one.state.named}, one

    return at_once(worker, range(shape.size))
