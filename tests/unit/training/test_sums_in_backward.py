"""Sums over replicas start in a stage's last backward pass, under every schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_plus.job.settings import Schedule
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.training.step.window import OverlappingSteps
from tests.support import nonfinite, stages
from tests.support.nonfinite import Flat, batches
from tests.unit.training.group import context

one_computes_at_a_time = stages.one_computes_at_a_time


class Wide(nn.Module):
    """Two layers, whose weights fill a bucket each."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.last = name == nonfinite.NAMES[-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, mark = x[:, :5], x[:, 5:]
        values = self.second(torch.tanh(self.linear(values)))
        return values if self.last else torch.cat([values, mark], 1)


class Plain(Flat):
    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return {name: partial(Wide, name) for name in nonfinite.NAMES}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble", "pipedream"])
def test_a_sum_starts_before_the_first_weight_has_its_gradient(schedule: Schedule) -> None:
    def act(one: Any, world: Any, hosted: tuple[int, ...], data: bool) -> list[str]:
        seen: list[str] = []
        first, value = one.state.parts[0].parameters[0]
        value.register_hook(lambda _: seen.append(first))
        reduce = world.reduce

        def noting(tensor: torch.Tensor, name: str, *kind: Any) -> Any:
            seen.append(name)
            return reduce(tensor, name, *kind)

        world.reduce = noting
        if isinstance(one, OverlappingSteps):
            one.make(range(1), lambda step: batches(step, hosted), context(world))
        else:
            one.run(0, batches(0, hosted, data), context(world))
        return seen

    for seen in nonfinite.together(Shape(2, 2), schedule, act, task=Plain(), bucket_bytes=120):
        [name] = {one for one in seen if one.endswith("weight")}
        last = len(seen) - seen[::-1].index(name)
        assert "gradients.0.0" in seen[:last], seen
