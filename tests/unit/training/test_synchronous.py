"""A step of pipelined model replicas equals the step of one worker: the same bits with exact sums."""

from __future__ import annotations

import math
import queue
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.collective.world import Operation
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import Interrupted, TaskError, TrainingError
from raytrain_plus.job.settings import Schedule
from raytrain_plus.membership.mesh import Shape, Stage
from raytrain_plus.membership.view import host_shards
from raytrain_plus.parallel.pipeline.layout import chunk_stages
from raytrain_plus.parallel.pipeline.partition import Layer, balanced_spans
from raytrain_plus.parallel.pipeline.timeline import Kind
from raytrain_plus.state.holding import saved_model, scale_values
from raytrain_plus.state.named import optimizer_state, state_sha256
from raytrain_plus.training.exchange.applied import Applied
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.header import Flags
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.model.model import build_chunks, build_model, layer_names
from raytrain_plus.training.model.precision import Precision
from raytrain_plus.training.passes import stage as replica_module
from raytrain_plus.training.passes import synchronous
from raytrain_plus.training.passes.evaluation import evaluate
from raytrain_plus.training.passes.stage import AT_ONCE, replica_stage
from raytrain_plus.training.passes.synchronous import Synchronous
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.step_options import PLAIN, Technique
from raytrain_plus.workers.messages import Layers
from tests.unit.parallel.pipeline import replicas
from tests.unit.parallel.pipeline.replicas import COMPUTES, Mail, Threads, at_once
from tests.unit.training.group import context

SHARDS, MICROBATCHES, ROWS, STEPS, SEED = 4, 2, 3, 4, 3
CPU = torch.device("cpu")


class Checkpointed(nn.Module):
    """A block that is recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found


class Drifts(nn.Module):
    """Multiplies by a buffer that it has just written to, so the backward pass needs that value."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return torch.tanh(x * self.mean * self.weight)


class Deep(Task):
    """BatchNorm, dropout, a frozen layer, a counter, noise in the loss, weights, clipping, AdamW with a scheduler."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return {
            "in": lambda: nn.Linear(6, 8, bias=False),
            "norm": lambda: nn.BatchNorm1d(8),
            "drop": lambda: nn.Dropout(0.3),
            "again": Checkpointed,
            "frozen": lambda: nn.Linear(8, 8).requires_grad_(False),
            # No bias before BatchNorm: its gradient is only rounding error, which AdamW turns into full steps.
            "middle": lambda: nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)),
            "act": Drifts,
            "out": lambda: nn.Linear(8, 3),
        }

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        scores = model(batch["x"] + 0.1 * torch.randn_like(batch["x"])) + 0.01 * torch.randn(3)
        return {"loss": F.cross_entropy(scores, batch["y"]), "weight": float(1 + batch["y"].sum())}


def batches(step: int, hosted: tuple[int, ...], data: bool = True) -> dict[int, list[Microbatch]]:
    """For a stage that reads no data, without the batches. Step 2 needs another grid; the last step is short."""
    made: dict[int, list[Microbatch]] = {}
    for shard in hosted:
        draw = torch.Generator().manual_seed(1000 * step + shard)
        for index in range(MICROBATCHES):
            rows = ROWS - (step == STEPS - 1 and index == 1)
            x = torch.randn(rows, 6, generator=draw) * (1000 if step == 2 else 1)
            batch = {"x": x, "y": torch.randint(0, 3, (rows,), generator=draw)}
            one = Microbatch(batch, rows, start=step * MICROBATCHES * ROWS, ids=1000 * step + 10 * shard + index)
            made.setdefault(shard, []).append(one if data else replace(one, batch=None, ids=0))
    return made


@dataclass
class Ring:
    """A world of threads, with its members' submitted tensors."""

    size: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    submitted: dict[tuple[str, int], list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))


class RingWorld:
    """A member's interface."""

    def __init__(self, rank: int, of: Ring) -> None:
        self.rank, self.size, self._of = rank, of.size, of
        self._times: dict[str, int] = defaultdict(int)

    def reduce(self, tensor: torch.Tensor, name: str, operation: Operation = "sum") -> Any:
        self._times[name] += 1
        with self._of.changed:
            parts = self._of.submitted[name, self._times[name]]
            parts.append(tensor)
            if len(parts) == self.size:
                stacked = torch.stack(parts)
                total = stacked.sum(dim=0) if operation == "sum" else stacked.amax(dim=0)
                for part in parts:
                    part.copy_(total)
                parts.append(total)
                self._of.changed.notify_all()
        return _Summed(parts, self._of)

    def gather(self, tensor: torch.Tensor, into: torch.Tensor, name: str) -> Any:
        into.zero_()
        into[self.rank] = tensor
        return self.reduce(into, name)

    def close(self) -> None:
        """Do nothing."""


@dataclass
class _Summed:
    parts: list[torch.Tensor]
    of: Ring

    def ended(self, within_s: float) -> bool:
        with self.of.changed:
            return self.of.changed.wait_for(lambda: len(self.parts) > self.of.size, within_s)

    def finish(self) -> None:
        """Do nothing: the sum is in place."""


