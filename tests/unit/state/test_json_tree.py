"""Values besides tensors survive conversion to JSON and back, or are refused by name."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.errors import TaskError
from raytrain_plus.state.json_tree import from_json, to_json

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


def there_and_back(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(to_json(value, "state", tensors), allow_nan=False)
    return from_json(json.loads(text), lambda name, on_cpu: tensors[name])


def alike(left: Any, right: Any) -> bool:
    """Return whether two values are equal, with types and order of keys; NaN equals itself."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, dict):
        return alike(list(left.items()), list(right.items()))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(alike, left, right))
    return bool(left == right)


@given(PLAIN)
def test_plain_values_come_back_the_same(value: Any) -> None:
    assert alike(there_and_back(value), value)


def test_the_values_of_schedulers_survive() -> None:
    state = {"milestones": Counter({30: 1, 80: 2}), "~": 3, "seen": {3, 1}, "base": (0.1, 0.2), "best": math.inf}
    assert there_and_back(state) == state
    assert there_and_back(np.float64(0.1)) == 0.1
    assert there_and_back(OrderedDict(a=1)) == {"a": 1}


def test_tensors_are_named_by_their_path() -> None:
    tensors: dict[str, torch.Tensor] = {}
    tree = to_json({"exp_avg": torch.ones(2), "history": [torch.zeros(1), 3]}, "optim/w", tensors)
    assert sorted(tensors) == ["optim/w/exp_avg", "optim/w/history/0"]
    assert tree["exp_avg"] == {"~": "tensor", "name": "optim/w/exp_avg", "cpu": True}
    assert from_json(tree, lambda name, on_cpu: tensors[name])["history"] == [torch.zeros(1), 3]


@pytest.mark.parametrize("value", [lambda: 0, 1j, object(), namedtuple("Point", "x")(1), b"bytes", torch.float32])
def test_unsupported_values_are_refused_by_name(value: Any) -> None:
    with pytest.raises(TaskError, match=f"holds a {type(value).__name__} in 'scheduler/deep/0'"):
        to_json({"deep": [value]}, "scheduler", {})


class Rate:
    """A custom schedule, as a callable."""

    def __call__(self, step: int) -> float:
        return 1 / (step + 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 3, 3]),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.2, 3),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, Rate()),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o, total_iters=2), torch.optim.lr_scheduler.CosineAnnealingLR(o, 5)],
            [2],
        ),
    ],
)
def test_torch_schedulers_resume_where_they_were(make: Any) -> None:
    def begin() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        return optimizer, make(optimizer)

    def step(optimizer: torch.optim.Optimizer, scheduler: Any) -> float:
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
        return float(optimizer.param_groups[0]["lr"])

    first, other = begin(), begin()
    for _ in range(4):
        step(*first)
    other[1].load_state_dict(there_and_back(first[1].state_dict()))
    for mine, theirs in zip(first[0].param_groups, other[0].param_groups, strict=True):
        theirs.update({key: value for key, value in mine.items() if key != "params"})
    assert [step(*first) for _ in range(6)] == [step(*other) for _ in range(6)]
