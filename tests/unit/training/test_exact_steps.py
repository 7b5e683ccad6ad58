"""With exact sums a step has the same bits whoever hosts its shards, in whatever order, and whoever dies in it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.collective.world import Operation, Work
from raytrain_plus.data.reader import Microbatch
from raytrain_plus.errors import Interrupted, TaskError, TrainingError
from raytrain_plus.state.named import named_state, state_sha256
from raytrain_plus.training.control import Control
from raytrain_plus.training.model import build_model
from raytrain_plus.training.step import Stepper
from tests.unit.training.group import Group

SHARDS = 12
STEPS = 5
CPU = torch.device("cpu")


class Small(Task):
    """Everything whose order could matter: BatchNorm, dropout, AdamW, clipping, a weight that is shared."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.calls = 0

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Linear(16, 3)
        ).to(self.dtype)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([value for _, value in parameters], lr=1e-2)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        batch["y"].add_(1).remainder_(3)  # a task may write into its batch
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def stepper(task: Task | None = None, exact: bool = True) -> Stepper:
    task = task or Small()
    built = build_model(task, 3, CPU)
    return Stepper(task, built, seed=3, shards=SHARDS, clip_norm=0.5, device=CPU, exact=exact)


def batches(step: int, hosted: Sequence[int], dtype: torch.dtype = torch.float32) -> dict[int, list[Microbatch]]:
    made = {}
    for shard in hosted:
        generator = torch.Generator().manual_seed(1000 * step + shard)
        made[shard] = [
            Microbatch(
                {
                    # In step 3 the inputs are a thousand times larger: the grid no longer fits.
                    "x": torch.randn(4, 6, generator=generator).to(dtype) * (1000 if step == 3 else 1),
                    "y": torch.randint(0, 3, (4,), generator=generator),
                },
                4,
            )
            for _ in range(2)
        ]
    return made


def sha(one: Stepper) -> str:
    return state_sha256(named_state(one.module, one.optimizer, one.named))


def alone(task: Task | None = None, exact: bool = True) -> tuple[str, list[float]]:
    """Hash and losses of the training on one worker that nothing happens to."""
    one = stepper(task, exact)
    control = Control()
    control.begin(0)
    dtype = getattr(task, "dtype", torch.float32)
    losses = [
        one.run(step, batches(step, range(SHARDS), dtype), SoloWorld(), control=control, wait_s=1).loss
        for step in range(STEPS)
    ]
    return sha(one), losses


def schedules(numbers: Sequence[int]) -> int:
    expected, losses = alone()
    deaths = 0
    for number in numbers:
        group = Group(stepper, batches, SHARDS)
        group.train(STEPS, random.Random(number))
        assert {sha(member.stepper) for member in group.members if member.stepper.held == STEPS - 1} == {expected}
        assert [group.losses[step] for step in range(STEPS)] == losses
        deaths += group.deaths
    return deaths


def test_one_hash_for_any_schedule() -> None:
    assert schedules(range(20)) >= 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_hash_for_two_hundred_schedules() -> None:
    assert schedules(range(100, 320)) >= 100


def test_without_exact_sums_the_schedules_give_many_hashes() -> None:
    found = set()
    for number in range(6):
        group = Group(lambda: stepper(exact=False), batches, SHARDS)
        group.train(STEPS, random.Random(number), deaths=False)
        found.add(sha(group.members[0].stepper))
    assert len(found) > 1


def test_exact_and_ring_learn_the_same() -> None:
    _, exact = alone()
    _, ring = alone(exact=False)
    assert exact == pytest.approx(ring, rel=1e-4)


def test_a_step_is_made_again_only_where_its_grid_does_not_fit() -> None:
    task = Small()
    one = stepper(task)
    control = Control()
    control.begin(0)
    times = []
    for step in range(STEPS):
        task.calls = 0
        one.run(step, batches(step, range(SHARDS)), SoloWorld(), control=control, wait_s=1)
        times.append(task.calls / (2 * SHARDS))
    # The first step, which nothing is known for; the one with inputs a thousand times larger; and that after it, in
    # which the gradient of the bias before BatchNorm is a thousand times larger: it is nothing but rounding.
    assert times == [2, 1, 1, 2, 2]


class Breaking(SoloWorld):
    """Breaks when the step is made again."""

    submitted = 0

    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Work:
        self.submitted += name == "gradients.0"
        if self.submitted == 2:
            raise Interrupted("a peer is gone")
        return super().reduce(tensor, name, operation)


def test_a_step_that_is_broken_off_leaves_the_grids_as_they_were() -> None:
    one = stepper()
    control = Control()
    control.begin(0)
    for step in range(3):
        one.run(step, batches(step, range(SHARDS)), SoloWorld(), control=control, wait_s=1)
    before = dict(one.scales)
    assert len(before) == 8 + 2  # of each parameter, and of BatchNorm's two buffers
    with pytest.raises(Interrupted):
        one.run(3, batches(3, range(SHARDS)), Breaking(), control=control, wait_s=1)
    assert (one.scales, one.held) == (before, 2)


def test_float64_parameters() -> None:
    expected, _ = alone(Small(torch.float64))
    group = Group(
        lambda: stepper(Small(torch.float64)), lambda step, hosted: batches(step, hosted, torch.float64), SHARDS
    )
    group.train(STEPS, random.Random(1))
    assert sha(group.members[0].stepper) == expected


def test_what_cannot_be_summed_exactly_is_refused() -> None:
    with pytest.raises(TaskError, match=r"'0\.weight' is bfloat16.*") as caught:
        stepper(Small(torch.bfloat16))
    assert "keep the parameters in float32" in str(caught.value)


class Infinite(Small):
    """Its loss is finite, its gradient is not."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss(model, batch) + (model[4].bias.detach() - model[4].bias).abs().sqrt().sum()


def test_a_gradient_that_is_not_finite_stops_the_run_and_is_named() -> None:
    one = stepper(Infinite())
    before = sha(one)
    control = Control()
    control.begin(0)
    with pytest.raises(TrainingError, match=r"step 0 gives values that are not finite for 4\.bias"):
        one.run(0, batches(0, range(SHARDS)), SoloWorld(), control=control, wait_s=1)
    one.buffers.restore()
    assert (sha(one), one.held) == (before, -1)


class Erratic(Small):
    """A thousand times larger each time that the step is made."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().loss(model, batch) * 1000.0 ** (self.calls // (2 * SHARDS))


def test_a_step_that_is_another_each_time_is_named() -> None:
    one = stepper(Erratic())
    control = Control()
    control.begin(0)
    with pytest.raises(TrainingError, match="are others each time they are computed"):
        one.run(0, batches(0, range(SHARDS)), SoloWorld(), control=control, wait_s=1)
