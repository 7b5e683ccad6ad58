"""A model in stages gives the losses and gradients of the whole model, with every schedule."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus.errors import TrainingError
from raytrain_plus.generators import set_random_key
from raytrain_plus.job.settings import Schedule
from raytrain_plus.parallel.pipeline.chunk import Chunk, Objective
from raytrain_plus.parallel.pipeline.layout import chunk_stages, schedule_fault, splits
from raytrain_plus.parallel.pipeline.partition import Layer, balanced_spans
from raytrain_plus.parallel.pipeline.schedule import Pipeline, orders
from raytrain_plus.parallel.pipeline.timeline import Action, Cost, Kind, bubble, most_open_passes, simulate
from raytrain_plus.parallel.pipeline.transport import Handovers
from raytrain_plus.training.model.randomness import random_key
from tests.unit.parallel.pipeline import replicas
from tests.unit.parallel.pipeline.replicas import COMPUTES, Threads, replica

SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zero-bubble")
ROWS = 4
CPU = torch.device("cpu")

Layers = dict[str, Callable[[], nn.Module]]
Loss = Callable[[nn.Module, Any], torch.Tensor]


class Fork(nn.Module):
    """Returns two tensors in a dict, one of which needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": self.inner(x), "positive": x.detach() > 0}


class Join(nn.Module):
    """Takes these two tensors."""

    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.where(given["positive"], given["x"], 0.5 * given["x"])


def layers() -> Layers:
    """Eight layers: BatchNorm, dropout, two tensors at once, a view."""
    return {
        "in": lambda: nn.Linear(6, 8),
        "norm": lambda: nn.BatchNorm1d(8),
        "drop": lambda: nn.Dropout(0.3),
        "fork": Fork,
        "join": Join,
        "middle": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
        "view": lambda: nn.Unflatten(1, (2, 4)),
        "out": lambda: nn.Sequential(nn.Flatten(), nn.Linear(8, 3)),
    }


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Draws random numbers before and after the model, too."""
    noisy = batch["x"] + 0.1 * torch.randn_like(batch["x"])
    smoothed = model(noisy) + 0.01 * torch.randn(3)
    return F.cross_entropy(smoothed, batch["y"])


def build(spans: tuple[str, ...] | None = None, of: Layers | None = None) -> nn.Sequential:
    made: OrderedDict[str, nn.Module] = OrderedDict()
    for name, make in (of or layers()).items():
        if spans is None or name in spans:
            set_random_key(random_key(1, name))
            made[name] = make()
    return nn.Sequential(made)


def batch(microbatch: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 + microbatch)
    x = torch.randn(ROWS, 6, generator=draw)
    return {"x": x, "y": (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()}


@dataclass
class Step:
    """One step of a model replica, as `chunk.PassWork`; keys are set before each layer, as the platform does."""

    model: nn.Module
    the_loss: Loss = loss
    losses: dict[int, float] = field(default_factory=dict)
    done: list[tuple[Kind, int, int]] = field(default_factory=list)

    def rows(self, microbatch: int) -> int:
        return ROWS

    def batch(self, microbatch: int) -> Any:
        return batch(microbatch)

    def loss(self, microbatch: int, model: nn.Module, given: Any) -> Objective:
        found = self.the_loss(model, given)
        self.losses[microbatch] = float(found.detach())
        return Objective(found * ROWS, 1.0)

    @contextmanager
    def computing(self, kind: Kind, chunk: int, microbatch: int, weight: Any = None) -> Iterator[None]:
        with COMPUTES:
            self.done.append((kind, chunk, microbatch))
            handles = []
            if kind == "F":
                set_random_key(random_key(2, microbatch, ""))
                handles = [
                    layer.register_forward_pre_hook(_key(microbatch, name))
                    for name, layer in self.model.named_children()
                ]
            try:
                yield
            finally:
                for handle in handles:
                    handle.remove()


def _key(microbatch: int, name: str) -> Callable[..., None]:
    return lambda module, inputs: set_random_key(random_key(2, microbatch, name))


def in_one_piece(
    microbatches: int, of: Layers | None = None, the_loss: Loss = loss
) -> tuple[nn.Module, dict[int, float]]:
    model = build(of=of)
    step = Step(model, the_loss)
    for microbatch in range(microbatches):
        with step.computing("F", 0, microbatch):
            scaled = step.loss(microbatch, model, batch(microbatch))
        scaled.loss.backward()
    return model, step.losses


def in_stages(
    schedule: Schedule,
    stages: int,
    microbatches: int,
    the_loss: Loss = loss,
    steps: int = 1,
    only_forward: bool = False,
    of: Layers | None = None,
) -> list[tuple[list[Chunk], Step]]:
    """Each stage's chunks, and the results of its step."""
    where = chunk_stages(schedule, stages)
    names = list(of or layers())
    costs = [Layer(name, 1.0, 0) for name in names]
    spans = balanced_spans(costs, len(where))
    assert spans is not None

    def stage(peers: Threads) -> tuple[list[Chunk], Step]:
        handovers = Handovers(peers, CPU)
        chunks = []
        for number, (first, last) in enumerate(spans):
            if where[number] == peers.rank:
                with COMPUTES:
                    model = build(tuple(names[first:last]), of)
                chunks.append(Chunk(model, number, where, handovers, splits(schedule)))
        pipeline = Pipeline(schedule, chunks)
        for _ in range(steps):
            named = OrderedDict(pair for chunk in chunks for pair in chunk.submod.named_children())
            step = Step(nn.Sequential(named), the_loss)
            if only_forward:
                step.model.eval()
                pipeline.forward(step, microbatches)
            else:
                pipeline.run(step, microbatches)
            handovers.finish()
        return chunks, step

    return replica(stages, stage)


