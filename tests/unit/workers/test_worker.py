"""A worker's control calls: preempted steps, outdated calls, errors, and what runs on which thread."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

pytest.importorskip("ray")

from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.errors import DataChanged, Interrupted, StaleController, TrainingError, WaitExpired
from raytrain_plus.result import Result
from raytrain_plus.runs.folder import LEFT, Fence
from raytrain_plus.state.stored.digest import model_file
from raytrain_plus.state.stored.manifest import name_of
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.step_records import StepRecord
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.workers import reporter
from raytrain_plus.workers import worker as module
from raytrain_plus.workers.messages import WHOLE, Outcome, Plan, PreparedReport, WorkerLocation
from raytrain_plus.workers.preparation.prepared import Prepared
from raytrain_plus.workers.states.leftover import leftovers
from raytrain_plus.workers.worker import Worker
from tests.support.datasets import write
from tests.support.exact_steps import SHARDS, Small, batches, sha, state_of
from tests.unit.workers.members import CHARTER, Controller, Feeds, assigned, in_background, member, plan_of, worker_of


@pytest.fixture(autouse=True)
def reports_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "ray", SimpleNamespace(get=lambda reference, timeout: -1))


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, BaseException])
def test_a_task_that_exits_is_an_error_and_no_lost_worker(tmp_path: Path, kind: type[BaseException]) -> None:
    def prepare(name: str, plan: Plan) -> tuple[Prepared, PreparedReport]:
        raise kind("no GPU")

    worker = Worker("worker-0", prepare=prepare)
    with pytest.raises(TrainingError, match=f"the task raised {kind.__name__}: no GPU"):
        worker.prepare(plan_of(tmp_path), 1)


def test_listening_for_notices_starts_after_the_preparation(tmp_path: Path) -> None:
    done: list[Any] = []
    prepared, ready = member(tmp_path), PreparedReport(parameters=8, state_bytes=0)

    def prepare(name: str, plan: Plan) -> tuple[Prepared, PreparedReport]:
        done.append((name, plan.steps))
        if len(done) == 1:
            raise ValueError("no such task")
        return prepared, ready

    worker = Worker("worker-0", prepare=prepare, listen=lambda: done.append("listens"))
    with pytest.raises(TrainingError, match="no such task"):
        worker.prepare(prepared.plan, 1)
    assert worker.prepare(prepared.plan, 1) is ready
    assert done == [("worker-0", 2), ("worker-0", 2), "listens"]


def test_a_worker_that_is_not_prepared_may_hear_what_all_are_told() -> None:
    worker = Worker("worker-0")
    worker.copied(0, 3)
    worker.settled(3, 0)
    assert worker.interrupt(0, frozenset(), frozenset()).doing == "idle"
    with pytest.raises(AssertionError, match="worker-0 is not prepared"):
        worker.warm_up()


class Waits(Small):
    """Its loss waits in the middle of a step that has already changed buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go = threading.Event(), threading.Event()
        self.go.set()

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        result = super().loss(model, batch)
        self.reached.set()
        assert self.go.wait(10)
        return result

    def show(self, model: nn.Module) -> str:
        raise AssertionError("the model is in use")


def test_the_state_is_provided_during_a_step_that_is_never_applied(tmp_path: Path) -> None:
    task = Waits()
    one = state_of(task)
    before, weights, copied = "", dict[str, torch.Tensor](), threading.Event()

    def at(step: int) -> None:
        nonlocal before
        if step == 1:
            before = sha(one)
            weights.update({name: value.clone() for name, value in one.module.state_dict().items()})
            task.reached.clear()
            task.go.clear()
            copied.set()

    worker = worker_of(member(tmp_path, steps=3, build=lambda layers: one, feeds=Feeds(at)))
    served: list[Outcome] = []
    serving = in_background(lambda: served.append(worker.serve(Controller(), assigned())))
    # A loop would take the interpreter's lock from the step after each of its operations.
    assert copied.wait(10)
    assert task.reached.wait(10)
    assert worker.stand_aside(7) is None, "another generation"
    outcome = worker.stand_aside(0)
    assert outcome is not None
    assert (outcome.holds, outcome.why) == (0, "interrupted")
    # Its share of a checkpoint of that generation will never come.
    assert (outcome.copied, outcome.saved_as) == (-1, 12)
    digest = hashlib.sha256()
    stage = WHOLE.stage
    file = model_file([worker.inventory(0, stage)], lambda _, names: lambda: worker.tensors(0, stage, names), digest)
    model = safetensors.torch.load(b"".join(bytes(piece) for piece in file))
    assert digest.hexdigest() == before
    assert all(torch.equal(model[name], weights[name]) for name in model)
    assert model.keys() <= weights.keys()
    assert worker.show(0) is None
    with pytest.raises(Interrupted, match="nor a copy"):
        worker.inventory(1, stage)
    task.go.set()
    serving.join(10)
    assert [(late.why, late.holds) for late in served] == [("interrupted", 0)]
    one.restore_buffers()
    assert (one.last_applied, sha(one)) == (0, before)


