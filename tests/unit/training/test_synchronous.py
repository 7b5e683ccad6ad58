"""A step of pipelined model replicas equals the step of one worker: the same bits with exact sums."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.collective.world import Operation
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import Interrupted, TaskError, TrainingError
from raytrain_plus.job.settings import Schedule
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.state.named import state_sha256
from raytrain_plus.training.exchange.header import Flags
from raytrain_plus.training.model.model import build_chunks, build_model, layer_names
from raytrain_plus.training.model.precision import Precision
from raytrain_plus.training.passes.evaluation import evaluate
from raytrain_plus.training.passes.held_out import AT_ONCE
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.weights.step_options import Technique
from tests.support.stages import (
    CPU,
    SEED,
    SHARDS,
    STEPS,
    Deep,
    Tied,
    Told,
    alone,
    batches,
    check_alike,
    collected,
    control,
    one_computes_at_a_time,
    state_of,
    tensors_of,
    together,
)
from tests.unit.parallel.pipeline import replicas
from tests.unit.parallel.pipeline.replicas import COMPUTES
from tests.unit.training.group import context

__all__ = ["one_computes_at_a_time"]

ALL: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zero-bubble")
CASES = [
    pytest.param(shape, schedule, marks=() if schedule == "1f1b" or shape == Shape(2, 2) else pytest.mark.slow)
    for shape in (Shape(1, 2), Shape(2, 2), Shape(1, 4), Shape(3, 2))
    for schedule in ALL
]


@pytest.fixture(scope="module")
def of_one() -> Told:
    """Return one worker's results with exact sums."""
    return alone(exact=True)


@pytest.mark.parametrize(("shape", "schedule"), CASES, ids=str)
def test_the_bits_are_those_of_one_worker(shape: Shape, schedule: Schedule, of_one: Told) -> None:
    check_alike(together(shape, schedule, exact=True), shape, of_one)


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zero-bubble", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["bf16", "fp16", "bf16-params"])
def test_the_bits_are_those_of_one_worker_in_16_bits(name: Any, schedule: Schedule) -> None:
    technique = Technique(Precision(name))
    applied, state = alone(exact=True, technique=technique)
    assert ("scale/loss" in state) == (name == "fp16")
    for found, own in together(Shape(1, 2), schedule, exact=True, technique=technique):
        assert found == applied
        assert [key for key, value in own.items() if not torch.equal(state[key], value)] == []


@pytest.mark.parametrize("schedule", ALL)
def test_the_sums_of_every_chunk_start_in_its_last_backward_pass(schedule: Schedule) -> None:
    def started(one: SynchronousSteps, world: Any, hosted: tuple[int, ...], data: bool) -> dict[str, list[bool]]:
        """Return, for each chunk, whether each bucket was submitted in a backward pass."""
        found: dict[str, list[bool]] = {}

        class Watched:
            rank, size = world.rank, world.size

            def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Any:
                if name.startswith("gradients."):
                    found.setdefault(name.rpartition(".")[0], []).append(
                        torch._C._current_autograd_node() is not None  # type: ignore[attr-defined]
                    )
                return world.reduce(tensor, name, operation)

        one.run(0, batches(0, hosted, data), context(Watched()))
        return found

    members = together(Shape(2, 2), schedule, exact=False, act=started)
    assert [list(found) for found in members] == [
        [f"gradients.{n}" for n in reversed(range(len(found)))] for found in members
    ]
    early = [chunk[0] for found in members for chunk in found.values()]
    # In a divided backward pass, only the weights of the model's first layers report when their gradients are complete.
    assert all(early) if schedule != "zero-bubble" else any(early)


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zero-bubble", marks=pytest.mark.slow)])
def test_a_step_that_others_have_applied_is_finished_to_the_same_bits(schedule: Schedule, of_one: Told) -> None:
    applied, state = of_one

    def interrupted_in_the_last(one: SynchronousSteps, world: Any, hosted: tuple[int, ...], data: bool) -> Any:
        """The second replica's members hear of a death when all sums are complete, before they have applied them."""
        ours = control()

        class Sealed:
            rank, size = world.rank, world.size

            def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Any:
                if name == "summed" and world.rank == 1 and one.state.last_applied == STEPS - 2:
                    world.reduce(tensor, name, operation)
                    raise Interrupted("a peer is gone")
                return world.reduce(tensor, name, operation)

        told = []
        for step in range(STEPS):
            try:
                told.append(one.run(step, batches(step, hosted, data), context(Sealed(), ours)))
            except Interrupted:
                assert (one.state.last_applied, one.state.ready) == (STEPS - 2, STEPS - 1)
        return one, told

    found = together(Shape(2, 2), schedule, exact=True, act=interrupted_in_the_last)
    first, second = found[:2], found[2:]
    for (done, told), (late, _) in zip(first, second, strict=True):
        assert told == applied
        assert (done.state.last_applied, done.state.ready) == (STEPS - 1, None)
        assert sorted(done.state.squares) == sorted({name for one, _ in first for name, _ in one.state.named})
        with COMPUTES:
            late.state.finish(done.state.squares)
        assert (late.state.last_applied, late.state.ready) == (STEPS - 1, None)
    whole = {name: value for one, _ in second for name, value in tensors_of(one.state).items()}
    assert state_sha256(whole) == state_sha256(state)


