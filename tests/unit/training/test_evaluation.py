"""Held-out metrics are exact means over rows, for any assignment of shards."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reader import Microbatch
from raytrain_plus.errors import Interrupted, TrainingError
from raytrain_plus.training.context import StepContext
from raytrain_plus.training.evaluation import evaluate
from raytrain_plus.training.model import Built
from raytrain_plus.training.step import Stepper
from raytrain_plus.training.thread_control import Control

ROWS = {0: [3, 3, 1], 1: [4], 2: [1]}


class Means(Task):
    def __init__(self, figures: Any = None) -> None:
        self.figures = figures

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> Any:
        assert not model.training
        assert not torch.is_grad_enabled()
        if self.figures == "few":
            return {"value": batch.mean()} if batch[0] < 7 else {"other": 1.0}
        return {"value": batch.mean()} if self.figures is None else self.figures


class Together:
    """A world whose members' sums meet in this process."""

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, 0
        self._barrier = threading.Barrier(size)
        self._parts: dict[str, list[torch.Tensor]] = {}

    def reduce(self, tensor: torch.Tensor, name: str, operation: str = "sum") -> Any:
        self._parts.setdefault(name, []).append(tensor.clone())
        self._barrier.wait(10)
        parts = torch.stack(self._parts[name])
        tensor.copy_(parts.sum(dim=0) if operation == "sum" else parts.amax(dim=0))
        return SoloWorld().reduce(tensor, name)


def batches(shard: int) -> list[Microbatch]:
    start = sum(sum(ROWS[other]) for other in range(shard))
    values = torch.arange(start, start + sum(ROWS[shard]), dtype=torch.float32)
    return [Microbatch(part, len(part)) for part in values.split(ROWS[shard])]


def figures(hosted: list[int], world: Any, figure: Any = None, control: Control | None = None) -> dict[str, float]:
    stepper = Stepper(
        Means(figure), [Built(nn.Linear(1, 1), ())], seed=3, shards=3, clip_norm=None, device=torch.device("cpu")
    )
    context = StepContext(world=world, control=control or begun(), wait_s=10.0)
    return evaluate(stepper, batches, hosted, context, shards=3, step=7)


def begun() -> Control:
    control = Control()
    control.begin(0)
    return control


def test_metrics_are_row_means_with_the_same_bits_on_any_number_of_workers() -> None:
    alone = figures([0, 1, 2], SoloWorld())
    assert alone["value"] == np.arange(12).mean()
    for layout in ([[0], [1, 2]], [[2], [0], [1]]):
        world = Together(len(layout))
        with ThreadPoolExecutor(len(layout)) as members:
            told = list(members.map(partial(figures, world=world), layout, timeout=20))
        assert told == [alone] * len(layout)


@pytest.mark.parametrize(
    ("wrong", "words"), [(3.0, "expected a dict"), ({"loss": torch.zeros(2)}, "not a single number")]
)
def test_invalid_metrics_are_rejected(wrong: Any, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        figures([0, 1, 2], SoloWorld(), wrong)


def test_metric_names_must_agree_between_batches_and_workers() -> None:
    with pytest.raises(TrainingError, match="different metrics for different batches: value, and other"):
        figures([0, 1, 2], SoloWorld(), "few")
    world = Together(2)
    with ThreadPoolExecutor(2) as members:
        tries = [members.submit(figures, hosted, world, "few") for hosted in ([0], [2])]
        for tried in tries:
            with pytest.raises(TrainingError, match="different metrics for different batches"):
                tried.result(20)


def test_an_evaluation_is_interrupted_when_the_group_changes() -> None:
    control = begun()
    control.interrupt(0)
    with pytest.raises(Interrupted):
        figures([0, 1, 2], SoloWorld(), control=control)
