"""The learning rate with which a step was made, and the remark on one that stays 0."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.training.exchange.applied import Applied
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.scheduler import rates_of
from tests.unit.training.group import context

CPU = torch.device("cpu")


class Line(Task):
    """After `ends` steps the rates are 0, except in each step that follows `zeros` such steps."""

    def __init__(self, ends: int, zeros: int = 1000) -> None:
        self.ends, self.zeros = ends, zeros

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        one, other = [value for _, value in parameters]
        return torch.optim.SGD([{"params": [one], "lr": 0.25}, {"params": [other], "lr": 0.125}])

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, self.rate)

    def rate(self, step: int) -> float:
        return 0.0 if step >= self.ends and (step - self.ends) % (self.zeros + 1) < self.zeros else 1.0

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch).square().mean()


def made(task: Task, steps: int) -> list[Applied]:
    state = TrainState(task, [build_model(task, 0, CPU)], Summing(1), seed=0)
    made = whole_steps(state)
    batch = Microbatch(torch.ones(2, 2), rows=2)
    return [made.run(step, {0: [batch]}, context(SoloWorld())) for step in range(steps)]


def test_a_step_has_the_rates_with_which_it_was_made() -> None:
    assert [one.lr for one in made(Line(ends=2), 3)] == [(0.25, 0.125), (0.25, 0.125), (0.0, 0.0)]


def test_a_rate_of_0_for_ten_steps_is_remarked_once() -> None:
    remarks = [[remark.text for remark in one.remarks] for one in made(Line(ends=1), 13)]
    assert [len(texts) for texts in remarks] == [0] * 10 + [1] + [0] * 2
    assert remarks[10][0].startswith("the learning rate is 0 in 10 steps in a row, up to step 11: ")
    assert not any(one.remarks for one in made(Line(ends=1, zeros=9), 25))


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (None, ()),
        (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.5)), (0.5,)),
        (torch.optim.Adafactor([nn.Parameter(torch.zeros(1, 1))], lr=0.25), (0.25,)),
        (torch.optim.Optimizer([nn.Parameter(torch.zeros(1))], {}), ()),
    ],
)
def test_an_optimizer_without_a_rate_has_none(optimizer: torch.optim.Optimizer | None, expected: Any) -> None:
    assert rates_of(optimizer) == expected