def test_a_state_that_is_being_changed_is_not_provided(tmp_path: Path) -> None:
    prepared = member(tmp_path, steps=1)
    worker = worker_of(prepared)
    worker.serve(Controller(), assigned())
    prepared.own.state.last_applied = None
    assert worker.stand_aside(0) is None
    prepared.own.state.last_applied = 0
    assert worker.stand_aside(0) is not None


def test_calls_for_a_generation_that_is_over_are_refused_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    looked: list[Any] = []
    store = SimpleNamespace(wait=lambda references, timeout: looked.append(references))
    worker = worker_of(member(tmp_path), store=store)
    control = worker._control
    control.begin(3)
    worker.pause(2)
    worker.save(2)
    worker.interrupt(2, frozenset(), frozenset())
    worker.take(2, ("a reference that nobody looks at",))
    assert worker.stand_aside(2) is None
    assert [control.pause_requested(), control.save_requested(), control.interrupted()] == [False] * 3
    assert not looked
    refused = [record.message for record in caplog.records]
    assert len(refused) == 5
    assert refused[0] == "worker-0 refused a pause request for generation 2; it is in generation 3"
    worker.pause(3)
    worker.take(3, ("a reference",))
    assert (control.pause_requested(), looked, len(caplog.records)) == (True, [["a reference"]], 5)


def summed(folder: Path) -> Prepared:
    """Return a worker that has all sums of the last step, and was interrupted before it applied it."""
    prepared, control = member(folder, steps=1, build=lambda layers: state_of(exact=False)), Control()
    control.begin(0)
    context = StepContext(world=SoloWorld(), control=control, wait_s=1, meanwhile=lambda: control.interrupt(0))
    with pytest.raises(Interrupted):
        whole_steps(prepared.own.state).run(0, batches(0, range(SHARDS)), context)
    assert prepared.own.state.ready == 0
    return prepared


def test_a_worker_applies_the_step_that_its_peers_have_applied(tmp_path: Path) -> None:
    outcome = worker_of(summed(tmp_path)).finish(0, {})
    assert (outcome.why, outcome.holds, outcome.final) == ("interrupted", 0, False)


def test_changed_data_is_final_for_a_worker_that_ends_the_run_by_finish(tmp_path: Path) -> None:
    worker = worker_of(summed(tmp_path))
    write(tmp_path / "data" / "a.parquet", 9)
    outcome = worker.finish(0, {})
    assert (outcome.why, outcome.final, outcome.holds) == ("failed", True, None)
    assert isinstance(outcome.error, DataChanged)


def copied(prepared: Prepared) -> None:
    """Copy the state in memory."""
    held = prepared.own.state.last_applied
    assert held is not None
    prepared.copier.begin(0, WHOLE.stage, True, None, lambda sent: None)
    prepared.copier.copy(held, lambda: None)
    while prepared.copier.find(held, WHOLE.stage) is None:
        pass


def test_a_worker_goes_back_to_its_own_copy(tmp_path: Path) -> None:
    prepared = summed(tmp_path)
    one, worker = prepared.own.state, worker_of(prepared)
    before = one.snapshot().digest
    copied(prepared)
    assert worker.finish(0, {}).holds == 0
    assert one.snapshot().digest != before
    outcome = worker.recall(0, -1)
    assert (outcome.holds, outcome.ready, one.snapshot().digest) == (-1, None, before)
    # Without a copy it keeps what it has.
    assert worker.recall(0, 5).holds == -1


class Plain(Small):
    """A model without empty tensors."""

    def model(self) -> nn.Module:
        return nn.Linear(6, 3)


