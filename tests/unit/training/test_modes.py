"""Modules keep the mode in which the task built them, through steps and evaluations, however the model is held."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_plus import Data, Job, Parallel, Task, Workers
from raytrain_plus.training.step.build import build_state
from raytrain_plus.training.update.train_state import TrainState

CPU = torch.device("cpu")


def frozen_norm() -> nn.Module:
    """Return a batch norm whose statistics are to stay as they are."""
    norm = nn.BatchNorm1d(4).eval()
    norm.running_mean.fill_(5.0)  # type: ignore[union-attr]
    return norm


class Sequence(Task):
    """A frozen encoder, a frozen batch norm, dropout, and a head."""

    def parts(self) -> Mapping[str, nn.Module]:
        encoder = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).requires_grad_(False).eval()
        return {"encoder": encoder, "norm": frozen_norm(), "drop": nn.Dropout(0.5), "head": nn.Linear(4, 1)}

    def model(self) -> nn.Module:
        made = nn.Sequential()
        for name, part in self.parts().items():
            made.add_module(name, part)
        return made

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Any:
        return model(batch).pow(2).mean()


class Layered(Sequence):
    def layers(self) -> Any:
        return {
            "encoder": lambda: self.parts()["encoder"],
            "norm": lambda: nn.Sequential(nn.Dropout(0.5), frozen_norm()),
            "drop": lambda: nn.Dropout(0.5),
            "head": lambda: nn.Linear(4, 1),
        }


class Pretrained(Sequence):
    """What `from_pretrained` returns: all of it is in evaluation mode."""

    def model(self) -> nn.Module:
        return super().model().eval()


def state_of(task: Task, chunks: Any = (), **changes: Any) -> TrainState:
    data = Data(path="x", batch_size=8, shards=2)
    job = Job(name="x", task="t:T", data=data, steps=3, workers=Workers(min=2), **changes)
    return build_state(job, task, CPU, chunks)


def modes(state: TrainState) -> dict[str, bool]:
    return {
        name: one.training
        for part in state.parts
        for name, one in part.module.named_modules()
        if not list(one.children())
    }


AS_BUILT = {"encoder.0": False, "encoder.1": False, "norm": False, "drop": True, "head": True}
IN_LAYERS = {"encoder.0": False, "encoder.1": False, "norm.0": True, "norm.1": False, "drop": True, "head": True}


@pytest.mark.parametrize(
    ("task", "chunks", "expected"),
    [
        (Sequence, (), AS_BUILT),
        (Layered, (), IN_LAYERS),
        (Layered, (("encoder", "norm"),), {name: mode for name, mode in IN_LAYERS.items() if name[0] in "en"}),
        (Sequence, (("drop", "head"),), {"drop": True, "head": True}),
    ],
)
@pytest.mark.parametrize("way", [{}, {"precision": "bf16-params"}, {"reduction": "exact"}, {"recompute": "full"}])
def test_each_module_keeps_its_mode_through_steps_and_evaluations(
    task: type[Task], chunks: Any, expected: Mapping[str, bool], way: dict[str, Any]
) -> None:
    if way.get("recompute") and task is Sequence and not chunks:
        way = {}
    state = state_of(task(), chunks, **way)
    assert not state.woken
    for _ in range(2):
        state.train()
        assert modes(state) == expected
        state.train(False)
        assert not any(modes(state).values())
    state.train()
    assert modes(state) == expected


def test_a_frozen_batch_norm_stays_as_it_is() -> None:
    state = state_of(Sequence())
    state.train()
    state.module(torch.zeros(8, 4))
    buffers = dict(state.module.named_buffers())
    assert torch.equal(buffers["norm.running_mean"], torch.full((4,), 5.0))
    assert int(buffers["norm.num_batches_tracked"]) == 0


def test_layers_that_are_gathered_keep_their_modes() -> None:
    state = state_of(Layered(), parallel=Parallel(sharded="full"))
    state.train()
    assert modes(state) == {(name.partition(".")[2] and name) or name: mode for name, mode in IN_LAYERS.items()}


def test_a_model_that_is_in_evaluation_mode_throughout_trains() -> None:
    state = state_of(Pretrained())
    assert state.woken
    state.train()
    assert all(modes(state).values())


@pytest.mark.parametrize("chunks", [(), (("encoder", "norm"),), (("drop", "head"),)])
def test_a_layer_stays_in_evaluation_mode_if_another_is_in_training_mode(chunks: Any) -> None:
    class Frozen(Layered):
        def layers(self) -> Any:
            return {**super().layers(), "head": lambda: nn.Linear(4, 1).eval()}

    class Asleep(Frozen):
        def layers(self) -> Any:
            return {name: lambda build=build: build().eval() for name, build in super().layers().items()}

    state = state_of(Frozen(), chunks)
    state.train()
    assert not state.woken
    expected = {**IN_LAYERS, "head": False}
    assert modes(state) == {name: mode for name, mode in expected.items() if name in modes(state)}
    asleep = state_of(Asleep(), chunks)
    asleep.train()
    assert asleep.woken
    assert all(modes(asleep).values())


@pytest.mark.parametrize("chunks", [(), (("a", "b"),), (("c",),)])
def test_layers_of_one_model_that_is_built_once_all_train(chunks: Any) -> None:
    class Shared(Sequence):
        def layers(self) -> Any:
            made = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"}).eval()
            return {name: lambda name=name: made[name] for name in made}

    state = state_of(Shared(), chunks)
    state.train()
    assert state.woken
    assert all(modes(state).values())
    assert not state.trained_in_evaluation


def test_a_trained_module_that_stays_in_evaluation_mode_is_named() -> None:
    assert state_of(Sequence()).trained_in_evaluation == "norm"


def test_a_train_of_the_modules_own_is_called() -> None:
    class Own(nn.Linear):
        def train(self, mode: bool = True) -> Any:
            return super().train(False)

    class Keeps(Sequence):
        def parts(self) -> Mapping[str, nn.Module]:
            return {"own": Own(4, 4), "head": nn.Linear(4, 1)}

    state = state_of(Keeps())
    state.train()
    assert modes(state) == {"own": False, "head": True}


def test_a_run_of_an_older_version_trains_all_in_training_mode() -> None:
    state = state_of(Sequence())
    before = state.snapshot()
    values = {**json.loads(before.values), "rules": {}}
    state.adopt(replace(before, values=json.dumps(values).encode()))
    state.train()
    assert all(modes(state).values())