@pytest.fixture(autouse=True)
def one_computes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random generators belong to the process, and its threads stand in for processes."""
    computing = synchronous.ReplicaStep.computing

    @contextmanager
    def alone(self: Any, *arguments: Any) -> Iterator[None]:
        with COMPUTES, computing(self, *arguments):
            yield

    monkeypatch.setattr(synchronous.ReplicaStep, "computing", alone)
    evaluating = replica_module.HeldOut.computing

    @contextmanager
    def evaluates_alone(self: Any, kind: Kind, chunk: int, number: int) -> Iterator[None]:
        with COMPUTES, evaluating(self, kind, chunk, number):
            yield

    monkeypatch.setattr(replica_module.HeldOut, "computing", evaluates_alone)
    apply = TrainState.apply

    def applies_alone(self: TrainState, *arguments: Any) -> None:
        # It sets the key for optimizers that draw random numbers.
        with COMPUTES:
            apply(self, *arguments)

    monkeypatch.setattr(TrainState, "apply", applies_alone)


Told = tuple[list[Applied], dict[str, torch.Tensor]]


def control() -> Control:
    made = Control()
    made.begin(0)
    return made


def state_of(task: Task, built: Any, exact: bool, technique: Technique = PLAIN) -> TrainState:
    return TrainState(
        task,
        built,
        seed=SEED,
        shards=SHARDS,
        clip_norm=0.5,
        device=CPU,
        exact=exact,
        bucket_bytes=300,
        technique=technique,
    )


def tensors_of(one: TrainState) -> dict[str, torch.Tensor]:
    """In the form that its hash takes."""
    return {**saved_model(one.holding()), **optimizer_state(one.optimizer, one.named), **scale_values(one.counts)}


def alone(exact: bool, task: type[Task] = Deep, technique: Technique = PLAIN) -> Told:
    """Return one worker's results."""
    made = task()
    one = whole_steps(state_of(made, [build_model(made, SEED, CPU)], exact, technique))
    applied = [one.run(step, batches(step, tuple(range(SHARDS))), context(SoloWorld())) for step in range(STEPS)]
    return applied, tensors_of(one.state)


def together(
    shape: Shape,
    schedule: Schedule,
    exact: bool,
    task: type[Task] = Deep,
    wished: Callable[[int, int], Flags] = lambda seat, step: Flags(),
    act: Callable[..., Any] | None = None,
    technique: Technique = PLAIN,
) -> list[Any]:
    """Return each worker's results for so many replicas of so many stages, or those of `act`."""
    where = chunk_stages(schedule, shape.stages)
    names = list(layer_names(task(), SEED))
    spans = balanced_spans([Layer(name, 1.0, 0) for name in names], len(where))
    assert spans is not None
    where_is = {name: stage for (a, b), stage in zip(spans, where, strict=True) for name in names[a:b]}
    rings = [Ring(shape.replicas) for _ in range(shape.stages)]
    mails: list[Mail] = [defaultdict(queue.SimpleQueue) for _ in range(shape.replicas)]
    hosted = host_shards(SHARDS, shape.replicas)

    def worker(seat: int) -> Any:
        replica, stage, _ = shape.place(seat)
        made = task()
        chunks = [names[first:last] for (first, last), holder in zip(spans, where, strict=True) if holder == stage]
        with COMPUTES:
            state = state_of(made, build_chunks(made, SEED, CPU, chunks), exact, technique)
        tied = Layers(Stage(stage, shape.stages), (), where_is).apart(state.tied)
        peers = Threads(stage, mails[replica])
        passes = replica_stage(Synchronous, state, peers, schedule=schedule, stages=shape.stages, tied=tied)
        one = SynchronousSteps(state, passes)
        world = RingWorld(replica, rings[stage])
        if act is not None:
            return act(one, world, hosted[replica], stage == 0)
        applied = [
            one.run(
                step,
                batches(step, hosted[replica], data=stage == 0),
                StepContext(world=world, control=control(), wait_s=5, flags=partial(wished, seat, step)),
            )
            for step in range(STEPS)
        ]
        return applied, tensors_of(one.state)

    return at_once(worker, range(shape.size))


def collected(told: list[Told], shape: Shape, replica: int) -> dict[str, torch.Tensor]:
    """Return the whole state, collected from a replica's stages."""
    whole: dict[str, torch.Tensor] = {}
    for seat in shape.lines("stage")[replica]:
        whole |= told[seat][1]
    return whole


def check_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Assert that two states have the same tensors, bit for bit."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert state_sha256(dict(found)) == state_sha256(dict(expected))


def check_alike(
    told: list[Told],
    shape: Shape,
    expected: Told,
    collected: Callable[[list[Told], Shape, int], Mapping[str, torch.Tensor]] = collected,
) -> None:
    """Assert that all workers have applied the same steps, and that each replica has the same state, bit for bit."""
    applied, state = expected
    assert all(found == applied for found, _ in told)
    for replica in range(shape.replicas):
        check_same(collected(told, shape, replica), state)


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


class Tied(Deep):
    """Two parameters tied as one, at both ends and in the middle; the optimizer keeps values for each copy."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        layers = super().layers()
        return {
            "in": lambda: nn.Linear(6, 8, bias=False),
            "back": lambda: nn.Linear(8, 6, bias=False),
            "again": lambda: nn.Linear(6, 8, bias=False),
            **{name: layers[name] for name in ("drop", "middle", "act")},
            "last": lambda: nn.Linear(8, 6, bias=False),
            "out": lambda: nn.Linear(6, 3),
        }

    def tied(self) -> dict[str, str]:
        return {"again.weight": "in.weight", "last.weight": "back.weight"}


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
    monkeypatch.setattr(f"{__name__}.checkpoint", lambda layers, x, use_reentrant: layers(x))
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
