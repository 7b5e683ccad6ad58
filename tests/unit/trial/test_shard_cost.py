"""A job whose shards are so small that their own cost counts is told so, with the number that would not be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.job.data_settings import Data
from raytrain_plus.job.settings import Job
from raytrain_plus.task import Task
from raytrain_plus.training.step.build import build_state, whole_steps
from raytrain_plus.trial import shard_cost
from raytrain_plus.trial.shard_cost import ShardCost, measure_shard_cost
from tests.unit.training.group import context

ROW_S = 0.0002


class Clock:
    """It advances by what passes and shards cost alone."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Timed(Task):
    """Its passes take the same time for each row."""

    clock: Clock

    def model(self) -> nn.Module:
        return nn.Linear(2, 1)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.clock.now += ROW_S * len(batch)
        return model(batch).square().mean()

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([value for _, value in parameters], lr=1e-3)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(shard_cost, "time", made)
    return made


def measured(clock: Clock, shards: int, batch_size: int = 64, own_s: float = 0.0) -> ShardCost:
    task = Timed()
    task.clock = clock
    job = Job(name="x", task=Timed, data=Data(path="unread", batch_size=batch_size, shards=shards), steps=1)
    steps = whole_steps(build_state(job, task, torch.device("cpu")))
    run = steps.run

    def slower(step: int, given: Any, where: Any) -> Any:
        clock.now += 0.01 + own_s * len(given)
        return run(step, given, where)

    steps.run = slower  # type: ignore[method-assign]
    return measure_shard_cost(job, steps, context(SoloWorld()), lambda rows: Microbatch(torch.ones(rows, 2), rows))


def test_the_number_of_shards_whose_cost_is_small_is_named(clock: Clock) -> None:
    found = measured(clock, shards=16, own_s=0.0012)
    # 1.2 ms are a fifth of the passes of 30 rows.
    assert found == ShardCost(16, 4, pytest.approx(0.0008), pytest.approx(0.0012), 2)
    assert found.remark() == (
        "each of the 16 shards costs 1.20 ms beside the 0.80 ms that the passes of its 4 rows take, more than a fifth; "
        "with data.shards = 2 it would be less"
    )


def test_large_shards_get_no_remark(clock: Clock) -> None:
    found = measured(clock, shards=2, own_s=0.0012)
    assert (found.small, found.remark()) == (True, "")


def test_long_passes_are_not_measured_further(clock: Clock) -> None:
    found = measured(clock, shards=1, batch_size=128)
    assert (found.own_s, found.small) == (0.0, True)


@pytest.mark.parametrize(("shards", "whole", "fewer"), [(12, 96, [8, 6, 4, 3, 2, 1]), (1, 96, []), (4, 6, [3, 2, 1])])
def test_only_numbers_that_divide_the_rows_are_named(shards: int, whole: int, fewer: list[int]) -> None:
    assert list(shard_cost._divisors_below(shards, whole)) == fewer


def test_a_batch_that_is_too_small_for_any_number_of_shards_is_named() -> None:
    remark = ShardCost(4, 8, 0.001, 0.003).remark()
    assert remark == (
        "each of the 4 shards costs 3.00 ms beside the 1.00 ms that the passes of its 8 rows take, more than a fifth; "
        "so it would with any number of them: a larger data.batch_size lowers that share"
    )