@pytest.mark.parametrize(
    ("shape", "schedule"),
    [(Shape(2, 2), "1f1b"), (Shape(1, 2), "zero-bubble"), pytest.param(Shape(1, 4), "1f1b", marks=pytest.mark.slow)],
    ids=str,
)
def test_tied_layers_have_the_bits_of_one_worker_and_stay_the_same(shape: Shape, schedule: Schedule) -> None:
    applied, state = alone(exact=True, task=Tied)
    told = together(shape, schedule, exact=True, task=Tied)
    assert [found for found, _ in told] == [applied] * shape.size
    whole = collected(told, shape, shape.replicas - 1)
    assert state_sha256(whole) == state_sha256(state)
    for copy, owner in Tied().tied().items():
        for kind in ("param/{}", "optim/{}/exp_avg"):
            assert torch.equal(whole[kind.format(copy)], whole[kind.format(owner)])
    assert not torch.equal(whole["param/in.weight"], build_model(Tied(), SEED, CPU).module.get_parameter("in.weight"))


def test_sums_of_a_ring_agree_to_rounding() -> None:
    applied, state = alone(exact=False)
    told = together(Shape(2, 2), "1f1b", exact=False)
    for found, _ in told:
        assert [one.loss for one in found] == pytest.approx([one.loss for one in applied], rel=1e-5)
        assert [one.notes[:16] for one in found] == [one.notes[:16] for one in applied]
    for name, value in collected(told, Shape(2, 2), 1).items():
        torch.testing.assert_close(value, state[name], rtol=1e-3, atol=1e-5)


