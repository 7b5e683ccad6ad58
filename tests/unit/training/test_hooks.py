"""Hooks and custom backward passes see the gradients of a microbatch's mean loss, however the model is held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import TrainingError
from raytrain_plus.job.settings import Schedule
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.state.holding import MEAN_LOSS
from raytrain_plus.training.model.model import build_layers, build_model
from raytrain_plus.training.model.precision import Precision
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.shardable import Division
from raytrain_plus.training.weights.step_options import PLAIN, Technique
from tests.support import overlapping, stages
from tests.support.stages import (
    SEED,
    SHARDS,
    STEPS,
    alone,
    batches,
    check_alike,
    collected,
    state_of,
    tensors_of,
    together,
)
from tests.unit.training.group import context

one_computes_at_a_time = stages.one_computes_at_a_time
CPU = torch.device("cpu")


class Clamped(torch.autograd.Function):
    """Passes values, and no gradient beyond a limit."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].clamp(-0.02, 0.02)


def bounded(limit: float) -> Callable[..., Any]:
    """Return a hook of modules that clamps the gradients of their inputs."""

    def hook(_: nn.Module, given: tuple[torch.Tensor | None, ...], __: object) -> Any:
        return tuple(None if one is None else one.clamp(-limit, limit) for one in given)

    return hook


class Layer(nn.Module):
    """Clamps the gradients of its weights, of its outputs and of its inputs."""

    def __init__(self, outputs: int = 6, first: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(6, outputs)
        self.linear.weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
        # A norm is not that of a multiple's parts.
        self.linear.bias.register_hook(lambda gradient: gradient / (0.1 + gradient.norm()))
        if not first:
            # Torch warns if no input has a gradient.
            self.register_full_backward_hook(bounded(0.03))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Clamped.apply(self.linear(x)))


class Hooked(Task):
    """Layers with hooks; microbatches of other weights."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return {"a": lambda: Layer(first=True), **dict.fromkeys("bc", Layer), "d": lambda: Layer(3)}

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([value for _, value in parameters], lr=0.5, momentum=0.9)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"loss": 30 * F.cross_entropy(model(batch["x"]), batch["y"]), "weight": float(batch["y"].sum())}


class SomeRows(Hooked):
    """Scores the rows of one label: a microbatch may have none, and then its mean is NaN."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        labels = torch.where(batch["y"] == 1, 1, -100)
        return {"loss": F.cross_entropy(model(batch["x"]), labels), "weight": float((labels == 1).sum())}


TASKS = pytest.mark.parametrize("kind", [Hooked, SomeRows])


def plain_loop(
    made: Sequence[Iterable[Sequence[Microbatch]]],
    clip: float | None = 0.5,
    seed: int = SEED,
    kind: type[Hooked] = Hooked,
) -> dict[str, torch.Tensor]:
    """Return the weights after steps of such shards, written from the documented rules alone."""
    task = kind()
    model = build_model(task, seed, CPU).module.train()
    optimizer = task.optimizer(list(model.named_parameters()))
    for shards in made:
        sums = {name: torch.zeros_like(value) for name, value in model.named_parameters()}
        total = 0.0
        for one in (one for shard in shards for one in shard):
            optimizer.zero_grad()
            loss, weight = task.loss(model, one.batch).values()
            if weight:
                loss.backward()
                for name, value in model.named_parameters():
                    assert value.grad is not None
                    sums[name] += weight * value.grad
            total += weight
        for name, value in model.named_parameters():
            value.grad = sums[name] / total
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def by_hand(kind: type[Hooked] = Hooked) -> dict[str, torch.Tensor]:
    return plain_loop([batches(step, tuple(range(SHARDS))).values() for step in range(STEPS)], kind=kind)


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return by_hand()