CASES = [
    (schedule, stages, microbatches)
    for schedule in SCHEDULES
    for stages, microbatches in ((2, 2), (2, 5), (4, 4), (4, 8))
    if not schedule_fault(schedule, stages, microbatches)
]


@pytest.mark.parametrize(("schedule", "stages", "microbatches"), CASES)
def test_losses_gradients_and_buffers_equal_those_of_the_whole_model(
    schedule: Schedule, stages: int, microbatches: int
) -> None:
    whole, losses = in_one_piece(microbatches)
    found = in_stages(schedule, stages, microbatches)
    [given] = [step.losses for chunks, step in found if any(chunk.is_last for chunk in chunks)]
    assert given == losses
    gradients = dict(whole.named_parameters())
    buffers = dict(whole.named_buffers())
    seen = set()
    for chunks, _ in found:
        for chunk in chunks:
            for name, value in chunk.submod.named_parameters():
                assert value.grad is not None, name
                assert torch.equal(value.grad, gradients[name].grad), name
                seen.add(name)
            for name, value in chunk.submod.named_buffers():
                assert torch.equal(value, buffers[name]), name
    assert seen == gradients.keys()


@pytest.mark.parametrize(("schedule", "stages", "microbatches"), CASES)
def test_stages_follow_the_order_and_hold_no_more_than_it_predicts(
    schedule: Schedule, stages: int, microbatches: int
) -> None:
    told = orders(schedule, stages, microbatches)
    found = in_stages(schedule, stages, microbatches)
    for stage, (chunks, step) in enumerate(found):
        assert [Action(*one) for one in step.done] == told[stage]
        for chunk in chunks:
            own = [action for action in told[stage] if action.chunk == chunk.stage_index]
            assert chunk.most_open == most_open_passes(own)
            for kind in "FBIW":
                # So a shard's gradients are complete when its last microbatch has passed.
                numbers = [action.microbatch for action in own if action.kind == kind]
                assert numbers == sorted(numbers)
        if schedule == "1f1b":
            assert chunks[0].most_open == min(microbatches, stages - stage)
    if schedule == "zero-bubble" and (stages, microbatches) == (4, 8):
        each = [Cost(1.0, 1.0, 1.0)] * len(chunk_stages(schedule, stages))
        two = [Cost(2.0, 2.0, 2.0)] * stages
        ours, plain = simulate(told, each), simulate(orders("1f1b", stages, microbatches), two)
        assert bubble(ours, stages) < 0.6 * bubble(plain, stages)


def test_steps_follow_one_another() -> None:
    whole, _ = in_one_piece(4)
    for parameter in whole.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2)
    found = in_stages("1f1b", 2, 4, steps=2)
    gradients = dict(whole.named_parameters())
    for chunks, _ in found:
        for name, value in chunks[0].submod.named_parameters():
            torch.testing.assert_close(value.grad, gradients[name].grad)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_forward_passes_without_backward(schedule: Schedule) -> None:
    whole = build().eval()
    step = Step(whole)
    with torch.no_grad():
        for microbatch in range(3):
            with step.computing("F", 0, microbatch):
                step.loss(microbatch, whole, batch(microbatch))
    found = in_stages(schedule, 2, 3, only_forward=True)
    [given] = [one.losses for chunks, one in found if any(chunk.is_last for chunk in chunks)]
    assert given == step.losses


class Frozen(nn.Linear):
    """A layer without trained parameters."""

    def __init__(self) -> None:
        super().__init__(6, 8)
        self.requires_grad_(False)


