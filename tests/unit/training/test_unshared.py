"""What each worker has for itself of a model: what a step changes of it is named, or refused, or grows as it likes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raytrain_plus import Parallel, Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.of_job import rows_of
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.errors import TaskError
from raytrain_plus.state.holding import rules_of
from raytrain_plus.state.named import named_state, state_sha256
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.model.precision import Precision
from raytrain_plus.training.model.randomness import make_deterministic
from raytrain_plus.training.model.unshared import Attributes
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.step_options import PLAIN, Technique
from raytrain_plus.trial.task_trial import try_task
from tests.support.optimizers import Plain, job, trial
from tests.unit.training.group import Group, context

CPU = torch.device("cpu")
PIPELINE = {"parallel": Parallel(pipeline=2, schedule="gpipe")}


class Changes(nn.Linear):
    """Changes something of its own in a forward pass."""

    def __init__(self, change: Callable[[Changes], object], **held: Any) -> None:
        super().__init__(4, 4)
        self.change = change
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self)
        return super().forward(x)


def task_of(layer: Callable[[], nn.Module], layered: bool) -> type[Plain]:
    class Own(Plain):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(4, 4), layer())

        def layers(self) -> Any:
            return {"first": lambda: nn.Linear(4, 4), "1": layer} if layered else None

    return Own


class Meter:
    """Counts, as an object of its own."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1


def added(self: Any) -> None:
    self.calls += 1


CHANGES: dict[str, tuple[Callable[[Any], object], Callable[[], dict[str, Any]]]] = {
    "a counter": (added, lambda: {"calls": 0}),
    "a list": (lambda self: self.calls.append(1), lambda: {"calls": []}),
    "a mapping": (lambda self: self.calls.update(last=1), lambda: {"calls": {}}),
    "an object": (lambda self: self.calls.add(), lambda: {"calls": Meter()}),
    "an array": (lambda self: self.calls.__iadd__(1), lambda: {"calls": np.zeros(3)}),
    "tensors": (lambda self: self.calls[0].add_(1), lambda: {"calls": [torch.zeros(3)]}),
    "what appears": (lambda self: setattr(self, "calls", 1), dict),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("layered", [False, True])
def test_an_attribute_that_a_step_changes_is_named(tmp_path: Path, what: str, layered: bool) -> None:
    change, held = CHANGES[what]
    made = trial(tmp_path, task_of(lambda: Changes(change, **held()), layered), **(PIPELINE if layered else {}))
    [remark] = [one for one in made.remarks if "changes" in one]
    assert remark.startswith("a step changes '1.calls' of the model: each worker has its own")
    assert "register_buffer" in remark


def test_one_of_the_task_is_named_too(tmp_path: Path) -> None:
    class Counts(Plain):
        steps = 0

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            self.steps += 1
            return super().loss(model, batch)

    assert any(one.startswith("a step changes 'steps' of the task") for one in trial(tmp_path, Counts).remarks)


@pytest.mark.parametrize("layered", [False, True])
def test_a_model_that_changes_nothing_of_its_own_has_no_remark(tmp_path: Path, layered: bool) -> None:
    held = {"names": ["a"], "sizes": {"a": 1}, "rate": 0.5, "table": np.ones(2), "meter": Meter(), "draw": random}
    task = task_of(lambda: Changes(lambda self: None, **held), layered)
    made = trial(tmp_path, task, **(PIPELINE if layered else {}))
    assert made.remarks == ()


def test_what_is_made_once_is_no_change() -> None:
    class Own:
        def __init__(self) -> None:
            self.made, self.meter, self.flag = None, Meter(), False

    one: Any = Own()
    seen = Attributes(one)
    one.made, one.meter.kind, one.other = Meter(), "linear", object()
    assert seen.changed() == []
    one.flag = True
    assert seen.changed() == ["flag"]


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "torch": (torch.Generator, lambda one: torch.rand(1, generator=one)),
    "numpy": (np.random.default_rng, lambda one: one.random()),
    "older numpy": (np.random.RandomState, lambda one: one.rand()),
    "python": (random.Random, lambda one: one.random()),
}


