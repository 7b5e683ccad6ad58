"""However a generation ends, the worker says so, and holds what it says."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_plus.errors import DataChanged, InputError, Interrupted, RaytrainError, TrainingError, WaitExpired
from raytrain_plus.layers import Experts
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.observe.expert_use import ExpertsUsed
from raytrain_plus.observe.gpu_use import GpuUse
from raytrain_plus.state.stages import REST
from raytrain_plus.training.exchange.step_records import StepRecord
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.step.loop import Evaluation
from raytrain_plus.workers import generation, reporter
from raytrain_plus.workers.generation import Generation
from raytrain_plus.workers.machine.gpu import Gpu
from raytrain_plus.workers.messages import WHOLE, Assignment, Layers, Outcome
from raytrain_plus.workers.preparation.prepared import Prepared
from raytrain_plus.workers.states.state_receiver import ReceivedStates
from raytrain_plus.workers.states.state_source import sha256_of
from raytrain_plus.workers.stay import Stay
from raytrain_plus.workers.unconfirmed import Unconfirmed
from tests.support.exact_steps import Small, batches, state_of
from tests.unit.workers.members import SOLO, Controller, Feeds, assigned, in_background, member

HALF = Layers(Stage(0, 2), (("first",),), {"first": 0, "last": 1})


@pytest.fixture(autouse=True)
def reports_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "ray", SimpleNamespace(get=lambda reference, timeout: -1))


class Part:
    """A worker's part in a generation, and what surrounds it."""

    def __init__(self, prepared: Prepared, assignment: Assignment, store: Any = None) -> None:
        self.control = Control()
        self.control.begin(assignment.generation)
        self.controller = Controller()
        self.received = ReceivedStates(self.control, store)
        self.generation = Generation(
            "worker-0", prepared, self.control, self.received, self.controller, Stay(assignment), Unconfirmed()
        )

    def run(self) -> Outcome:
        outcome = self.generation.run()
        assert self.control.activity().doing == "idle"
        return outcome


def test_a_generation_that_finishes_the_run_trains_to_its_end(tmp_path: Path) -> None:
    prepared = member(tmp_path, steps=3)
    part = Part(prepared, assigned())
    outcome = part.run()
    assert (outcome.why, outcome.holds, outcome.stage, outcome.error) == ("finished", 2, WHOLE.stage, None)
    assert outcome.state_sha256 == sha256_of(prepared.own.state)
    [joined] = [call for call in part.controller.calls if call[0] == "joined"]
    assert (joined[1:3], outcome.saved_as) == (("worker-0", 0), 12)


def test_a_paused_generation_has_no_final_state(tmp_path: Path) -> None:
    part = Part(member(tmp_path, steps=3), assigned())
    part.control.pause(0)
    outcome = part.run()
    assert (outcome.why, outcome.holds, outcome.state_sha256) == ("paused", 0, None)


@pytest.mark.parametrize("name", [None, "data", "held_out"])
def test_all_files_are_checked_again_before_a_run_is_finished(tmp_path: Path, name: str | None) -> None:
    file = tmp_path / str(name) / "a.parquet"

    def overwrite(step: int) -> None:
        if name is not None:
            os.utime(file, (1, 1))

    outcome = Part(member(tmp_path, steps=1, feeds=Feeds(overwrite)), assigned()).run()
    assert outcome.holds == 0
    if name is None:
        assert (outcome.why, outcome.error) == ("finished", None)
        return
    # Final: it is not retried, as if a worker had been lost.
    assert (outcome.why, outcome.final, outcome.state_sha256) == ("failed", True, None)
    assert isinstance(outcome.error, DataChanged)
    assert str(outcome.error).startswith(f"{file} on ")
    assert "its modification time changed: 20" in outcome.fault


def raises(error: BaseException, at: int = 1) -> Callable[[int], None]:
    def before(step: int) -> None:
        if step == at:
            raise error

    return before


@pytest.mark.parametrize(
    ("error", "why", "final", "fault"),
    [
        (Interrupted("a peer is gone"), "interrupted", False, "a peer is gone"),
        (WaitExpired("a peer is stuck"), "interrupted", False, "a peer is stuck"),
        (TrainingError("the loss is NaN"), "failed", True, "TrainingError: the loss is NaN"),
        (InputError("no such column"), "failed", False, "InputError: no such column"),
    ],
)
def test_an_error_ends_a_generation_with_the_state_before_it(
    tmp_path: Path, error: RaytrainError, why: str, final: bool, fault: str
) -> None:
    outcome = Part(member(tmp_path, feeds=Feeds(raises(error))), assigned()).run()
    assert (outcome.why, outcome.holds, outcome.final, outcome.fault) == (why, 0, final, fault)
    assert outcome.error is (error if why == "failed" else None)