class Judged(Deep):
    """Evaluates with two metrics."""

    def evaluate(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        scores = model(batch["x"])
        right = (scores.argmax(1) == batch["y"]).float()
        return {"loss": F.cross_entropy(scores, batch["y"]), "right": right.mean(), "scores": scores, "y": batch["y"]}

    def summarise(self, outputs: Any) -> dict[str, Any]:
        assert outputs["scores"].shape == (len(outputs["y"]), 3)
        return {"whole": F.cross_entropy(outputs["scores"], outputs["y"])}


def held_out(shard: int, data: bool = True) -> list[Microbatch]:
    """As many microbatches as fit in three rounds, the last ones short; shard 3 has none."""
    numbers = () if shard == 3 else range(2 * AT_ONCE + 3)
    steps = [batches(100 + number, (shard,), data)[shard] for number in numbers]
    return [one for step in steps for one in step][: 2 * AT_ONCE + 1 + shard]


class Weighed(Deep):
    """Its batches count by their content, in evaluations too."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        found = super().loss(model, batch)
        loss = found["loss"] if isinstance(found, dict) else found
        return {"loss": loss, "weight": batch["y"].sum() + 0.5}


@pytest.mark.parametrize(("task", "names"), [(Judged, {"loss", "right", "whole"}), (Weighed, {"loss"})])
def test_an_evaluation_gives_the_metrics_of_one_worker(task: type[Task], names: set[str]) -> None:
    def evaluated(one: SynchronousSteps, world: Any, hosted: tuple[int, ...], data: bool) -> list[Any]:
        told: list[Any] = []
        for step in range(2):
            told.append(one.run(step, batches(step, hosted, data), context(world)).loss)
            told.append(
                evaluate(
                    one.state,
                    one.passes,
                    lambda shard: held_out(shard, data),
                    hosted,
                    context(world),
                    shards=SHARDS,
                    step=step,
                )
            )
        return told

    made = task()
    one = whole_steps(state_of(made, [build_model(made, SEED, CPU)], exact=True))
    expected = evaluated(one, SoloWorld(), tuple(range(SHARDS)), True)
    assert set(expected[1]) == names
    if "whole" in names:
        assert expected[1]["whole"] == pytest.approx(expected[1]["loss"])
    for schedule in ("1f1b", "zero-bubble"):
        told = together(Shape(2, 2), schedule, exact=True, task=task, act=evaluated)
        assert told == [expected] * 4


class Masked(Deep):
    """Each second microbatch or so has no label: its weight is 0, and its loss 0."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        scores = model(batch["x"])
        count = len(batch["y"]) * int(batch["x"][0, 0] > 0)
        mean = (F.cross_entropy(scores, batch["y"], reduction="none") * (count > 0)).sum() / self.divisor(count)
        return {"loss": mean, "weight": float(count)}

    def divisor(self, count: int) -> float:
        return max(1, count)


class Undefined(Masked):
    """The loss is a mean of nothing there."""

    def divisor(self, count: int) -> float:
        return count or math.nan


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero-bubble"])
def test_a_microbatch_of_weight_0_sends_zeros_to_earlier_stages(exact: bool, schedule: Schedule) -> None:
    expected = together(Shape(1, 2), schedule, exact, Masked)
    assert all(math.isfinite(one.loss) for applied, _ in expected for one in applied)
    for (applied, tensors), (safe, held) in zip(
        together(Shape(1, 2), schedule, exact, Undefined), expected, strict=True
    ):
        assert [one.loss for one in applied] == [one.loss for one in safe]
        assert tensors.keys() == held.keys()
        assert all(torch.equal(value, held[name]) for name, value in tensors.items())


class Rewrites(Judged):
    """Writes into its batch."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        batch["y"].add_(1).remainder_(3)
        return super().loss(model, batch)


def test_a_loss_that_writes_into_its_batch_writes_into_it_once() -> None:
    applied, _ = alone(exact=False, task=Rewrites)
    for schedule in ("1f1b", "zero-bubble"):
        for found, _ in together(Shape(1, 2), schedule, exact=False, task=Rewrites):
            assert [one.loss for one in found] == pytest.approx([one.loss for one in applied], rel=1e-5)


class Sequence(Task):
    """Modules of a plain sequence share a trained weight and a frozen one."""

    def model(self) -> nn.Module:
        made = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
        made[3].weight = made[2].weight = made[0].weight
        made[2].bias = made[3].bias.requires_grad_(False)
        return made

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])


def test_shared_parameters_of_a_sequence_are_tied_automatically() -> None:
    built = build_model(Sequence(), SEED, CPU)
    assert built.layers == ("0", "1", "2", "3", "4")
    assert built.tied == {"2.weight": "0.weight", "3.weight": "0.weight", "3.bias": "2.bias"}
    apart = [one.module for one in build_chunks(Sequence(), SEED, CPU, [["0", "1"], ["2"], ["3", "4"]])]
    values = {name: value for module in apart for name, value in module.named_parameters()}
    assert torch.equal(values["0.weight"], values["3.weight"])
    assert len({id(value) for value in values.values()}) == len(values) == 8
    applied, state = alone(exact=True, task=Sequence)
    told = together(Shape(2, 2), "1f1b", exact=True, task=Sequence)
    assert told[0][0] == applied
    assert state_sha256(collected(told, Shape(2, 2), 0)) == state_sha256(state)
    assert torch.equal(state["param/0.weight"], state["param/3.weight"])


def test_tied_weights_train_like_a_shared_one() -> None:
    class Truly(Sequence):
        """The same without declared layers: the sequence keeps one tensor."""

        def model(self) -> nn.Module:
            class Whole(nn.Sequential):
                pass

            return Whole(*super().model())

    _, state = alone(exact=False, task=Sequence)
    _, shared = alone(exact=False, task=Truly)
    assert "param/3.weight" not in shared
    for name, value in shared.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("tied", "what"),
    [
        ({"out.weight": "norm.weight"}, "they differ in shape, dtype or requires_grad"),
        ({"out.weight": "inn.weight"}, "there is no layer 'inn'"),
        ({"out.wait": "in.weight"}, "tied() names 'out.wait', but its layer has no such parameter"),
        ({"norm.bias": "norm.weight"}, "both are in the same layer; share the parameter inside it"),
        ({"norm.bias": "norm.weight", "out.bias": "norm.bias"}, "both are in the same layer"),
        ({"out.bias": "middle.1.bias", "again.inner.1.bias": "out.bias"}, "'out.bias' is itself a copy"),
    ],
)
def test_parameters_that_cannot_be_tied_are_rejected(tied: dict[str, str], what: str) -> None:
    class Wrong(Deep):
        def tied(self) -> dict[str, str]:
            return tied

    with pytest.raises(TaskError, match=re.escape(what)):
        build_model(Wrong(), SEED, CPU)


def test_layers_that_share_a_buffer_are_rejected() -> None:
    class Shares(Task):
        def model(self) -> nn.Module:
            made = nn.Sequential(nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4))
            made[2].running_mean = made[0].running_mean
            return made

    with pytest.raises(TaskError, match=r"'2\.running_mean' is also a tensor of the layer '0'"):
        build_chunks(Shares(), SEED, CPU, [["0", "1"], ["2"]])


def test_layers_that_share_by_a_closure_must_be_declared_tied() -> None:
    class Closed(Deep):
        def layers(self) -> dict[str, Callable[[], nn.Module]]:
            one = nn.Linear(8, 8)
            return {**super().layers(), "frozen": lambda: one, "act": lambda: one}

    with pytest.raises(TaskError, match=r"'act\.weight' is also a tensor of the layer 'frozen'(.|\n)*Task.tied"):
        layer_names(Closed(), SEED)


def test_recomputed_layers_change_no_buffer_twice(monkeypatch: pytest.MonkeyPatch, of_one: Told) -> None:
    _, state = of_one
    monkeypatch.setattr("tests.support.stages.checkpoint", lambda layers, x, use_reentrant: layers(x))
    _, plain = alone(exact=True)
    assert [name for name in state if not torch.equal(state[name], plain[name])] == []


class Shared(Deep):
    """Two modules of a layer share a buffer."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        def act() -> nn.Module:
            made = nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8))
            made[1].running_mean = made[0].running_mean
            return made

        return {**super().layers(), "act": act}


