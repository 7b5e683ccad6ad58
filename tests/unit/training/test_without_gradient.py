"""A parameter that no shard gives a gradient keeps its value and gets no optimizer state, as in PyTorch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.errors import TrainingError
from raytrain_plus.job.settings import Schedule
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.state.holding import LEFT_ALONE
from raytrain_plus.state.named import state_sha256
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.step.step import SynchronousSteps
from tests.support import overlapping, stages
from tests.support.stages import CPU, SHARDS, STEPS, Deep, Tied, alone, batches, collected, together
from tests.unit.training.group import context

one_computes_at_a_time = stages.one_computes_at_a_time


class Switch(nn.Module):
    """Has a weight that is always used, one that about half of the microbatches use, and one that none uses."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Parameter(torch.ones(8))
        self.sometimes = nn.Parameter(torch.ones(8))
        self.never = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.always + (x * self.sometimes if x[0, 0] > 0 else 0.0)


class Switched(Deep):
    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        layers = super().layers()
        first = {name: layers[name] for name in ("in", "norm")}
        rest = {name: layers[name] for name in ("middle", "act", "out")}
        return {**first, "one": Switch, **rest, "unused": Unused}


class Unused(nn.Module):
    """The model's last layer, whose only parameter has no part in its output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


NEVER = ("one.never", "unused.weight")


def steps_of(task: Task) -> SynchronousSteps:
    return whole_steps(stages.state_of(task, [build_model(task, stages.SEED, CPU)], exact=False))


def run(one: SynchronousSteps, *steps: int) -> list[Any]:
    return [one.run(step, batches(step, tuple(range(SHARDS))), context(SoloWorld())) for step in steps]


@pytest.mark.parametrize("exact", [False, True])
def test_only_parameters_with_a_gradient_change(exact: bool) -> None:
    # The default optimizer, AdamW, decays weights whose gradient is zero.
    _, state = alone(exact, Switched)
    for name in NEVER:
        assert state[f"param/{name}"].eq(1).all()
        assert not [key for key in state if key.startswith(f"optim/{name}/")]
    for name in ("one.always", "one.sometimes"):
        assert state[f"param/{name}"].ne(1).all()
        assert state[f"optim/{name}/exp_avg"].ne(0).all()


@pytest.mark.parametrize(
    ("shape", "schedule"), [(Shape(2, 2), "1f1b"), (Shape(2, 2), "zero-bubble"), (Shape(1, 2), "interleaved")], ids=str
)
def test_stages_leave_the_same_parameters_alone(shape: Shape, schedule: Schedule) -> None:
    applied, state = alone(exact=True, task=Switched)
    told = together(shape, schedule, exact=True, task=Switched)
    assert [[replace(one, remarks=()) for one in found] for found, _ in told] == [
        [replace(one, remarks=()) for one in applied]
    ] * shape.size
    for replica in range(shape.replicas):
        assert state_sha256(collected(told, shape, replica)) == state_sha256(state)


class Two(nn.Module):
    """Returns two tensors that need gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Linear(8, 8, bias=False)
        self.aside = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.main(x), self.aside(x)


class First(nn.Module):
    """Uses the first of two tensors, and the second one only in microbatches like that of the first shard."""

    def __init__(self, also: bool) -> None:
        super().__init__()
        self.also = also

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        main, aside = both
        return main + aside if self.also and main[0, 0] > 0.3 else main


class Aside(Deep):
    """Its second stage does not use all that the first one returns."""

    also = False

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        layers = super().layers()
        first = {name: layers[name] for name in ("in", "norm")}
        rest = {name: layers[name] for name in ("middle", "out")}
        return {**first, "two": Two, "first": lambda: First(self.also), **rest}


class Sometimes(Aside):
    also = True


class Detaches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