class Raises(Small):
    """Raises an exception in one of its methods, or in an object that it made."""

    def __init__(self, place: str, kind: type[BaseException]) -> None:
        super().__init__()
        self.place, self.kind = place, kind

    def fail(self, *_: Any) -> Any:
        raise self.kind("no such column")

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        made = super().optimizer(parameters)
        if self.place == "optimizer":
            made.register_step_pre_hook(self.fail)
        return made

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        made = torch.optim.lr_scheduler.ConstantLR(optimizer)
        if self.place == "scheduler":
            made.get_lr = self.fail  # type: ignore[method-assign]
        return made

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        if self.place == "loss":
            self.fail()
        loss, weight = super().loss(model, batch).values()
        if self.place == "backward":
            loss.register_hook(self.fail)
        return {"loss": loss, "weight": weight}

    def evaluate(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, float]:
        return self.fail() if self.place == "evaluate" else {"loss": 0.0}


class Evaluated(Feeds):
    """Evaluates after each step."""

    def evaluation(self, stage: Stage) -> Any:
        return Evaluation(every_steps=1, batches=lambda shard: iter(batches(0, [shard])[shard]))


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, BaseException])
@pytest.mark.parametrize("place", ["data", "loss", "backward", "optimizer", "scheduler", "evaluate"])
def test_an_error_of_the_task_is_reported_with_its_place(tmp_path: Path, place: str, kind: type[BaseException]) -> None:
    task = Raises(place, kind)
    feeds = Evaluated(raises(kind("no such column"), 0) if place == "data" else lambda step: None)
    part = Part(member(tmp_path, build=lambda layers: state_of(task), feeds=feeds), assigned(evaluated=-1))
    # As in a worker, whose main thread is Ray's.
    with ThreadPoolExecutor(max_workers=1) as thread:
        outcome = thread.submit(part.run).result()
    holds = {"evaluate": 0, "optimizer": None, "scheduler": None}.get(place, -1)
    assert (outcome.why, outcome.holds, outcome.final) == ("failed", holds, False)
    assert isinstance(outcome.error, TrainingError)
    # Its world had been left when it was reported.
    rows = "; the rows: of shard 0 in step 0" if place in ("loss", "backward") else ""
    assert str(outcome.error).endswith(f"the task raised {kind.__name__}: no such column{rows}")
    assert outcome.step == (None if place in ("data", "evaluate") else 0)
    assert outcome.fault.startswith(f"{kind.__name__} at {__file__}:")


def test_an_interrupt_before_the_world_has_formed_is_no_fault_if_it_was_requested(tmp_path: Path) -> None:
    part = Part(member(tmp_path), assigned())
    part.control.interrupt(0)
    outcome = part.run()
    assert (outcome.why, outcome.holds, outcome.fault, part.controller.calls) == ("interrupted", -1, "", [])


def test_what_interrupts_a_member_that_was_told_to_leave_is_no_reason(tmp_path: Path) -> None:
    def cut(step: int) -> None:
        part.control.interrupt(0)
        raise Interrupted("its connections were closed")

    part = Part(member(tmp_path, feeds=Feeds(cut)), assigned())
    assert (part.run().why, part.run().fault) == ("interrupted", "")


def given_by(held: int) -> SimpleNamespace:
    """Return an object store with the state of a donor."""
    donor = state_of()
    donor.last_applied = held
    snapshot = donor.snapshot()
    return SimpleNamespace(wait=lambda references, timeout: (references, []), get=lambda reference: snapshot)


def test_a_member_that_lacks_the_newest_state_takes_it(tmp_path: Path) -> None:
    part = Part(member(tmp_path), assigned(lacks="newer", first_step=1), given_by(0))
    part.received.fetch(0, ["a reference"])
    outcome = part.run()
    assert (outcome.why, outcome.holds) == ("finished", 1)


def test_a_member_that_gets_another_stage_keeps_the_layers_that_it_has(tmp_path: Path) -> None:
    prepared = member(tmp_path, steps=5)
    before = prepared.own.build(HALF)
    before.last_applied = 4
    with torch.no_grad():
        for _, value in before.named:
            value.add_(1)
    kept = {name: value.detach().clone() for name, value in before.named}
    donor = state_of()
    donor.last_applied = 4
    given = donor.snapshot({"first", REST}.__contains__)
    store = SimpleNamespace(wait=lambda references, timeout: (references, []), get=lambda reference: given)
    part = Part(prepared, assigned(lacks="stage", first_step=5), store)
    part.received.fetch(0, ["a reference"])
    assert part.run().why == "finished"
    now = dict(prepared.own.state.named)
    assert now.keys() == kept.keys()
    for name, value in donor.named:
        assert torch.equal(now[name], value if name.startswith("first.") else kept[name]), name
    # Only these bytes came from other workers.
    [moved] = [call[-1] for call in part.controller.calls if call[0] == "joined"]
    assert moved == given.bytes == sum(value.nbytes for name, value in donor.named if name.startswith("first."))


