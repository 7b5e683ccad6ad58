"""Mistakes of a task that a step must survive or name, without applying anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import TrainingError
from raytrain_plus.training.exchange.applied import Applied
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from tests.unit.training.group import context

CPU = torch.device("cpu")


class Line(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([value for _, value in parameters], lr=0.1)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch).square().mean()


class Detached(Line):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch).detach()


class PartlyUsed(Line):
    """The second layer takes no part in the loss."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return model[0](batch).square().mean()


class PartlyFrozen(Line):
    def model(self) -> nn.Module:
        made = super().model()
        made[0].requires_grad_(False)
        return made


class Raising(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise ValueError("a fault in the optimizer")


class RaisingOptimizer(Line):
    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return Raising([value for _, value in parameters], lr=0.1)


def steps_of(task: Task) -> SynchronousSteps:
    return whole_steps(TrainState(task, [build_model(task, 0, CPU)], Summing(2), seed=0))


def run(one: SynchronousSteps, step: int) -> Applied:
    given = {shard: [Microbatch(torch.ones(4, 2) + shard, 4)] for shard in range(2)}
    return one.run(step, given, context(SoloWorld()))


def weights(one: SynchronousSteps) -> list[list[float]]:
    return [value.flatten().tolist() for value in one.state.module.parameters()]


def test_a_loss_that_depends_on_no_parameter_is_named_with_step_and_shard() -> None:
    one = steps_of(Detached())
    before = weights(one)
    with pytest.raises(TrainingError, match="the loss of shard 0 in step 0 depends on no trained parameter"):
        run(one, 0)
    assert (weights(one), one.state.last_applied) == (before, -1)


@pytest.mark.parametrize(("task", "changed"), [(PartlyUsed, [0, 1]), (PartlyFrozen, [2, 3])])
def test_parameters_without_a_gradient_keep_their_values(task: type[Task], changed: list[int]) -> None:
    one = steps_of(task())
    before = weights(one)
    run(one, 0)
    assert [number for number, (a, b) in enumerate(zip(before, weights(one), strict=True)) if a != b] == changed


def test_an_optimizer_that_raises_leaves_a_state_that_nobody_may_use() -> None:
    one = steps_of(RaisingOptimizer())
    with pytest.raises(ValueError, match="a fault in the optimizer"):
        run(one, 0)
    assert (one.state.last_applied, one.begun) == (None, 0)
