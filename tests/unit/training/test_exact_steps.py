"""With exact sums a step has the same bits, whichever workers host its shards, in any order, and with any deaths."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.collective.world import Operation, Work
from raytrain_plus.errors import Interrupted, TaskError, TrainingError
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.model.randomness import make_deterministic
from raytrain_plus.training.passes import microbatch_loss
from tests.support.exact_steps import SHARDS, STEPS, Small, batches, sha, steps_of
from tests.unit.training.group import Group, context


def alone(task: Task | None = None, exact: bool = True) -> tuple[str, list[float]]:
    """Return hash and losses of an undisturbed training on one worker."""
    one = steps_of(task, exact)
    control = Control()
    control.begin(0)
    dtype = getattr(task, "dtype", torch.float32)
    losses = [
        one.run(step, batches(step, range(SHARDS), dtype), context(SoloWorld(), control)).loss for step in range(STEPS)
    ]
    return sha(one.state), losses


@pytest.fixture(scope="module")
def undisturbed() -> tuple[str, list[float]]:
    """Return hash and losses of `Small` with exact sums."""
    return alone()


def schedules(numbers: Sequence[int], undisturbed: tuple[str, list[float]]) -> int:
    expected, losses = undisturbed
    deaths = 0
    for number in numbers:
        group = Group(steps_of, batches, SHARDS)
        group.train(STEPS, random.Random(number))
        assert {sha(state) for state in group.states if state.last_applied == STEPS - 1} == {expected}
        assert [group.losses[step] for step in range(STEPS)] == losses
        deaths += group.deaths
    return deaths


def test_one_hash_for_any_schedule(undisturbed: tuple[str, list[float]]) -> None:
    assert schedules([3], undisturbed) >= 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_hash_for_two_hundred_schedules(undisturbed: tuple[str, list[float]]) -> None:
    assert schedules([*range(3), *range(100, 320)], undisturbed) >= 100


def test_without_exact_sums_the_schedules_give_many_hashes() -> None:
    found = set()
    for number in range(2):
        group = Group(lambda: steps_of(exact=False), batches, SHARDS)
        group.train(STEPS, random.Random(number), deaths=False)
        found.add(sha(group.members[0].steps.state))
    assert len(found) > 1


def test_exact_and_ring_train_alike(undisturbed: tuple[str, list[float]]) -> None:
    _, exact = undisturbed
    _, ring = alone(exact=False)
    assert exact == pytest.approx(ring, rel=1e-4)


def test_a_step_is_recomputed_only_if_its_grid_does_not_fit() -> None:
    task = Small()
    one = steps_of(task)
    control = Control()
    control.begin(0)
    times = []
    for step in range(STEPS):
        task.calls = 0
        one.run(step, batches(step, range(SHARDS)), context(SoloWorld(), control))
        times.append(task.calls / (2 * SHARDS))
    # The first step, without a known grid; the step that weighs a thousand times more; and the step after it.
    assert times == [2, 1, 1, 2, 2]


class Breaking(SoloWorld):
    """A world that breaks when the step is recomputed."""

    submitted = 0

    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Work:
        self.submitted += name == "gradients.0.0"
        if self.submitted == 2:
            raise Interrupted("a peer is gone")
        return super().reduce(tensor, name, operation)


def test_an_aborted_step_keeps_the_grids() -> None:
    one = steps_of()
    control = Control()
    control.begin(0)
    for step in range(3):
        one.run(step, batches(step, range(SHARDS)), context(SoloWorld(), control))
    before = dict(one.state.scales)
    assert "first.weight" in before
    assert "inner.1.running_mean" in before
    with pytest.raises(Interrupted):
        one.run(3, batches(3, range(SHARDS)), context(Breaking(), control))
    assert (one.state.scales, one.state.last_applied) == (before, 2)


@pytest.mark.slow
def test_float64_parameters() -> None:
    expected, _ = alone(Small(torch.float64))
    group = Group(
        lambda: steps_of(Small(torch.float64)), lambda step, hosted: batches(step, hosted, torch.float64), SHARDS
    )
    group.train(STEPS, random.Random(1))
    assert sha(group.members[0].steps.state) == expected


def test_parameters_that_cannot_be_summed_exactly_are_rejected() -> None:
    with pytest.raises(TaskError, match=r"'nothing' is bfloat16.*") as caught:
        steps_of(Small(torch.bfloat16))
    assert "keep the parameters in float32" in str(caught.value)


class Infinite(Small):
    """Its loss is finite, but its gradient is not."""

    def loss(self, model: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        loss, weight = super().loss(model, batch).values()
        return {"loss": loss + (model.last.bias.detach() - model.last.bias).abs().sqrt().sum(), "weight": weight}


def test_a_nonfinite_gradient_stops_the_run_and_is_named() -> None:
    one = steps_of(Infinite())
    before = sha(one.state)
    control = Control()
    control.begin(0)
    with pytest.raises(TrainingError, match=r"of step 0 is not finite in shard 0, first in the parameter 'last\.bias'"):
        one.run(0, batches(0, range(SHARDS)), context(SoloWorld(), control))
    one.state.restore_buffers()
    assert (sha(one.state), one.state.last_applied) == (before, -1)


class Weightless(Small):
    """All rows have the weight zero."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {**super().loss(model, batch), "weight": 0.0}


def test_weights_that_sum_to_zero_are_an_error() -> None:
    one = steps_of(Weightless())
    control = Control()
    control.begin(0)
    with pytest.raises(TrainingError, match=r"weights that the task's loss returned in step 0 sum to 0"):
        one.run(0, batches(0, range(SHARDS)), context(SoloWorld(), control))
    assert one.state.last_applied == -1