class Cut(Aside):
    """Nothing of its first stage has a gradient."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        layers = super().layers()
        return {name: Detaches if name == "norm" else layers[name] for name in layers} | {"first": lambda: First(False)}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize(("task", "absent"), [(Aside, "two.aside"), (Sometimes, ""), (Cut, "in")])
def test_a_later_stage_decides_what_has_a_gradient(schedule: Schedule, task: type[Deep], absent: str) -> None:
    applied, state = alone(exact=True, task=task)
    assert (f"optim/{absent}.weight/exp_avg" in state, "optim/out.weight/exp_avg" in state) == (False, True)
    told = together(Shape(2, 2), schedule, exact=True, task=task)
    assert [[one.loss for one in found] for found, _ in told] == [[one.loss for one in applied]] * 4
    for replica in range(2):
        assert state_sha256(collected(told, Shape(2, 2), replica)) == state_sha256(state)


def test_overlapping_steps_leave_the_same_parameters_alone() -> None:
    class Smooth(overlapping.Smooth):
        def layers(self) -> dict[str, Callable[[], nn.Module]]:
            return {**super().layers(), "d": lambda: nn.Sequential(nn.Linear(6, 3), Unused())}

        def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW([value for _, value in parameters], lr=0.05)

    for _, weights, one in overlapping.together(Shape(2, 2), [range(4)], task=Smooth):
        if "d.1.weight" in weights:
            assert weights["d.1.weight"].eq(1).all()
            assert dict(one.state.named)["d.1.weight"].grad is not None
        assert all(one.state.optimizer.state[value] for name, value in one.state.named if name != "d.1.weight")  # type: ignore[union-attr]


def test_the_first_step_names_them_once() -> None:
    one = steps_of(Switched())
    [first, second] = run(one, 0, 1)
    [remark] = first.remarks
    assert "gives 2 parameters 'one.never', 'unused.weight' no gradient" in remark.text
    assert second.remarks == ()


def test_a_state_without_moments_replaces_one_with_moments() -> None:
    donor, receiver = steps_of(Switched()), steps_of(Switched())
    run(donor, 0, 1)
    receiver.state.rules[LEFT_ALONE] = False
    run(receiver, 0)
    assert len(receiver.state.optimizer.state) > len(donor.state.optimizer.state)  # type: ignore[union-attr]
    receiver.state.adopt(donor.state.snapshot())
    assert receiver.state.snapshot().digest == donor.state.snapshot().digest
    for one in (donor, receiver):
        run(one, *range(2, STEPS))
    assert receiver.state.snapshot().digest == donor.state.snapshot().digest


def test_a_run_of_an_older_version_keeps_its_rule() -> None:
    donor, receiver = steps_of(Switched()), steps_of(Switched())
    donor.state.rules |= dict.fromkeys(donor.state.rules, False)
    run(donor, 0)
    state = donor.state.snapshot()
    values = json.loads(state.values)
    # Those versions wrote no rules.
    del values["rules"]
    receiver.state.adopt(replace(state, values=json.dumps(values).encode()))
    for one in (donor, receiver):
        told = run(one, 1)
        assert told[0].remarks == ()
        assert dict(one.state.named)["one.never"].lt(1).all()
    assert receiver.state.snapshot().digest == donor.state.snapshot().digest


class TiedToUnused(Tied):
    """The owner of a tied parameter has no part in the loss, but its copy has."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        class Passes(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return F.pad(x, (0, 2))

        return {**super().layers(), "in": lambda: Passes(6, 8, bias=False)}


@pytest.mark.parametrize("shape", [None, Shape(2, 2)])
def test_tied_parameters_train_if_one_of_them_has_a_gradient(shape: Shape | None) -> None:
    applied, state = alone(exact=True, task=TiedToUnused)
    assert applied[0].remarks == ()
    if shape is not None:
        told = together(shape, "1f1b", exact=True, task=TiedToUnused)
        assert [found for found, _ in told] == [applied] * shape.size
        assert state_sha256(collected(told, shape, 0)) == state_sha256(state)
    assert torch.equal(state["param/in.weight"], state["param/again.weight"])
    assert torch.equal(state["optim/in.weight/exp_avg"], state["optim/again.weight/exp_avg"])


@pytest.mark.parametrize("how", ["zero", "scale", "replace", "backward"])
def test_a_loss_that_changes_gradients_is_refused(how: str) -> None:
    class Clears(Switched):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            found = super().loss(model, batch)
            if how == "backward":
                found["loss"].backward(retain_graph=True)
            elif how == "scale":
                for value in model.parameters():
                    if value.grad is not None:
                        value.grad.mul_(2)
            else:
                model.zero_grad(set_to_none=how == "replace")
            return found

    one = steps_of(Clears())
    before = state_sha256(stages.tensors_of(one.state))
    with pytest.raises(TrainingError, match="the platform owns gradients"):
        run(one, 0)
    assert state_sha256(stages.tensors_of(one.state)) == before