def test_a_member_takes_a_copy_of_its_own_from_its_own_memory(tmp_path: Path) -> None:
    prepared, other = member(tmp_path, steps=5), Stage(0, 2)
    prepared.own.build(HALF).last_applied = 4
    donor = state_of()
    donor.last_applied = 4
    with torch.no_grad():
        for _, value in donor.named:
            value.add_(1)
    prepared.copier.keep(0, other, donor.snapshot())
    part = Part(prepared, assigned(lacks="stage", first_step=5, own_copies=((other, ("first", REST)),)))
    part.received.fetch(0, [])
    assert part.run().why == "finished"
    now = dict(prepared.own.state.named)
    for name, value in donor.named:
        assert not value.numel() or torch.equal(now[name], value) == name.startswith("first."), name
    # Nothing crossed from another process.
    assert [call[-1] for call in part.controller.calls if call[0] == "joined"] == [0]


@pytest.mark.parametrize(
    ("donated", "fails_at", "holds", "stage"), [(3, 5, 4, HALF), (4, 5, 4, WHOLE), (4, 6, 5, WHOLE)]
)
def test_a_member_that_leaves_without_a_step_goes_back_unless_what_it_took_is_as_good(
    tmp_path: Path, donated: int, fails_at: int, holds: int, stage: Layers
) -> None:
    prepared = member(tmp_path, steps=9, feeds=Feeds(raises(Interrupted("a peer is gone"), fails_at)))
    before = prepared.own.build(HALF)
    before.last_applied = 4
    part = Part(prepared, assigned(lacks="stage", first_step=5), given_by(donated))
    part.received.fetch(0, ["a reference"])
    outcome = part.run()
    assert (outcome.why, outcome.holds, outcome.stage) == ("interrupted", holds, stage.stage)
    assert (prepared.own.state is before) == (stage is HALF)


def test_a_member_starts_over_once_others_have_copied_what_it_holds(tmp_path: Path) -> None:
    prepared = member(tmp_path, steps=1)
    before = prepared.own.state
    part = Part(prepared, assigned(lacks="initial", gives=1))
    outcomes: list[Outcome] = []
    running = in_background(lambda: outcomes.append(part.run()))
    while part.control.activity().doing != "joining":
        assert running.is_alive()
    assert prepared.own.state is before
    prepared.source.snapshot(0, -1, WHOLE.stage)
    running.join(30)
    assert [outcome.why for outcome in outcomes] == ["finished"]
    assert prepared.own.state is not before


class Routed(Small):
    """Small, with experts."""

    def model(self) -> nn.Module:
        return nn.Sequential(super().model(), Experts(3, 4, 4))


def reported(prepared: Prepared, assignment: Assignment) -> list[Any]:
    part = Part(prepared, assignment)
    outcome = part.run()
    assert outcome.why == "finished"
    return [one for call in part.controller.calls if call[0] == "report" for one in call[3]] + list(outcome.records)


def test_one_worker_of_each_stage_reports_its_use_of_experts_before_each_of_the_first_steps(tmp_path: Path) -> None:
    prepared = member(tmp_path, steps=13, build=lambda layers: state_of(Routed()))
    found = reported(prepared, assigned())
    used = {one.step: at for at, one in enumerate(found) if isinstance(one, ExpertsUsed)}
    assert {*range(10), 12} <= used.keys() <= {*range(13)}
    for step, at in used.items():
        assert isinstance(found[at + 1], StepRecord)
        assert found[at + 1].step == step
    for place in (assigned(ring=replace(SOLO, rank=1)), assigned(layers=replace(WHOLE, stage=Stage(rank=1, ranks=2)))):
        prepared = member(tmp_path, build=lambda layers: state_of(Routed()))
        assert not any(isinstance(one, ExpertsUsed) for one in reported(prepared, place))


def test_a_worker_with_a_gpu_reports_its_use_and_others_start_no_thread_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    @contextmanager
    def metered(uuid: str, tell: Callable[[GpuUse], None]) -> Iterator[None]:
        read.append(uuid)
        tell(GpuUse(utilisation=0.5, memory_bytes=1, power_w=1.0))
        yield

    monkeypatch.setattr(generation, "metered", metered)
    Part(member(tmp_path, steps=1), assigned()).run()
    assert read == []
    prepared = replace(member(tmp_path, steps=1), gpu=Gpu("NVIDIA", "GPU-0"))
    part = Part(prepared, assigned())
    outcome = part.run()
    sent = [record for call in part.controller.calls if call[0] == "report" for record in call[3]]
    assert [one.utilisation for one in [*sent, *outcome.records] if isinstance(one, GpuUse)] == [0.5]
    assert read == ["GPU-0"]
