"""A step whose loss or gradient is not finite changes nothing, on any path.

Once, with `reduction: ring` and without `clip_norm`, a NaN gradient under a finite loss was applied. When that happened
in the last step, the run ended successfully and exported a model full of NaN.
"""

from __future__ import annotations

import math
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.errors import TrainingError
from raytrain_plus.job.settings import Schedule
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.membership.view import host_shards
from raytrain_plus.state.named import named_state, state_sha256
from raytrain_plus.task import BufferRule, Task
from raytrain_plus.training.exchange.applied import Applied
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.exchange.verdict import SKIPPED_IN_A_ROW
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.step.window import OverlappingSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.step_options import PLAIN, Technique
from tests.support.nonfinite import BUCKET_BYTES, CPU, NAMES, SHARDS, Risky, batches, together
from tests.support.stages import Ring, RingWorld, one_computes_at_a_time
from tests.unit.parallel.pipeline.replicas import at_once
from tests.unit.training.group import context

__all__ = ["one_computes_at_a_time"]


def control() -> Control:
    made = Control()
    made.begin(0)
    return made


def alone(
    exact: bool = False, skip: bool = False, technique: Technique = PLAIN, task: Task | None = None
) -> SynchronousSteps:
    task = task or Risky()
    built = build_model(task, 1, CPU)
    state = TrainState(
        task, [built], Summing(SHARDS, exact=exact, bucket_bytes=BUCKET_BYTES), seed=1, technique=technique
    )
    return whole_steps(state, skip_nonfinite=skip)


def run(one: SynchronousSteps, step: int, **settings: Any) -> Applied:
    given = batches(step, range(SHARDS), **settings)
    return one.run(step, given, context(SoloWorld()))


def sha(one: SynchronousSteps) -> str:
    one.state.restore_buffers()
    return state_sha256(named_state(one.state.module, one.state.optimizer, one.state.named))


NAMED = r"gradient of step 2 is not finite in shard 1, first in the parameter 'c\.normal\.bias'"


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("technique", [PLAIN, Technique(clip_norm=0.5), Technique(clip_value=0.1)], ids=str)
def test_a_nonfinite_gradient_is_never_applied_and_is_named(exact: bool, technique: Technique) -> None:
    one = alone(exact, technique=technique)
    for step in range(2):
        run(one, step)
    before = sha(one)
    with pytest.raises(TrainingError, match=NAMED):
        run(one, 2)
    assert (sha(one), one.state.last_applied, one.state.ready) == (before, 1, None)


@pytest.mark.parametrize("exact", [False, True])
def test_the_norm_of_every_step_is_reported(exact: bool) -> None:
    one = alone(exact)
    free = run(one, 0)
    gradients = [value.grad.flatten() for _, value in one.state.named if value.grad is not None]
    assert free.grad_norm == pytest.approx(float(torch.cat(gradients).double().norm()), rel=1e-12)
    # Before clipping.
    assert run(alone(exact, technique=Technique(clip_norm=free.grad_norm / 10)), 0).grad_norm == free.grad_norm


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("loss_too", [False, True])
def test_a_skipped_step_changes_only_the_step_number(exact: bool, loss_too: bool) -> None:
    one, other = alone(exact, skip=True), alone(exact, skip=True)
    for step in range(2):
        assert run(one, step) == run(other, step)
    before = sha(one)
    told = run(one, 2, shift=math.nan if loss_too else 0.0)
    assert told.skipped
    assert told.rows == 4 * 2 * SHARDS
    assert math.isnan(told.loss) == loss_too
    assert not math.isfinite(told.grad_norm)
    assert (sha(one), one.state.last_applied, one.state.counts) == (before, 2, {"skipped": 1})
    # The following steps are those of a run without the skipped step.
    other.state.last_applied = 2
    assert run(one, 3) == run(other, 3)
    assert sha(one) == sha(other) != before
    assert one.state.counts == {"skipped": 0}


def test_a_nonfinite_loss_is_refused_without_recomputing() -> None:
    one = alone()
    before = sha(one)
    with pytest.raises(TrainingError, match="the loss of step 0 is not finite in shards 0, 1, 2, 3"):
        run(one, 0, shift=math.inf)
    assert (sha(one), one.state.last_applied, one.state.ready) == (before, -1, None)


def test_ten_consecutive_nonfinite_steps_stop_a_run_that_skips_them() -> None:
    one = alone(skip=True)
    run(one, 0)
    for step in range(1, SKIPPED_IN_A_ROW):
        assert run(one, step, bad=(step, 0)).skipped
    # The count is part of the state: a new worker continues it.
    newcomer = alone(skip=True)
    newcomer.state.adopt(one.state.snapshot())
    assert newcomer.state.counts == one.state.counts == {"skipped": 9}
    with pytest.raises(
        TrainingError, match=r"10 consecutive steps were not finite, and `elastic.on_nonfinite: skip` allows 9"
    ):
        run(newcomer, 10, bad=(10, 0))
    assert newcomer.state.last_applied == 9
    assert not run(one, 10).skipped


class Twisted(Risky):
    """A bit flips the first time that a step is computed."""

    def __init__(self) -> None:
        self.calls = count()

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if next(self.calls) == 3:
            batch["x"][:, 5] = 1
        return super().loss(model, batch)


