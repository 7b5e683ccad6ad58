"""A task chooses how its optimizer computes; a run keeps to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.job.setting_types import Precision as Name
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.model.precision import Precision
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.step_options import Technique
from tests.unit.training.group import context

CPU = torch.device("cpu")


class Chooses(Task):
    def __init__(self, **flags: bool) -> None:
        self.flags = flags

    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([value for _, value in parameters], lr=0.1, **self.flags)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).float().square().mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16-params"])
@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_the_flags_of_the_optimizer_are_kept(flags: dict[str, bool], precision: Name) -> None:
    task, technique = Chooses(**flags), Technique(Precision(precision, CPU))

    def state() -> TrainState:
        built = build_model(task, 0, CPU)
        return TrainState(task, [built], Summing(1), seed=0, technique=technique)

    def kept(one: TrainState) -> bool:
        assert one.optimizer is not None
        return all(group[name] is value for group in one.optimizer.param_groups for name, value in flags.items())

    donor, newcomer = state(), state()
    whole_steps(donor).run(0, {0: [Microbatch(torch.ones(4, 3), 4)]}, context(SoloWorld()))
    newcomer.adopt(donor.snapshot())
    assert kept(donor)
    assert kept(newcomer)
    whole_steps(newcomer).run(1, {0: [Microbatch(torch.ones(4, 3), 4)]}, context(SoloWorld()))
    assert kept(newcomer)