class Masked(Small):
    """Some microbatches have no label at all: their mean is not a number, and their weight is 0."""

    def __init__(self, safe: bool, of_tensor: bool = False, submodule: bool = False) -> None:
        super().__init__()
        self.safe, self.of_tensor, self.submodule = safe, of_tensor, submodule

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        # In each second microbatch or so.
        mask = (batch["y"] > 0) & (batch["x"][0, 0] > 0)
        scores = model(batch["x"]) if not self.submodule else model.forward(batch["x"])
        each = nn.functional.cross_entropy(scores, batch["y"], reduction="none") * mask
        count = mask.sum()
        mean = each.sum() / (count.clamp(min=1) if self.safe else count)
        return {"loss": mean, "weight": count if self.of_tensor else float(count)}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("of_tensor", "submodule"), [(False, False), (True, False), (False, True)])
def test_a_microbatch_of_weight_0_changes_nothing(exact: bool, of_tensor: bool, submodule: bool) -> None:
    expected, losses = alone(Masked(safe=True), exact)
    found = alone(Masked(False, of_tensor, submodule), exact)
    assert all(map(math.isfinite, losses))
    assert found == (expected, losses)


def test_gradients_of_outputs_are_masked_where_their_weight_is() -> None:
    for weight, kept in ((0.0, 0.0), (2.0, math.nan)):
        value = torch.ones(3, requires_grad=True)
        output = value * 2
        microbatch_loss._mask([output], torch.tensor(weight))
        (output * math.nan).sum().backward()
        assert value.grad is not None
        assert value.grad.tolist() == pytest.approx([kept] * 3, nan_ok=True)


class Erratic(Small):
    """A loss that is a thousand times larger in each computation of the step."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        loss, weight = super().loss(model, batch).values()
        return {"loss": loss * 1000.0 ** (self.calls // (2 * SHARDS)), "weight": weight}


def test_an_irreproducible_step_is_an_error() -> None:
    one = steps_of(Erratic())
    control = Control()
    control.begin(0)
    with pytest.raises(TrainingError, match="gradients of step 0 are not reproducible"):
        one.run(0, batches(0, range(SHARDS)), context(SoloWorld(), control))


class Teacher(Small):
    """Keep a moving average in a frozen parameter."""

    def loss(self, model: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        model.frozen.weight.mul_(0.9)
        return super().loss(model, batch)


def test_a_parameter_changed_by_the_loss_is_named() -> None:
    one = steps_of(Teacher())
    control = Control()
    control.begin(0)
    with pytest.raises(TrainingError, match=r"changed the parameter 'frozen\.weight' in place.*register_buffer"):
        one.run(0, batches(0, range(SHARDS)), context(SoloWorld(), control))


class Twice(Small):
    """A layer shared by two blocks, each with reentrant checkpointing."""

    def loss(self, model: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        x = model.first(batch["x"])
        for _ in range(2):
            x = checkpoint(model.tied, x, use_reentrant=True)
        return {"loss": nn.functional.cross_entropy(model.last(x), batch["y"]), "weight": 1.0}


def test_a_gradient_accumulated_twice_is_an_error() -> None:
    one = steps_of(Twice())
    control = Control()
    control.begin(0)
    with pytest.raises(TrainingError, match=r"accumulated twice in one backward pass.*use_reentrant=False"):
        one.run(0, batches(0, range(SHARDS)), context(SoloWorld(), control))


def test_unchanged_buffers_and_single_writer_buffers_keep_their_bits() -> None:
    one = steps_of()
    control = Control()
    control.begin(0)
    one.run(0, batches(0, range(SHARDS)), context(SoloWorld(), control))
    net: Any = one.state.module
    assert torch.equal(net.angles, torch.polar(torch.ones(3), torch.arange(3.0)))
    assert int(net.counter) == 2**60 + 1 + 2  # shard 0 has two microbatches
    assert (net.signed.tolist(), bool(net.signed.signbit().any())) == ([0.0, 1.5], False)
    assert net.average is one.state.parts[0].buffers._named["average"]
    assert bool(net.average.abs().sum() > 0)


class Tiny(Small):
    """Its gradients are hardly larger than the smallest normal numbers."""

    def __init__(self) -> None:
        super().__init__(torch.float64)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        loss, weight = super().loss(model, batch).values()
        return {"loss": loss * 2.0**-1010, "weight": weight}


def test_a_process_that_flushes_denormals_to_zero(undisturbed: tuple[str, list[float]]) -> None:
    assert torch.set_flush_denormal(True)
    try:
        assert alone() == undisturbed
        one = steps_of(Tiny())
        control = Control()
        control.begin(0)
        for step in range(STEPS):
            one.run(
                step,
                batches(step, range(SHARDS), torch.float64),
                context(SoloWorld(), control),
            )
        # A quantum flushed to zero would cause a division by zero, and no grid would ever fit.
        assert min(one.state.scales.values()) == -1022
        group = Group(lambda: steps_of(Tiny()), lambda step, hosted: batches(step, hosted, torch.float64), SHARDS)
        group.train(STEPS, random.Random(1))
        assert {sha(state) for state in group.states if state.last_applied == STEPS - 1} == {sha(one.state)}
    finally:
        torch.set_flush_denormal(False)


def test_nondeterministic_operations_are_rejected() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    try:
        make_deterministic()
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.benchmark
    finally:
        torch.use_deterministic_algorithms(before)
