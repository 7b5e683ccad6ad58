"""Steps in 16 bits do what a plain PyTorch loop does, and lose no row to an overflow."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.errors import TaskError, TrainingError
from raytrain_plus.job.setting_types import Precision as Name
from raytrain_plus.task import Task
from raytrain_plus.training.exchange.applied import Applied
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.passes.evaluation import evaluate
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.weights.loss_scale import FIRST, GROWTH_STEPS, LARGEST, LossScale, put
from raytrain_plus.workers.states.state_source import sha256_of
from tests.support.precisions import CPU, SHARDS, STEPS, Classifier, batches, steps_of
from tests.unit.training.group import context


class Steep(torch.autograd.Function):
    """The identity; its derivative is as given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slope: float) -> torch.Tensor:
        ctx.slope = slope
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.slope, None


class Overflowing(Classifier):
    """Gradients of scaled losses overflow float16 if their slope is large."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        scores = Steep.apply(model(batch["x"]), float(batch["slope"]))
        return F.cross_entropy(scores.float(), batch["y"])


def run(one: SynchronousSteps, step: int, slope: float = 1.0) -> Applied:
    return one.run(step, batches(step, slope), context(SoloWorld()))


def plain_loop(dtype: torch.dtype | None) -> tuple[list[float], nn.Module]:
    """Return the losses of a hand-written loop with autocast, and its model."""
    task = Classifier()
    model = build_model(task, 1, CPU).module.train()
    optimizer = task.optimizer(list(model.named_parameters()))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for [one] in batches(step).values():
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = task.loss(model, one.batch)
            (loss / SHARDS).backward()
            total += float(loss.detach()) / SHARDS
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return losses, model


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("fp32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16), ("bf16-params", torch.bfloat16)],
)
def test_steps_are_those_of_a_plain_loop_with_autocast(name: Name, dtype: torch.dtype | None, exact: bool) -> None:
    task = Classifier()
    one = steps_of(name, task, exact)
    losses = [run(one, step).loss for step in range(STEPS)]
    expected, model = plain_loop(dtype)
    assert set(task.seen) == {dtype or torch.float32}
    # Gradients of bfloat16 weights are rounded to bfloat16 and then summed in float32, as autocast does; only the order
    # of scaling and rounding differs.
    assert losses == pytest.approx(expected, rel=1e-6 if dtype is None else 1e-3)
    for (own, value), (name_of, other) in zip(one.state.named, model.named_parameters(), strict=True):
        assert (own, value.dtype) == (name_of, torch.float32)
        assert torch.allclose(value, other, atol=1e-6 if dtype is None else 2e-3)


def test_the_model_holds_rounded_copies_of_the_weights() -> None:
    one = steps_of("bf16-params", Classifier())
    initial = [value.clone() for _, value in one.state.named]
    for step in range(3):
        run(one, step)
    for (_, master), copy, before in zip(one.state.named, one.state.module.parameters(), initial, strict=True):
        assert (master.dtype, copy.dtype) == (torch.float32, torch.bfloat16 if copy.dim() > 1 else torch.float32)
        assert torch.equal(copy, master.to(copy.dtype))
        assert not torch.equal(master, before)
    assert all(value.dtype == torch.float32 for held in one.state.optimizer.state.values() for value in held.values())
    # A worker that adopts the state has the same copies, and the next step the same bits.
    other = steps_of("bf16-params", Classifier())
    other.state.adopt(one.state.snapshot())
    assert all(map(torch.equal, one.state.module.parameters(), other.state.module.parameters()))
    assert run(one, 3) == run(other, 3)
    assert sha256_of(one.state) == sha256_of(other.state)


@pytest.mark.parametrize("name", ["bf16", "fp16", "bf16-params"])
def test_evaluation_computes_in_the_same_format(name: Name) -> None:
    task = Classifier()
    one = steps_of(name, task)
    found = evaluate(
        one.state,
        one.passes,
        lambda shard: batches(0)[shard],
        range(SHARDS),
        context(SoloWorld()),
        shards=SHARDS,
        step=0,
    )
    assert set(task.seen) == {torch.float16 if name == "fp16" else torch.bfloat16}
    assert found["loss"] == pytest.approx(math.log(3), abs=0.5)


@pytest.mark.parametrize("clip_value", [None, 1e-3])
@pytest.mark.parametrize("exact", [False, True])
def test_a_step_that_overflows_is_computed_again_with_half_the_scale(exact: bool, clip_value: float | None) -> None:
    one, lower = (steps_of("fp16", Overflowing(), exact, clip_value=clip_value) for _ in range(2))
    first = LossScale(FIRST)
    assert one.state.loss_scale == first
    for step in range(2):
        run(one, step)
        run(lower, step)
    assert one.state.loss_scale == LossScale(first.exponent, 2)
    # Begins with a scale that is small enough.
    put(LossScale(first.exponent - 9), lower.state.counts)
    told, expected = run(one, 2, slope=64.0), run(lower, 2, slope=64.0)
    found = one.state.loss_scale
    assert found is not None
    assert first.exponent - 9 <= found.exponent < first.exponent - 1
    assert found.steps == 1
    assert not told.skipped
    assert (told.rows, told.loss) == (expected.rows, expected.loss)
    # A power of two changes no digit, unless a gradient becomes too small.
    assert told.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)
    weights = zip(one.state.named, lower.state.named, strict=True)
    assert all(torch.allclose(a, b, atol=1e-3) for (_, a), (_, b) in weights)
    # The scale is part of the state, and of its hash.
    newcomer = steps_of("fp16", Overflowing(), exact)
    newcomer.state.adopt(one.state.snapshot())
    assert newcomer.state.loss_scale == found
    before = sha256_of(newcomer.state)
    assert before == sha256_of(one.state)
    put(LossScale(found.exponent - 1, 1), newcomer.state.counts)
    assert sha256_of(newcomer.state) != before


@pytest.mark.parametrize("exact", [False, True])
def test_what_is_not_finite_at_any_scale_is_refused_as_ever(exact: bool) -> None:
    one = steps_of("fp16", Overflowing(), exact)
    with pytest.raises(TrainingError, match=r"gradient of step 0 is not finite in shard 0, first in the parameter '3"):
        run(one, 0, slope=math.inf)
    assert one.state.last_applied == -1


def test_the_scale_grows_after_many_steps_without_overflow() -> None:
    scale = LossScale(LARGEST - 1)
    for _ in range(3 * GROWTH_STEPS):
        scale = scale.after_step()
    assert scale == LossScale(LARGEST)


class Half(Classifier):
    """Its own weights have 16 bits."""

    def model(self) -> nn.Module:
        return super().model().to(torch.float16)


class Casting(Classifier):
    """Opens autocast itself."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.opens):
            return super().loss(model, batch)

    opens = True