def check_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert that a state has these weights, up to rounding."""
    for name, value in expected.items():
        torch.testing.assert_close(found[f"param/{name}"], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_a_clamped_gradient_is_the_same_whatever_the_shards(shards: int) -> None:
    class Clamp(Task):
        def model(self) -> nn.Module:
            made = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(made.weight)
            made.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
            return made

        def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.SGD([value for _, value in parameters], lr=0.1)

        def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return model(batch).mean()

    task = Clamp()
    one = whole_steps(TrainState(task, [build_model(task, 0, CPU)], Summing(shards), seed=0))
    rows = 8 // shards
    given = {shard: [Microbatch(torch.full((rows, 1), 10.0), rows)] for shard in range(shards)}
    one.run(0, given, context(SoloWorld()))
    assert one.state.module.weight.item() == pytest.approx(-0.1)


TECHNIQUES = {
    "plain": PLAIN,
    "again": Technique(recompute="full"),
    "selective": Technique(recompute="selective"),
    "offload": Technique(offloads=True),
}


@pytest.mark.parametrize("exact", [False, True], ids=["ring", "exact"])
@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_whole_model_trains_as_a_plain_loop(expected: dict[str, torch.Tensor], name: str, exact: bool) -> None:
    check_close(alone(exact, Hooked, TECHNIQUES[name])[1], expected)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.slow
def test_compiled_layers_train_as_a_plain_loop(expected: dict[str, torch.Tensor]) -> None:
    check_close(alone(True, Hooked, Technique(compiled=True))[1], expected)


@pytest.mark.parametrize("exact", [False, True], ids=["ring", "exact"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_stages_train_as_a_plain_loop(expected: dict[str, torch.Tensor], schedule: Schedule, exact: bool) -> None:
    shape = Shape(2, 2)
    told = together(shape, schedule, exact, task=Hooked)
    check_close(collected(told, shape, 1), expected)
    if exact:
        check_alike(told, shape, alone(True, Hooked))


@pytest.mark.parametrize("exact", [False, True], ids=["ring", "exact"])
@TASKS
def test_layers_that_are_gathered_train_as_a_plain_loop(kind: type[Hooked], exact: bool) -> None:
    task = kind()
    state = TrainState(
        task,
        (),
        Summing(SHARDS, exact=exact, bucket_bytes=300),
        seed=SEED,
        technique=Technique(clip_norm=0.5),
        division=Division(frozenset(), {}),
        rebuild=lambda: build_layers(task, SEED, CPU),
    )
    state.begin_with(state.trained.rows)
    one = whole_steps(state)
    for step in range(STEPS):
        one.run(step, batches(step, tuple(range(SHARDS))), context(SoloWorld()))
    check_close(tensors_of(state), by_hand(kind))


@TASKS
def test_overlapping_steps_of_one_each_train_as_a_plain_loop(kind: type[Hooked]) -> None:
    steps, hosted = range(3), tuple(range(overlapping.SHARDS))
    found = overlapping.together(Shape(2, 2), [range(step, step + 1) for step in steps], task=kind)
    weights = found[2][1] | found[3][1]
    expected = plain_loop([overlapping.batches(step, hosted).values() for step in steps], None, overlapping.SEED, kind)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["bf16", "fp16", "bf16-params"])
def test_formats_of_16_bits_train_nearly_so(expected: dict[str, torch.Tensor], name: Any) -> None:
    # Under fp16 the hooks see scaled gradients, as with torch's GradScaler, so they are left out.
    class Linear(Hooked):
        def layers(self) -> dict[str, Callable[[], nn.Module]]:
            return {name: (lambda: nn.Linear(6, 6)) for name in "abc"} | {"d": lambda: nn.Linear(6, 3)}

    task = Linear if name == "fp16" else Hooked
    reference = alone(True, task)
    found = alone(True, task, Technique(Precision(name)))
    assert [one.loss for one in found[0]] == pytest.approx([one.loss for one in reference[0]], rel=0.05)


def test_hooks_that_see_sums_are_refused_but_in_older_runs() -> None:
    class Late(Hooked):
        def layers(self) -> dict[str, Callable[[], nn.Module]]:
            def layer() -> nn.Module:
                made = Layer()
                made.linear.weight.register_post_accumulate_grad_hook(lambda value: None)
                return made

            return super().layers() | {"b": layer}

    with pytest.raises(TrainingError, match=r"'b.linear.weight' has a hook of register_post_accumulate_grad_hook"):
        alone(False, Late)
    one = whole_steps(state_of(Late(), [build_model(Late(), SEED, CPU)], False))
    one.state.rules[MEAN_LOSS] = False
    one.run(0, batches(0, tuple(range(SHARDS))), context(SoloWorld()))


def test_an_older_run_goes_on_with_weighted_losses(expected: dict[str, torch.Tensor]) -> None:
    task = Hooked()
    one = whole_steps(state_of(task, [build_model(task, SEED, CPU)], False))
    one.state.rules[MEAN_LOSS] = False
    for step in range(STEPS):
        one.run(step, batches(step, tuple(range(SHARDS))), context(SoloWorld()))
    with pytest.raises(AssertionError, match="not close"):
        check_close(tensors_of(one.state), expected)


class OnDevice(Hooked):
    """Its weights are tensors, as those of a device are."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        return super().loss(model, batch) | {"weight": batch["y"].sum()}


class ByModules(Hooked):
    """A loss that calls modules of the model, and tells how many rows count by a tensor: perhaps none."""

    def layers(self) -> Any:
        return None

    def model(self) -> nn.Module:
        return nn.ModuleDict({"body": Layer(first=True), "head": Layer(3)})

    def loss(self, model: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        labels = torch.where(batch["y"] == 1, 1, -100)
        loss = F.cross_entropy(model["head"](model["body"](batch["x"])), labels)
        return {"loss": loss, "weight": (labels == 1).sum()}


class Penalised(Hooked):
    """A penalty on weights, which no output of the model leads to; some microbatches have no weight."""

    def layers(self) -> Any:
        return None

    def model(self) -> nn.Module:
        return Layer(3, first=True)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        labels = torch.where(batch["y"] == 1, 1, -100)
        loss = F.cross_entropy(model(batch["x"]), labels)
        return {"loss": loss + sum(value.square().sum() for value in model.parameters()), "weight": (labels == 1).sum()}


def test_a_penalty_counts_nothing_without_weight() -> None:
    check_close(alone(False, Penalised)[1], by_hand(Penalised))


def test_a_loss_that_calls_modules_may_have_no_weight_on_a_device() -> None:
    check_close(alone(False, ByModules)[1], by_hand(ByModules))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_weights_of_a_device_weigh_the_same(schedule: Schedule) -> None:
    of_host = alone(True, Hooked)
    check_alike([alone(True, OnDevice)], Shape(1, 1), of_host)
    shape = Shape(1, 2)
    check_alike(together(shape, schedule, True, task=OnDevice), shape, of_host)
