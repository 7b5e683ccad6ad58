"""The ready schedules: the rate at each step, what a state holds of them, and a run that is extended."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from raytrain_plus import schedules
from raytrain_plus.state.json_tree import from_json, to_json

Make = Callable[[torch.optim.Optimizer], LRScheduler]


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)


def steps(scheduler: LRScheduler, count: int) -> Iterator[float]:
    for _ in range(count):
        yield scheduler.optimizer.param_groups[0]["lr"]
        scheduler.optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda it: schedules.warmup_linear(it, 6, warmup=2), [1.0, 2.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0]),
        (lambda it: schedules.warmup_linear(it, 4, end=0.5), [2.0, 1.75, 1.5, 1.25, 1.0, 1.0]),
        (lambda it: schedules.warmup_linear(it, 8, warmup=0.25), [1.0, 2.0, 2.0, 5 / 3]),
        (
            lambda it: schedules.warmup_cosine(it, 5, warmup=1),
            [2.0, 2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0],
        ),
        (lambda it: schedules.warmup_cosine(it, 4, end=0.5), [2.0, 1.5 + 0.5 * math.sqrt(0.5), 1.5]),
        (
            lambda it: schedules.warmup_stable_decay(it, 8, warmup=2, decay=0.5, end=0.2),
            [1.0, 2.0, 2.0, 2.0, 2.0, 1.6, 1.2, 0.8, 0.4, 0.4],
        ),
        (lambda it: schedules.warmup_stable_decay(it, 3, warmup=2, decay=2), [1.0, 2.0, 2.0, 0.0]),
        # A run that ends within the warm-up.
        (lambda it: schedules.warmup_cosine(it, 2, warmup=4), [0.5, 1.0]),
        (lambda it: schedules.warmup_stable_decay(it, 2, warmup=4), [0.5, 1.0]),
    ],
)
def test_the_rate_of_each_step(make: Make, expected: list[float]) -> None:
    assert list(steps(make(sgd()), len(expected))) == pytest.approx(expected)


def test_each_group_keeps_its_share() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (1.0, 0.1)]
    scheduler = schedules.warmup_linear(torch.optim.SGD(groups), 4)
    list(steps(scheduler, 2))
    assert [group["lr"] for group in scheduler.optimizer.param_groups] == pytest.approx([0.5, 0.05])


@pytest.mark.parametrize("make", [schedules.warmup_cosine, schedules.warmup_linear, schedules.warmup_stable_decay])
def test_a_state_is_plain_json_and_an_extended_run_follows_its_new_length(make: Any) -> None:
    expected = list(steps(make(sgd(), 40, warmup=2), 40))
    short = make(sgd(), 10, warmup=2)
    list(steps(short, 10))
    tensors: dict[str, torch.Tensor] = {}
    saved = json.dumps(to_json(short.state_dict(), "scheduler", tensors))
    assert not tensors
    longer = make(sgd(), 40, warmup=2)
    longer.load_state_dict(from_json(json.loads(saved), lambda name, _: tensors[name]))
    longer.optimizer.step()
    longer.step()
    assert list(steps(longer, 29)) == pytest.approx(expected[11:])


@pytest.mark.parametrize(
    ("total", "settings", "wrong"),
    [
        (0, {}, "total_steps is 0"),
        (5, {"warmup": -1}, "warmup is -1"),
        (5, {"warmup": 2.5}, "warmup is 2.5"),
        (5, {"end": 1.5}, "end is 1.5"),
        (5, {"decay": -0.1}, "decay is -0.1"),
    ],
)
def test_numbers_out_of_range(total: int, settings: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        schedules.warmup_stable_decay(sgd(), total, **settings)