class Closing(Casting):
    """Turns autocast off."""

    opens = False


class Coarse(Classifier):
    """Returns a loss in 16 bits."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        return (model(batch["x"]) ** 2).mean().to(torch.bfloat16)


@pytest.mark.parametrize("name", ["fp16", "bf16-params"])
def test_parameters_in_16_bits_are_refused_where_masters_must_have_more(name: Name) -> None:
    with pytest.raises(TaskError, match=r"the parameter '0.weight' is float16.*must keep more digits"):
        steps_of(name, Half())


@pytest.mark.parametrize(
    ("name", "task", "words"),
    [
        ("fp32", Casting, "the task opens torch.autocast for cpu in bfloat16 around the model"),
        ("fp16", Casting, "the task opens torch.autocast for cpu in bfloat16 around the model"),
        ("bf16", Closing, "the task turns torch.autocast off around the model"),
    ],
)
def test_autocast_of_the_task_is_refused(name: Name, task: Callable[[], Task], words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        run(steps_of(name, task()), 0)


def test_a_loss_in_16_bits_is_reported_and_cast() -> None:
    with pytest.warns(UserWarning, match=r"Coarse.loss returned a loss in bfloat16.*logits.float\(\)"):
        assert math.isfinite(run(steps_of("bf16", Coarse()), 0).loss)