@pytest.mark.parametrize("exact", [False, True])
def test_a_transient_fault_costs_only_time(exact: bool) -> None:
    healthy = alone(exact)
    told = run(healthy, 0)
    one = alone(exact, task=Twisted())
    assert run(one, 0) == told
    assert sha(one) == sha(healthy)


class Overflowing(Risky):
    """The mean of its shards is finite; their sum exceeds float32."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        bias: torch.Tensor = model.get_submodule("d").linear.bias  # type: ignore[assignment]
        return super().loss(model, batch) + bias.sum() * 2.0e37


def test_a_sum_that_overflows_is_not_applied() -> None:
    ring, hosted = Ring(2), host_shards(SHARDS, 2)

    def worker(rank: int) -> tuple[str, int | None]:
        one = alone(task=Overflowing())
        with pytest.raises(TrainingError) as caught:
            one.run(0, batches(0, hosted[rank]), context(RingWorld(rank, ring)))
        return str(caught.value), one.state.last_applied

    words = (
        "not finite in the parameter 'd.linear.bias', although it is finite in each shard: the sum exceeds the range"
    )
    for said, held in at_once(worker, range(2)):
        assert words in said
        assert held == -1
    assert math.isfinite(run(alone(exact=True, task=Overflowing()), 0).grad_norm), "exact sums are float64"


class Runaway(Risky):
    """Its statistics exceed the range of their dtype, although loss and gradients do not."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        variance: torch.Tensor = model.get_submodule("b").normal.running_var  # type: ignore[assignment]
        if model.training:
            variance.fill_(math.inf)
        return super().loss(model, batch)


class First(Runaway):
    """The first shard decides the buffer's value."""

    def buffer_rule(self, name: str) -> BufferRule | None:
        return "first" if name.endswith("running_var") else None


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("task", [Runaway, First])
def test_a_buffer_that_would_not_be_finite_is_not_applied(task: type[Task], exact: bool) -> None:
    one = alone(exact, task=task())
    with pytest.raises(TrainingError, match=r"the buffer 'b\.normal\.running_var' would not be finite after step 0"):
        run(one, 0)
    assert one.state.last_applied == -1
    skipping = alone(exact, skip=True, task=task())
    before = sha(skipping)
    assert run(skipping, 0).skipped
    assert (sha(skipping), skipping.state.last_applied) == (before, 0)


def test_initially_nonfinite_values_are_allowed() -> None:
    assert alone().state.allowed == {f"buffer/{name}.mask" for name in NAMES}


def own_state(one: SynchronousSteps) -> list[torch.Tensor]:
    return [value.detach().clone() for _, value in one.state.named]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("shape", "schedule"), [(Shape(2, 2), "1f1b"), (Shape(1, 2), "interleaved")], ids=str)
def test_all_stages_refuse_a_step_with_the_same_message(shape: Shape, schedule: Schedule, exact: bool) -> None:
    def act(one: SynchronousSteps, world: Any, hosted: tuple[int, ...], data: bool) -> Any:
        def made(step: int) -> Applied:
            return one.run(step, batches(step, hosted, data), context(world))

        for step in range(2):
            made(step)
        before = own_state(one)
        with pytest.raises(TrainingError, match=NAMED):
            made(2)
        assert all(map(torch.equal, before, own_state(one)))
        return one.state.last_applied, one.state.ready

    assert together(shape, schedule, act, exact=exact) == [(1, None)] * shape.size


def test_all_stages_skip_a_step_together() -> None:
    def act(one: SynchronousSteps, world: Any, hosted: tuple[int, ...], data: bool) -> Any:
        told = [one.run(step, batches(step, hosted, data), context(world)).skipped for step in range(4)]
        return told, one.state.last_applied, one.state.counts

    expected = ([False, False, True, False], 3, {"skipped": 0})
    assert together(Shape(2, 2), "1f1b", act, skip=True) == [expected] * 4


def test_a_worker_interrupted_while_others_skipped_a_step_skips_it_too() -> None:
    one = alone(skip=True)
    run(one, 0)
    before = sha(one)
    summed: list[Any] = []
    apply = one.state.apply
    one.state.apply = summed.append  # type: ignore[method-assign]
    run(one, 2)
    one.state.apply = apply  # type: ignore[method-assign]
    assert one.state.ready == 2
    one.state.finish(summed[0])
    assert (sha(one), one.state.last_applied, one.state.counts) == (before, 2, {"skipped": 1})


def test_an_overlapping_step_with_a_nonfinite_gradient_is_not_applied() -> None:
    def act(one: OverlappingSteps, world: Any, hosted: tuple[int, ...], data: bool) -> Any:
        try:
            one.make(range(4), lambda step: batches(step, hosted), context(world))
        except TrainingError as error:
            return str(error), all(bool(value.isfinite().all()) for _, value in one.state.named)
        except Exception as error:
            return type(error).__name__, all(bool(value.isfinite().all()) for _, value in one.state.named)
        return "", False

    told = together(Shape(1, 2), "pipedream", act)
    # The stage with the fault reports it; the other stage waits for it until it is interrupted.
    assert "step 2 is not finite in shard 1, first in the parameter 'c.linear.bias'" in told[1][0]
    assert [finite for _, finite in told] == [True, True]