def test_modules_that_share_a_buffer_share_it_after_a_step() -> None:
    def shared(one: SynchronousSteps, world: Any, hosted: tuple[int, ...], data: bool) -> list[bool]:
        one.run(0, batches(0, hosted, data), context(world))
        layers = dict(layer for part in one.state.parts for layer in part.module.named_children())
        return [layers["act"][0].running_mean is layers["act"][1].running_mean] if "act" in layers else []

    assert together(Shape(1, 2), "1f1b", exact=True, task=Shared, act=shared) == [[], [True]]


class Explodes(Deep):
    """Its loss is NaN for one microbatch of step 1."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        loss, weight = super().loss(model, batch).values()
        return {
            "loss": loss * (float("nan") if torch.equal(batch["x"], batches(1, (2,))[2][1].batch["x"]) else 1.0),
            "weight": weight,
        }


def test_every_stage_reports_a_nan_loss() -> None:
    with pytest.raises(TrainingError, match="the loss of step 1 is not finite in shard 2"):
        together(Shape(2, 2), "1f1b", exact=True, task=Explodes)


class Writes(Deep):
    """Writes into a parameter in its forward pass."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        class Writing(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    self.bias.mul_(0.9)
                return super().forward(x)

        return {**super().layers(), "frozen": lambda: Writing(8, 8)}


def test_a_layer_that_changes_a_parameter_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "LIMIT_S", 0.5)
    with pytest.raises(TrainingError, match=r"the loss changed the parameter 'frozen\.bias' in place"):
        together(Shape(1, 2), "gpipe", exact=False, task=Writes)


def test_a_request_of_any_stage_reaches_all_at_the_same_step() -> None:
    wishes = {(0, 1): 1, (1, 0): 2}

    def wished(seat: int, step: int) -> Flags:
        return Flags(pause=wishes.get(Shape(2, 2).place(seat)[:2]) == step)

    told = together(Shape(2, 2), "1f1b", exact=True, wished=wished)
    for found, _ in told:
        assert [one.flags.pause for one in found] == [False, True, True, False]
