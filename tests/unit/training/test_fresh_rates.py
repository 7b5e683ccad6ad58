"""A resumed run keeps the optimizer's rates, and says which the task now gives it; or it takes these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.state.holding import describe_state, settings_kept
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from tests.unit.training.group import context

CPU = torch.device("cpu")


class Fit(Task):
    def __init__(self, kind: str, lr: float, decay: float = 0.0, steps: int = 8) -> None:
        self.kind, self.lr, self.decay, self.steps = kind, lr, decay, steps

    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        pairs = list(parameters)
        groups = [{"params": [value]} for _, value in pairs]
        return torch.optim.SGD(groups, lr=self.lr, momentum=0.9, weight_decay=self.decay)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        made = {
            "none": lambda: None,
            "exponential": lambda: rates.ExponentialLR(optimizer, 0.5),
            "cosine": lambda: rates.CosineAnnealingLR(optimizer, self.steps),
            "one cycle": lambda: rates.OneCycleLR(optimizer, 10 * self.lr, total_steps=self.steps),
        }
        return made[self.kind]()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()


KINDS = ("none", "exponential", "cosine", "one cycle")


def steps_of(task: Task) -> SynchronousSteps:
    return whole_steps(TrainState(task, [build_model(task, 1, CPU)], Summing(1), seed=1))


def made(task: Task, steps: range, one: SynchronousSteps | None = None) -> tuple[SynchronousSteps, list[Any]]:
    one = one or steps_of(task)
    batch = torch.linspace(-1, 1, 12).reshape(3, 4)
    return one, [one.run(step, {0: [Microbatch(batch, 3)]}, context(SoloWorld())).lr for step in steps]


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_task_now_gives_the_optimizer_is_said(kind: str) -> None:
    old, _ = made(Fit(kind, 0.1), range(3))
    _, tree = describe_state(old.state.holding())
    assert settings_kept(tree, steps_of(Fit(kind, 0.1, steps=20)).state.holding()) == []
    new = steps_of(Fit(kind, 0.001, decay=0.5)).state
    said = settings_kept(tree, new.holding())
    assert [one for one in said if "weight_decay 0, not 0.5 (group 2 of 2)" in one]
    rate = "lr 0.04, not 0.0004 (group 1 of 2)" if kind == "one cycle" else "lr 0.1, not 0.001 (group 1 of 2)"
    assert rate in said
    # Loading keeps those of the state.
    new.adopt(old.state.snapshot())
    assert new.optimizer is not None
    assert old.state.optimizer is not None
    assert new.optimizer.param_groups[0]["lr"] == old.state.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("kind", KINDS)
def test_fresh_rates_are_those_of_the_new_schedule_at_this_step(kind: str) -> None:
    old, _ = made(Fit(kind, 0.1), range(3))
    task = Fit(kind, 0.003, decay=0.5, steps=12)
    _, expected = made(task, range(12))
    new = steps_of(task)
    new.state.adopt(old.state.snapshot())
    new.state.renew_rates()
    _, found = made(task, range(3, 12), new)
    assert found == [pytest.approx(one) for one in expected[3:]]
    # Its momentum goes on.
    buffers = [old.state.snapshot().tensors[name] for name in old.state.snapshot().tensors if "momentum" in name]
    assert len(buffers) == 2


def test_the_optimizers_state_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    old, _ = made(Fit("cosine", 0.1), range(3))
    same = Fit("cosine", 0.1)
    new = steps_of(same)
    new.state.adopt(old.state.snapshot())
    new.state.renew_rates()
    made(same, range(3, 8), new)
    made(same, range(3, 8), old)
    for (_, one), (_, other) in zip(new.state.named, old.state.named, strict=True):
        assert torch.equal(one, other)