class Scale(nn.Module):
    """Returns, beside the transformed input, a value that depends only on its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.weight, self.weight.exp()


class Scaled(nn.Module):
    """Takes both values."""

    def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return given[0] * given[1]


def behind(*inner: Callable[[], nn.Module]) -> Layers:
    """Return four layers, or as many more as a partition needs, with these at the start of the second half."""
    front: list[Callable[[], nn.Module]] = [lambda: nn.Linear(6, 8), lambda: nn.Linear(8, 8)]
    made = [*front, *inner, lambda: nn.Linear(8, 3)]
    return {str(number): make for number, make in enumerate(made)}


ODD: dict[str, Layers] = {
    "a first chunk that learns nothing": {
        "0": Frozen,
        "1": nn.Tanh,
        "2": lambda: nn.Linear(8, 8),
        "3": lambda: nn.Linear(8, 3),
    },
    "a layer that writes in place behind a stage boundary": behind(lambda: nn.ReLU(inplace=True)),
    "an output that depends on weights alone": behind(Scale, Scaled),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("what", ODD)
def test_unusual_layers_give_the_same_results(schedule: Schedule, what: str) -> None:
    whole, losses = in_one_piece(4, ODD[what])
    found = in_stages(schedule, 2, 4, of=ODD[what])
    [given] = [step.losses for chunks, step in found if any(chunk.is_last for chunk in chunks)]
    assert given == losses
    gradients = dict(whole.named_parameters())
    for chunks, _ in found:
        for name, value in (pair for chunk in chunks for pair in chunk.submod.named_parameters()):
            assert value.requires_grad == (gradients[name].grad is not None)
            if value.requires_grad:
                torch.testing.assert_close(value.grad, gradients[name].grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches"),
    [
        ("1f1b", 4, 1),
        ("1f1b", 4, 3),
        ("interleaved", 2, 5),
        ("interleaved", 4, 9),
        ("zero-bubble", 4, 1),
        ("zero-bubble", 4, 3),
    ],
)
def test_unsupported_numbers_of_microbatches(schedule: Schedule, stages: int, microbatches: int) -> None:
    whole, losses = in_one_piece(microbatches)
    found = in_stages(schedule, stages, microbatches)
    [given] = [step.losses for chunks, step in found if any(chunk.is_last for chunk in chunks)]
    assert given == losses
    gradients = dict(whole.named_parameters())
    for chunks, _ in found:
        for name, value in (pair for chunk in chunks for pair in chunk.submod.named_parameters()):
            assert torch.equal(value.grad, gradients[name].grad), name


def casts(model: nn.Module, given: Any) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss(model, given)


def silences(model: nn.Module, given: Any) -> torch.Tensor:
    with torch.no_grad():
        model(given["x"])
    return loss(model, given)


def twice(model: nn.Module, given: Any) -> torch.Tensor:
    return loss(model, given) + loss(model, given)


def looks(model: nn.Module, given: Any) -> torch.Tensor:
    return loss(model, given) + sum(value.square().sum() for value in model.parameters())


def inside(model: nn.Module, given: Any) -> torch.Tensor:
    return loss(model, given) + model.out.weight.sum()


def without(model: nn.Module, given: Any) -> torch.Tensor:
    return given["x"].sum()


def fails(model: nn.Module, given: Any) -> torch.Tensor:
    if given["x"][0, 0] == batch(1)["x"][0, 0]:
        raise KeyError("label")
    return loss(model, given)


@pytest.mark.parametrize(
    ("the_loss", "words"),
    [
        (twice, "the loss calls the model more than once"),
        (casts, r"the task opens torch.autocast for cpu in bfloat16 around the model: leave that to the setting"),
        (silences, "under a different gradient mode"),
        (looks, "the loss accesses the parameters of the model"),
        (inside, "the loss accesses 'out' of the model"),
        (without, "the loss never calls the model"),
    ],
)
def test_a_loss_that_needs_the_whole_model_is_rejected(
    monkeypatch: pytest.MonkeyPatch, the_loss: Loss, words: str
) -> None:
    monkeypatch.setattr(replicas, "LIMIT_S", 0.3)
    with pytest.raises(TrainingError, match=words):
        in_stages("1f1b", 2, 2, the_loss)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_errors_of_the_task_propagate_unchanged(monkeypatch: pytest.MonkeyPatch, schedule: Schedule) -> None:
    monkeypatch.setattr(replicas, "LIMIT_S", 0.3)
    with pytest.raises(KeyError, match="label"):
        in_stages(schedule, 2, 4, fails)