@pytest.mark.parametrize("which", GENERATORS)
@pytest.mark.parametrize("layered", [False, True])
def test_a_generator_of_the_models_own_is_refused(tmp_path: Path, which: str, layered: bool) -> None:
    make, draw = GENERATORS[which]
    task = task_of(lambda: Changes(lambda self: draw(self.draws), draws=make()), layered)
    with pytest.raises(TaskError, match=r"a step draws from the generator '1\.draws' of the model"):
        trial(tmp_path, task, **(PIPELINE if layered else {}))
    # Of one that only makes initial values nothing is lost.
    unused = trial(tmp_path, task_of(lambda: Changes(lambda self: None, draws=make()), layered))
    assert unused.remarks == ()


class Unreadable(dict[str, int]):
    """A mapping whose code raises."""

    def items(self) -> Any:
        raise OSError("no such file")


class Common(nn.Module):
    """What is common in models, and none of a worker's own."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 4)
        self.globals = [torch.default_generator, random.getstate.__self__]  # type: ignore[attr-defined]
        self.numpy = np.random.mtrand._rand
        self.system, self.unreadable = random.SystemRandom(), Unreadable(a=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.cell(x + torch.rand(()) + random.random() + np.random.rand())[0]
        return found


@pytest.mark.parametrize("layered", [False, True])
def test_what_is_common_in_models_and_tasks_has_no_remark(tmp_path: Path, layered: bool) -> None:
    class Keeps(task_of(Common, layered)):  # type: ignore[misc]
        def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
            self.decayed = [value for _, value in parameters]
            self.made = torch.optim.SGD(self.decayed, lr=0.1)
            return self.made

    assert trial(tmp_path, Keeps, **(PIPELINE if layered else {})).remarks == ()


def test_a_generator_that_is_made_when_it_is_first_needed_is_refused(tmp_path: Path) -> None:
    def draw(self: Any) -> None:
        if self.draws is None:
            self.draws = torch.Generator().manual_seed(3)
        torch.rand(1, generator=self.draws)

    with pytest.raises(TaskError, match=r"a step draws from the generator '1\.draws' of the model"):
        trial(tmp_path, task_of(lambda: Changes(draw, draws=None), False))


@pytest.mark.parametrize("layered", [False, True])
def test_a_run_of_an_older_version_goes_on_with_what_is_refused_now(tmp_path: Path, layered: bool) -> None:
    class Late(Changes):
        def __init__(self) -> None:
            super().__init__(lambda self: torch.rand(1, generator=self.draws), draws=torch.Generator())
            self.weight.register_post_accumulate_grad_hook(lambda value: None)

    way = PIPELINE if layered else {}
    # Writes the rows.
    trial(tmp_path, Plain)
    job_of = job(tmp_path, task_of(Late, layered), **way)
    rows = rows_of(job_of, parquet_source(job_of.data.path), None)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match="register_post_accumulate_grad_hook"):
        try_task(job_of, job_of.task, CPU, rows, None)  # type: ignore[arg-type]
    older = try_task(job_of, job_of.task, CPU, rows, None, rules_of({}))  # type: ignore[arg-type]
    assert older.remarks == ()


class Positions(nn.Module):
    """Adds a number to each position, from a table that grows."""

    table: torch.Tensor

    def __init__(self, built: int | None, data: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.known, self.data = 0, data
        self.register_buffer("table", None, persistent=False)
        if built is not None:
            self._grow(built, torch.ones(1))

    def _grow(self, length: int, x: torch.Tensor) -> None:
        values = torch.arange(float(length)).sin()
        self.register_buffer("table", values * 50 * x.detach().mean() if self.data else values, persistent=False)
        self.known = length

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self.known:
            self._grow(x.shape[0], x)
        return x * self.weight + self.table[: x.shape[0], None]


@pytest.mark.parametrize("built", [None, 1, 8])
@pytest.mark.parametrize("layered", [False, True])
def test_a_table_of_positions_may_grow(tmp_path: Path, built: int | None, layered: bool) -> None:
    made = trial(tmp_path, task_of(lambda: Positions(built), layered), **(PIPELINE if layered else {}))
    assert [one for one in made.remarks if "known" not in one] == []


@pytest.mark.parametrize("reduction", ["ring", "exact"])
def test_a_table_that_depends_on_values_is_refused(tmp_path: Path, reduction: str) -> None:
    with pytest.raises(TaskError, match=r"computes something else without the buffer '1\.table'"):
        trial(tmp_path, task_of(lambda: Positions(None, data=True), False), reduction=reduction)


def test_outputs_that_differ_by_themselves_are_no_fault_of_a_table(tmp_path: Path) -> None:
    class Counts(task_of(lambda: Positions(None), False)):  # type: ignore[misc]
        calls = 0

        def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
            self.calls += 1
            x = batch["x"].float().requires_grad_()
            found = model(x).square().mean()
            # As for a penalty on slopes.
            [slope] = torch.autograd.grad(found, x, create_graph=True)
            return found * self.calls + slope.square().sum()

    assert [one for one in trial(tmp_path, Counts).remarks if "calls" not in one] == []


def test_a_layer_with_a_table_and_a_persistent_buffer_is_computed_alike(tmp_path: Path) -> None:
    def layer() -> nn.Module:
        return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), Positions(None))

    made = trial(tmp_path, task_of(layer, True), **PIPELINE)
    assert [one for one in made.remarks if "known" not in one] == []


def test_a_table_may_grow_in_overlapping_steps(tmp_path: Path) -> None:
    schedule: dict[str, Any] = {"parallel": Parallel(pipeline=2, schedule="pipedream")}
    assert trial(tmp_path, task_of(lambda: Positions(1), True), **schedule).rows == 4


class Grows(Task):
    """Batches of any length, a table of positions in an inner module, and a mask that is made for each batch."""

    def __init__(self, built: int | None) -> None:
        self.built = built

    def model(self) -> nn.Module:
        class Net(nn.Module):
            mask: torch.Tensor

            def __init__(self, built: int | None) -> None:
                super().__init__()
                self.first, self.norm, self.positions = nn.Linear(4, 8), nn.BatchNorm1d(8), Positions(built)
                self.last = nn.Linear(8, 1)
                self.register_buffer("mask", torch.ones(2, 1), persistent=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.mask = torch.ones(len(x), 1).tril(-1)
                found: torch.Tensor = self.last(self.positions(self.norm(self.first(x))) * (1 - self.mask)).square()
                return found

        return Net(self.built)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).float().mean()


SHARDS, STEPS = 6, 4


def batches(step: int, hosted: Any) -> dict[int, list[Microbatch]]:
    made = {}
    for shard in hosted:
        draw = torch.Generator().manual_seed(100 * step + shard)
        sizes = torch.randint(2, 9, (2,), generator=draw).tolist()
        made[shard] = [Microbatch(torch.randn(size, 4, generator=draw), size) for size in sizes]
    return made


@pytest.mark.parametrize(
    ("built", "technique"),
    [
        pytest.param(None, PLAIN, id="None-fp32"),
        pytest.param(3, Technique(Precision("bf16")), id="3-bf16"),
        pytest.param(3, PLAIN, id="3-fp32", marks=pytest.mark.slow),
        pytest.param(None, Technique(Precision("bf16")), id="None-bf16", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_with_longer_batches_to_the_same_bits_on_any_workers(
    built: int | None, technique: Technique
) -> None:
    make_deterministic()

    def steps() -> Any:
        task = Grows(built)
        return whole_steps(
            TrainState(
                task,
                [build_model(task, 3, CPU)],
                Summing(SHARDS, exact=True),
                seed=3,
                technique=replace(technique, clip_norm=1.0),
            )
        )

    def sha(state: TrainState) -> str:
        return state_sha256(named_state(state.module, state.optimizer, state.named))

    one = steps()
    for step in range(STEPS):
        one.run(step, batches(step, range(SHARDS)), context(SoloWorld()))
    # The state has them as they were built.
    sizes = {name: len(value) for name, value in one.state.holding().buffers.items() if "norm" not in name}
    assert sizes == {"mask": 2} | ({} if built is None else {"positions.table": 3})
    expected = sha(one.state)
    for seed in range(6):
        group = Group(steps, batches, SHARDS)
        group.train(STEPS, random.Random(seed))
        assert {sha(state) for state in group.states if state.last_applied == STEPS - 1} == {expected}


def test_what_is_large_is_not_looked_into() -> None:
    class Holds:
        def __init__(self) -> None:
            self.many, self.array = list(range(200_000)), np.zeros(200_000)

    one = Holds()
    seen = Attributes(one)
    one.many[0], one.array[0] = 1, 1
    assert seen.changed() == []
    assert Attributes(one).changed() == []
    one.many.append(1)
    assert seen.changed() == ["many"]
