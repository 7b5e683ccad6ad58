"""A step submits everything that it sums before it waits for anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.collective.world import Operation
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing

CPU = torch.device("cpu")
ROWS = 6


class Norm(Task):
    def __init__(self, width: int) -> None:
        self.width = width

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, self.width), nn.BatchNorm1d(self.width), nn.Linear(self.width, 1))

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()


@dataclass
class Pair(SoloWorld):
    """A member of a world of two, whose other member adds nothing; notes what is submitted and awaited."""

    size: int = 2
    said: list[str] = field(default_factory=list)

    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Any:
        self.said.append(name)
        return _Noted(self.said)


@dataclass
class _Noted:
    said: list[str]

    def ended(self, within_s: float) -> bool:
        self.said.append("wait")
        return True

    def finish(self) -> None:
        """Do nothing: the tensor is its sum."""


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("width", "names"),
    [(8, ["gradients.0.0"]), (3000, ["buffers.0.sum", "buffers.0.max", "gradients.0.0"])],
)
def test_a_step_waits_once(width: int, names: list[str], exact: bool) -> None:
    """Small buffers travel with the first bucket; large ones before it, on every replica alike."""
    task, world = Norm(width), Pair()
    built = [build_model(task, 0, CPU)]
    state = TrainState(task, built, Summing(2, exact=exact), seed=0)
    steps = whole_steps(state)
    context = StepContext(world=world, control=Control(), wait_s=1)
    batches = {shard: [Microbatch(torch.randn(ROWS, 2), ROWS)] for shard in range(2)}
    # The first exact step measures its grids.
    for step in range(2):
        world.said.clear()
        steps.run(step, batches, context)
    assert world.said == [*names, *["wait"] * len(names)]
    assert int(state.module[1].num_batches_tracked) == 2
