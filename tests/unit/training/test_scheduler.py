"""A scheduler whose step needs an argument is refused before any step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from raytrain_plus import Task
from raytrain_plus.errors import TaskError
from raytrain_plus.training.model.model import build_model, parameters_of
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.scheduler import check_scheduler

CPU = torch.device("cpu")


class NeedsKeyword(ExponentialLR):
    def step(self, *, loss: float) -> None:  # type: ignore[override]
        super().step()

    def _initial_step(self) -> None:
        self._step_count = 1


class TakesEpoch(ExponentialLR):
    def step(self, epoch: int | None = None, *rest: Any, **more: Any) -> None:
        super().step()


class Line(Task):
    def __init__(self, make: Any = None, fault: str = "") -> None:
        self.make, self.fault = make, fault

    def model(self) -> nn.Module:
        if self.fault == "values":
            float(torch.zeros(1))
        return nn.Linear(2, 1)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.fault == "optimizer":
            raise KeyError("bias")
        return torch.optim.SGD([value for _, value in parameters], lr=0.1, momentum=0.9)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
        return self.make and self.make(optimizer)


def state_of(task: Task) -> TrainState:
    return TrainState(task, [build_model(task, 0, CPU)], Summing(2), seed=0)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (ReduceLROnPlateau, "ReduceLROnPlateau.step() needs 'metrics'"),
        (lambda optimizer: NeedsKeyword(optimizer, 0.9), "NeedsKeyword.step() needs 'loss'"),
    ],
)
def test_a_scheduler_that_needs_an_argument_is_refused(make: Any, what: str) -> None:
    for refuses in (state_of, lambda task: check_scheduler(task, parameters_of(task))):
        with pytest.raises(TaskError) as caught:
            refuses(Line(make))
        error = caught.value
        assert str(error).startswith(f"scheduler() of the task Line: {what}, but is called without any\n  fix: ")


@pytest.mark.parametrize("make", [None, lambda it: TakesEpoch(it, 0.9), lambda it: OneCycleLR(it, 0.1, total_steps=9)])
def test_other_schedulers_are_taken(make: Any) -> None:
    task = Line(make)
    check_scheduler(task, parameters_of(task))
    assert (state_of(task).scheduler is None) == (make is None)


@pytest.mark.parametrize("fault", ["values", "optimizer"])
def test_a_task_that_cannot_be_asked_without_values_is_left_to_the_workers(fault: str) -> None:
    task = Line(ReduceLROnPlateau, fault)
    check_scheduler(task, parameters_of(task))