def test_a_share_of_what_it_holds_is_written_between_generations(tmp_path: Path) -> None:
    worker, controller = worker_of(member(tmp_path, build=lambda layers: state_of(Plain()))), Controller()
    worker.keep(controller, assigned().share)
    # The share is written on a thread.
    while not controller.calls:
        assert worker.activity().doing == "idle"
    [(method, written)] = controller.calls
    assert (method, written.step, written.generation, written.error) == ("written", -1, 12, "")
    assert written.share is not None


# A controller that takes over


@pytest.fixture
def located(monkeypatch: pytest.MonkeyPatch) -> WorkerLocation:
    location = WorkerLocation(worker="worker-0", pid=1, node="n", address="127.0.0.1")
    monkeypatch.setattr(Worker, "location", lambda worker: location)
    return location


def test_a_worker_tells_a_new_controller_how_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, located: WorkerLocation
) -> None:
    # Nothing that it reports is durable yet.
    monkeypatch.setattr(reporter, "ray", SimpleNamespace(get=lambda reference, timeout: -1))
    monkeypatch.setattr(reporter, "PERIOD_S", 0.002)
    task = Waits()
    worker = worker_of(member(tmp_path, steps=3, build=lambda layers: state_of(task)))
    assert Worker("worker-1").standing() is None
    before = worker.standing()
    assert before is not None
    assert (before.location, before.charter, before.inside, before.joined) == (located, None, False, False)
    assert (before.outcome.holds, before.copies, before.written, before.records) == (-1, [], None, [])
    task.go.clear()
    serving = in_background(lambda: worker.serve(Controller(), assigned()))
    assert task.reached.wait(10)
    inside = worker.standing()
    assert inside is not None
    assert (inside.inside, inside.joined, inside.charter) == (True, True, assigned().charter)
    outcomes: list[Any] = []

    def rejoin() -> None:
        try:
            outcomes.append(worker.rejoin(0))
        except StaleController as error:
            outcomes.append(error)

    # Only the newest of many controllers waits.
    for number in range(40):
        thread = in_background(rejoin)
        while len(outcomes) < number and thread.is_alive():
            pass
    with pytest.raises(Interrupted, match="worker-0 is not in generation 1"):
        worker.rejoin(1)
    task.go.set()
    serving.join(10)
    thread.join(10)
    assert [type(one) for one in outcomes] == [StaleController] * 39 + [Outcome]
    assert (outcomes[-1].why, outcomes[-1].holds) == ("finished", 2)
    after = worker.standing()
    assert after is not None
    assert (after.inside, after.joined, after.outcome.why, after.outcome.holds) == (False, True, "finished", 2)
    assert after.outcome.state_sha256 == outcomes[-1].state_sha256 is not None
    steps = [(number, record.step) for number, record in after.records if isinstance(record, StepRecord)]
    assert steps == [(12, 0), (12, 1), (12, 2)]
    # What it holds now, and not what it held when it came out.
    worker._prepared.own.state.last_applied = None
    late = worker.standing()
    assert late is not None
    assert late.outcome.holds is None


def test_a_state_that_is_about_to_change_is_promised_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, located: WorkerLocation
) -> None:
    worker = worker_of(member(tmp_path))
    begun, go = threading.Event(), threading.Event()

    def restore(*_: Any) -> None:
        begun.set()
        assert go.wait(10)

    monkeypatch.setattr(module, "restore", restore)
    thread = in_background(lambda: worker.restore(None, WHOLE))  # type: ignore[arg-type]
    assert begun.wait(10)
    held = worker.standing()
    assert held is not None
    assert held.outcome.holds is None
    go.set()
    thread.join(10)
    held = worker.standing()
    assert held is not None
    assert held.outcome.holds == -1


def test_a_new_controller_need_not_know_where_the_members_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Any] = []
    monkeypatch.setattr(module, "close_connections", lambda addresses, listeners: closed.append(addresses))
    worker = worker_of(member(tmp_path, steps=1))
    worker.serve(Controller(), assigned())
    rings, replicas = frozenset({("a", 1)}), frozenset({("b", 2)})
    worker.formed(0, rings, replicas)
    worker.formed(1, replicas, rings)
    worker.interrupt(0, frozenset(), frozenset())
    assert closed == [rings, replicas]
    worker.interrupt(0, replicas, frozenset())
    assert closed[2:] == [replicas, frozenset()]


