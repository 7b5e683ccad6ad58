"""Whether an optimizer's state can be divided is found out, not assumed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_plus import Task
from raytrain_plus.errors import TaskError
from raytrain_plus.training.weights.shardable import Division, divide, optimizer_bytes

NAMED = [
    ("wide", nn.Parameter(torch.randn(12, 5))),
    ("bias", nn.Parameter(torch.randn(70))),
    ("scale", nn.Parameter(torch.tensor(2.0))),
    ("empty", nn.Parameter(torch.zeros(0))),
    ("filters", nn.Parameter(torch.randn(4, 3, 2, 2))),
]

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def task_with(make: Make) -> Task:
    class Made(Task):
        def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
            return make([value for _, value in parameters])

    return Made()


BY_ROWS: dict[str, tuple[Make, int]] = {
    "AdamW": (torch.optim.AdamW, 2),
    "AdamW, amsgrad": (lambda values: torch.optim.AdamW(values, amsgrad=True), 3),
    "SGD": (lambda values: torch.optim.SGD(values, lr=0.1), 0),
    "SGD, momentum": (lambda values: torch.optim.SGD(values, lr=0.1, momentum=0.9), 1),
    "RMSprop": (torch.optim.RMSprop, 1),
    "Adagrad": (torch.optim.Adagrad, 1),
}


@pytest.mark.parametrize("name", BY_ROWS)
def test_an_optimizer_that_treats_each_value_by_itself_is_divided_by_rows(name: str) -> None:
    make, moments = BY_ROWS[name]
    found = divide(task_with(make), NAMED)
    assert found.undivided == {"scale"}
    assert found.state_bytes["wide"] == moments * 5 * 4
    assert found.state_bytes["filters"] == moments * 12 * 4
    assert found.state_bytes["bias"] == moments * 4


def test_one_that_needs_whole_weights_gets_them() -> None:
    # torch's own cannot take an empty weight.
    found = divide(task_with(torch.optim.Adafactor), [pair for pair in NAMED if pair[0] != "empty"])
    assert {"wide", "filters", "scale"} <= found.undivided
    # One sum for each row and one for each column.
    assert found.state_bytes["wide"] == (12 + 5) * 4


class Clips(torch.optim.SGD):
    """Scales by the norm of all gradients together."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([value for group in self.param_groups for value in group["params"]], 0.1)
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """Draws random numbers."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                for value in group["params"]:
                    value.add_(torch.randn_like(value))
        return super().step(closure)


@pytest.mark.parametrize("kind", [Clips, Noisy])
def test_one_whose_weights_depend_on_each_other_is_refused(kind: Any) -> None:
    with pytest.raises(TaskError, match=r"the optimizer's update of '\w+' depends on other parameters(.|\n)*AdamW"):
        divide(task_with(lambda values: kind(values, lr=0.1)), NAMED)


def test_of_a_stack_of_large_matrices_few_values_are_tried() -> None:
    """It has the bytes of a whole row, of a stack of experts say, without a copy of seven of them."""
    seen = []

    def noting(values: list[nn.Parameter]) -> torch.optim.Optimizer:
        seen.extend(value.numel() for value in values)
        return torch.optim.AdamW(values)

    stack = torch.zeros(8, 600, 1024, device="meta")
    found = divide(task_with(noting), [("stack", nn.Parameter(torch.zeros(8, 600, 1024)))])
    assert found.state_bytes == {"stack": 2 * 4 * 600 * 1024}
    assert optimizer_bytes(task_with(noting), [("stack", nn.Parameter(stack))]) == {"stack": 8 * 2 * 4 * 600 * 1024}
    assert max(seen) <= 7 * 7 * 1024


def test_it_leaves_weights_and_random_numbers_as_they_are() -> None:
    before = [value.detach().clone() for _, value in NAMED]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    divide(task_with(torch.optim.AdamW), NAMED)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, kept) for (_, value), kept in zip(NAMED, before, strict=True))
    assert all(value.grad is None for _, value in NAMED)


def test_a_name_that_a_tensor_of_the_optimizer_could_have_is_refused() -> None:
    with pytest.raises(TaskError, match="has a name that a sharded state cannot have"):
        divide(task_with(torch.optim.AdamW), [("a/b.weight", nn.Parameter(torch.zeros(4)))])


def test_a_stage_without_trained_weights_has_nothing_to_divide() -> None:
    def nothing(values: list[nn.Parameter]) -> torch.optim.Optimizer:
        raise AssertionError("an optimizer of no weights raises")

    assert divide(task_with(nothing), []) == Division(frozenset(), {})
