"""How far the losses of one worker and of two drift apart: `python -m tests.benchmarks.drift`.

A ResNet-18 with BatchNorm at a learning rate at which training is unstable. One worker adds the gradients of four
shards one after the other; two add two each, and the ring adds the two sums: the same numbers, rounded in another
order. In float64 the very same training starts from rounding that is 2^29 times finer. If nothing but rounding is
amplified, the difference shrinks by about as much at every step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.collective.world import Operation
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.membership.view import host_shards
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing

SHARDS, ROWS, STEPS, CLASSES, SEED = 4, 8, 25, 10, 0
CPU = torch.device("cpu")


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.around = nn.Sequential()
        if stride > 1 or before != width:
            self.around = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.around(x))


def resnet18() -> nn.Sequential:
    """He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, with its first layers for small images."""
    blocks: list[nn.Module] = []
    for before, width, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        blocks += [Block(before, width, stride), Block(width, width, 1)]
    stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES))
    return nn.Sequential(stem, *blocks, head)


class Images(Task):
    """Random images and labels, in one precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def model(self) -> nn.Module:
        return resnet18().to(self.dtype)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([value for _, value in parameters], lr=0.05, momentum=0.9)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])


def batches(step: int, hosted: Sequence[int], dtype: torch.dtype) -> dict[int, list[Microbatch]]:
    """Return a step's batch of each hosted shard: the same numbers in every precision."""
    made = {}
    for shard in hosted:
        draw = torch.Generator().manual_seed(1000 * step + shard)
        x, y = torch.randn(ROWS, 3, 64, 64, generator=draw), torch.randint(0, CLASSES, (ROWS,), generator=draw)
        made[shard] = [Microbatch({"x": x.to(dtype), "y": y}, ROWS)]
    return made


@dataclass
class Ring:
    """The tensors that two workers have submitted, by name and number."""

    parts: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=dict)
    meets: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))


@dataclass
class RingWorld:
    rank: int
    ring: Ring
    size: int = 2
    times: dict[str, int] = field(default_factory=dict)

    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Any:
        number = self.times[name] = self.times.get(name, 0) + 1
        parts = self.ring.parts.setdefault((name, number), [])
        self.ring.meets.wait(60)
        parts.append(tensor)
        self.ring.meets.wait(60)
        total = parts[0] + parts[1] if operation == "sum" else torch.maximum(*parts)
        self.ring.meets.wait(60)
        tensor.copy_(total)
        return Done()

    def close(self) -> None:
        """Do nothing: there is no wait to interrupt."""


class Done:
    def ended(self, within_s: float) -> bool:
        return True

    def finish(self) -> None:
        """Do nothing: the sum is in place."""


def losses(workers: int, dtype: torch.dtype, exact: bool, steps: int) -> list[float]:
    """Return the loss of each step on a number of workers."""
    ring, hosted = Ring(), host_shards(SHARDS, workers)

    def worker(rank: int) -> list[float]:
        torch.set_num_threads(1)
        task = Images(dtype)
        with BUILDS:
            built = build_model(task, SEED, CPU)
        state = TrainState(task, [built], Summing(SHARDS, exact=exact), seed=SEED)
        one = whole_steps(state)
        world = SoloWorld() if workers == 1 else RingWorld(rank, ring)
        control = Control()
        control.begin(0)
        context = StepContext(world=world, control=control, wait_s=60)
        return [one.run(step, batches(step, hosted[rank], dtype), context).loss for step in range(steps)]

    with ThreadPoolExecutor(workers) as pool:
        first, *_ = pool.map(worker, range(workers))
    return first


BUILDS = threading.Lock()
"""Held while a model is built: initial values come from the process's one generator."""


def drift(dtype: torch.dtype, exact: bool = False, steps: int = STEPS) -> list[float]:
    """Return the relative difference between the losses of one worker and of two at each step."""
    one, two = (losses(workers, dtype, exact, steps) for workers in (1, 2))
    return [abs(a - b) / abs(a) for a, b in zip(one, two, strict=True)]


def table() -> Iterator[str]:
    """Yield the lines of the comparison."""
    single, double = drift(torch.float32), drift(torch.float64)
    exact = drift(torch.float32, exact=True)
    yield "step   ring, float32   ring, float64   shrinks by   exact, float32"
    for step, (a, b, c) in enumerate(zip(single, double, exact, strict=True)):
        shrinks = f"{a / b:12.1e}" if b else "           -"
        yield f"{step:4}   {a:13.1e}   {b:13.1e}   {shrinks}   {c:14.1e}"


if __name__ == "__main__":
    print(*table(), sep="\n")