def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claimed: str = "run/1") -> tuple[Worker, threading.Thread]:
    """Return a worker that trains without a controller, once it has made some steps, and its call."""
    reached = threading.Event()
    worker = worker_of(member(tmp_path, steps=100_000, feeds=Feeds(lambda step: reached.set() if step == 5 else None)))
    at = WorkerLocation(worker="worker-0", pid=5, node="n", address="127.0.0.1")
    monkeypatch.setattr(worker, "location", lambda: at)
    Fence(LocalFolder(tmp_path / "run"), 0, claimed)
    serving = in_background(lambda: worker.serve(Controller(), assigned()))
    assert reached.wait(10)
    return worker, serving


def test_a_worker_leaves_its_last_state_and_what_nobody_has_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, serving = alone(tmp_path, monkeypatch)
    run = LocalFolder(tmp_path / "run")
    worker.leave("run/1")
    # It has stopped at a boundary.
    serving.join(10)
    left = leftovers(run)["worker-0"]
    assert (left.last.number, left.last.seats) == (CHARTER.number, CHARTER.group.seats)
    assert left.written is not None
    last = left.written.step
    assert last >= 4
    assert [record.step for _, record in left.records if isinstance(record, StepRecord)] == list(range(last + 1))
    assert run.files("checkpoints").keys() == {"checkpoints/" + name_of(last, 12) + "/00000-of-00001.safetensors"}
    # Once: another worker asks it, too.
    run.remove(LEFT)
    worker.leave("run/1")
    assert not run.files(LEFT)


def test_a_worker_whose_run_another_controller_owns_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker, serving = alone(tmp_path, monkeypatch, claimed="run/2")
    worker.leave("run/1")
    serving.join(10)
    run = LocalFolder(tmp_path / "run")
    assert not run.files(LEFT)
    assert not run.files("checkpoints")
    assert "another controller owns the run, so worker-0 leaves nothing" in caplog.text


def test_a_worker_tries_again_to_leave_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = {"claimed_by": 1, "leave": 1}

    def flaky(name: str) -> Any:
        work = getattr(module, name)

        def act(*arguments: Any) -> Any:
            if failing[name]:
                failing[name] -= 1
                raise OSError("it does not answer")
            return work(*arguments)

        return act

    monkeypatch.setattr(module, "LAST_PAUSES_S", (0.0,))
    for name in failing:
        monkeypatch.setattr(module, name, flaky(name))
    worker, serving = alone(tmp_path, monkeypatch)
    run = LocalFolder(tmp_path / "run")
    worker.leave("run/1")
    serving.join(10)
    assert leftovers(run)["worker-0"].written is not None
    run.remove(LEFT)
    worker._left = None
    failing["leave"] = 2
    worker.leave("run/1")
    assert not run.files(LEFT)
    # Others ask it, too.
    worker.leave("run/1")
    assert leftovers(run)["worker-0"].written is not None


def test_a_worker_whose_state_cannot_be_written_leaves_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(*_: Any) -> None:
        raise WaitExpired("nothing was written of an earlier checkpoint")

    monkeypatch.setattr(module.between, "keep", keep)
    worker, serving = alone(tmp_path, monkeypatch)
    worker.leave("run/1")
    serving.join(10)
    left = leftovers(LocalFolder(tmp_path / "run"))["worker-0"]
    assert left.written is None
    assert left.records


def test_a_worker_of_a_run_that_has_ended_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, serving = alone(tmp_path, monkeypatch)
    run = LocalFolder(tmp_path / "run")
    Result(name="run", status="failed", exit_code=1, path=tmp_path / "run", steps=3, samples=24).save(run)
    worker.leave("run/1")
    serving.join(10)
    assert not run.files(LEFT)
    assert not run.files("checkpoints")


def test_a_worker_that_was_in_no_generation_leaves_nothing(tmp_path: Path) -> None:
    worker_of(member(tmp_path)).leave("run/1")
    Worker("worker-1").leave("run/1")
    assert not LocalFolder(tmp_path / "run").files()


def test_a_member_that_waits_for_a_lost_one_leaves_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_S", -1e9)
    worker, serving = alone(tmp_path, monkeypatch)
    worker.leave("run/1")
    serving.join(10)
    assert worker._control.interrupted()
    left = leftovers(LocalFolder(tmp_path / "run"))["worker-0"]
    assert left.written is not None
