"""`clip_value`: each element of the mean gradient is clamped, and one that is not finite still stops the step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import TrainingError
from raytrain_plus.torch_compat import clamp_each
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.step_options import Technique
from tests.support.stages import CPU
from tests.unit.training.group import context


def test_each_number_is_clamped_and_zeros_keep_their_sign() -> None:
    draw = torch.Generator().manual_seed(0)
    # Too large to be clamped at a time.
    given = [torch.randn(size, generator=draw) for size in (5, 17 << 20, 3, 0)]
    given += [torch.tensor([-0.0, 0.0, -2.0]), torch.randn(4, generator=draw).bfloat16()]
    expected = [one.clamp(-0.5, 0.5) for one in given]
    clamp_each(given, 0.5)
    assert all(torch.equal(one, other) for one, other in zip(given, expected, strict=True))
    assert torch.signbit(given[4]).tolist() == [True, False, True]


def test_both_parts_of_complex_numbers_are_clamped() -> None:
    one = torch.tensor([3 + 0.1j, -0.2 - 4j])
    clamp_each([one], 0.5)
    assert one.tolist() == pytest.approx([0.5 + 0.1j, -0.2 - 0.5j])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_becomes_nan(value: float) -> None:
    one = torch.tensor([value, 3.0])
    clamp_each([one], 1.0)
    assert one.isnan().tolist() == [True, False]


class Endless(Task):
    """The gradient of its weight is infinite, and its loss is not."""

    def model(self) -> nn.Module:
        model = nn.Linear(3, 1)
        model.weight.register_hook(lambda gradient: gradient + math.inf)
        return model

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([value for _, value in parameters], lr=0.1)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(batch).mean()
        return found


@pytest.mark.parametrize("exact", [False, True])
def test_an_infinite_gradient_is_refused(exact: bool) -> None:
    task = Endless()
    state = TrainState(
        task, [build_model(task, 0, CPU)], Summing(1, exact=exact), seed=0, technique=Technique(clip_value=0.1)
    )
    with pytest.raises(
        TrainingError, match="gradient of step 0 is not finite in shard 0, first in the parameter 'weight'"
    ):
        whole_steps(state).run(0, {0: [Microbatch(torch.ones(2, 3), 2, start=0, ids=0)]}, context(SoloWorld()))
