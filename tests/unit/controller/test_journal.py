"""The journal: followers get every event, in order, however far back they begin."""

from __future__ import annotations

import errno
import itertools
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_plus.controller.record import aside, last_writes
from raytrain_plus.controller.record.aside import Aside
from raytrain_plus.controller.record.event_feed import KEPT
from raytrain_plus.controller.record.journal import Beginning
from raytrain_plus.controller.record.run_record import RunRecord
from raytrain_plus.data.ledger import ledger_files
from raytrain_plus.data.ledger.ledger import NOTE
from raytrain_plus.errors import RunError, StorageError
from raytrain_plus.observe.expert_use import ExpertsUsed, ExpertUse
from raytrain_plus.observe.gpu_use import GpuUse
from raytrain_plus.observe.run_events import EventLog, read_events
from raytrain_plus.observe.step_profile import Profiled, ProfiledWorker
from raytrain_plus.result import RESULT, Result
from raytrain_plus.runs.folder import Fence, Lease, claims_of
from raytrain_plus.runs.history import Past
from raytrain_plus.storage.folders.claimed import Claimed
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.interface import Buffer, Folder
from raytrain_plus.storage.outage import Outages
from raytrain_plus.training.exchange.step_records import Evaluated, Remark, StepRecord
from raytrain_plus.workers.messages import Export, Sent, WorkerLocation
from tests.support.listeners import FakeListeners

NOTES = np.zeros(4, NOTE).tobytes()


def record_of(run: Folder) -> RunRecord:
    return RunRecord(run, batch_size=8, rows=80, end=None, past=Past())


@pytest.fixture
def record(run: Folder) -> Iterator[RunRecord]:
    made = record_of(run)
    made.open(Fence(run, 0), Beginning("name: x\n", {}, {}, "here", node="here"))
    yield made
    made.journal.close()


def test_a_follower_from_far_back_gets_events_dropped_from_memory(record: RunRecord) -> None:
    count = 5 * KEPT
    for number in range(count):
        record.will_leave(f"node-{number}", None)
    record.journal.settle()
    assert record.journal._followed.in_memory <= 2 * KEPT
    got: list[str] = []
    cursor = 0
    while cursor < count + 2:
        events = record.journal.follow(cursor, 1)
        cursor += len(events)
        got += [event["kind"] if "node" not in event else event["node"] for event in events]
    assert got == ["run_started", "here", *(f"node-{number}" for number in range(count))]
    assert record.journal.follow(count + 2, 0.01) == []


def test_a_workers_clock_is_known_to_the_duration_of_the_call(record: RunRecord) -> None:
    record.reports.joined(WorkerLocation(worker="a", pid=1, node="n", address="127.0.0.1"))
    record.reports.clocks.read("a", clock_s=1000.15, asked=1000.1, answered=1000.3)
    assert record.reports.clocks.offset("a") == 0.0
    record.reports.clocks.read("a", clock_s=900.0, asked=1000.1, answered=1000.3)
    assert record.reports.clocks.offset("a") == pytest.approx(100.2)


def step(number: int) -> StepRecord:
    return StepRecord(step=number, rows=8, loss=1.0, seconds=0.1, waited_s=0.0, time=float(number), notes=NOTES)


def test_a_remark_is_reported_once_whoever_makes_it(record: RunRecord, run: Folder) -> None:
    for name in "ab":
        record.reports.joined(WorkerLocation(worker=name, pid=1, node="n", address="127.0.0.1"))
    record.regroup(0.0, ["a", "b"], -1, 0)
    record.report("a", [replace(step(0), remarks=(Remark("x", "seen"), Remark("y", "too")))])
    record.report("b", [replace(step(0), remarks=(Remark("x", "seen by another"),))])
    record.journal.settle()
    assert [event["text"] for event in read_events(run) if event["kind"] == "noted"] == ["seen", "too"]


def test_a_profile_of_the_committed_steps_is_in_the_result_and_in_a_file(record: RunRecord, run: Folder) -> None:
    for name in "ab":
        record.reports.joined(WorkerLocation(worker=name, pid=1, node="n", address="127.0.0.1"))
    record.regroup(0.0, ["a", "b"], -1, 0)
    of = ProfiledWorker(seat=0, device="a CPU", trace="t", operations=1, peak=None)
    told = [Profiled(step=number, seconds=1.0, phases={"rest": 1.0}, hidden_s=0.0, of=of) for number in range(2)]
    record.report("a", [told[0], step(0), told[1], step(1), Remark("x", "no trace")])
    record.report("b", [step(0)])
    result = record.finish("x", "stopped", None, None, 0.0)
    assert result.profile is not None
    assert [row["steps"] for row in result.profile["workers"]] == [[0]]
    assert json.loads(run.read("profile/summary.json")) == result.profile
    assert [event["text"] for event in read_events(run) if event["kind"] == "noted"] == ["no trace"]


def test_readings_of_gpus_are_in_a_step_every_half_a_minute(run: Folder) -> None:
    now = 1000.0
    record = RunRecord(run, batch_size=8, rows=80, end=None, past=Past(), clock=lambda: now)
    record.open(Fence(run, 0), Beginning("name: x\n", {}, {}, "here"))
    for name in "ab":
        record.reports.joined(WorkerLocation(worker=name, pid=1, node="n", address="127.0.0.1"))
    record.regroup(0.0, ["a", "b"], -1, 0)
    record._members = ("a", "b")
    use = GpuUse(utilisation=0.5, memory_bytes=10, power_w=None)
    for seconds in (0.0, 29.0, 2.0, 30.0):
        now += seconds
        number = record.committed + 1
        record.report("a", [replace(use, memory_bytes=number), step(number)])
        # A worker that is no member, and a member that has no GPU.
        record.report("gone", [use])
        record.report("b", [step(number)])
    # No reading has come since.
    now += 60.0
    for name in "ab":
        record.report(name, [step(4)])
    record.journal.settle()
    told = [event.get("gpus") for event in read_events(run) if event["kind"] == "step_committed"]
    record.journal.close()

    def shown(number: int) -> dict[str, dict[str, float | None]]:
        return {"a": {"utilisation": 0.5, "memory_bytes": number, "power_w": None}}

    assert told == [shown(0), None, shown(2), shown(3), None]


def test_a_step_has_the_learning_rate_of_a_stage_that_has_one(record: RunRecord, run: Folder) -> None:
    for name in "ab":
        record.reports.joined(WorkerLocation(worker=name, pid=1, node="n", address="127.0.0.1"))
    record.regroup(0.0, ["a", "b"], -1, 0)
    for rates in ((0.5,), (0.5, 0.25), ()):
        number = record.committed + 1
        record.report("a", [replace(step(number), lr=rates, waited_s=1.0)])
        # The record that completes the step is of a stage without an optimizer.
        record.report("b", [step(number)])
    record.journal.settle()
    told = [event.get("lr") for event in read_events(run) if event["kind"] == "step_committed"]
    assert told == [0.5, [0.5, 0.25], None]


def test_the_use_of_experts_follows_its_step_of_each_stage(record: RunRecord, run: Folder) -> None:
    for name in "ab":
        record.reports.joined(WorkerLocation(worker=name, pid=1, node="n", address="127.0.0.1"))
    record.regroup(0.0, ["a", "b"], -1, 0)
    first = ExpertUse(load=[3, 1], dropped=1, entropy=0.5, capacity=1.0)
    second = replace(first, load=[2, 2], dropped=0)
    record.report("a", [ExpertsUsed(step=0, layers={"one": first}), step(0), step(1)])
    reported = [ExpertsUsed(step=number, layers={"two": second}) for number in range(3)]
    record.report("b", [one for number in range(3) for one in (reported[number], step(number))])
    # Sent again; and nobody has committed the last step.
    record.report("b", reported)
    record.journal.settle()
    told = [event for event in read_events(run) if event["kind"] in ("step_committed", "experts")]
    shown = [(event["kind"], event["step"], list(event.get("layers", []))) for event in told]
    assert shown == [
        ("step_committed", 0, []),
        ("experts", 0, ["one"]),
        ("step_committed", 1, []),
        ("experts", 0, ["two"]),
        ("experts", 1, ["two"]),
    ]
    assert told[1]["layers"] == {"one": first.fields()}
    # The group goes back, and makes the steps again.
    record.go_back(-1, 1, None, 1, -2)
    record.regroup(0.0, ["a"], -1, 1)
    record.report("a", [ExpertsUsed(step=0, layers={"two": second}), step(0)])
    record.journal.settle()
    assert [event["step"] for event in read_events(run) if event["kind"] == "experts"] == [0, 0, 1, 0]


def test_evaluations_appear_after_their_steps(record: RunRecord, run: Folder) -> None:
    record.reports.joined(WorkerLocation(worker="a", pid=1, node="n", address="127.0.0.1"))
    record.regroup(0.0, ["a"], -1, 0)
    measured = [Evaluated(step=number, metrics={"loss": 1.0}) for number in (-1, 1)]
    record.report("a", [measured[0], step(0), step(1), measured[1], step(2)])
    record.journal.settle()
    told = [event for event in read_events(run) if "step" in event]
    assert [(event["kind"] == "evaluated", event["step"]) for event in told] == [
        (True, -1), (False, 0), (False, 1), (True, 1), (False, 2)
    ]  # fmt: skip


def test_all_events_are_in_the_folder_in_the_end(run: Folder) -> None:
    record = record_of(run)
    record.waits("a worker")
    record.open(Fence(run, 0), Beginning("name: x\n", {}, {"rows": 80}, "here"))
    record.reports.joined(WorkerLocation(worker="a", pid=1, node="n", address="127.0.0.1"))
    record.regroup(0.0, ["a"], -1, 0)
    found = [Evaluated(step=number, metrics={"loss": float(number)}) for number in range(2)]
    record.report("a", [replace(step(0), metrics={"share": 0.5}), found[0], step(1), found[1]])
    result = record.finish("x", "finished", None, Export(step=0, show=None, state_sha256="ab"), 0.0)
    record.journal.close()
    assert Result.load(run) == result
    steps = [event for event in read_events(run) if event["kind"] == "step_committed"]
    assert [event.get("metrics") for event in steps] == [{"share": 0.5}, None]
    assert result.path == (run.path or run.address)
    assert (result.metrics, result.model_step, result.model_metrics) == (
        {"loss": 1.0, "train_loss": 1.0},
        0,
        {"loss": 0.0},
    )
    kinds = [event["kind"] for event in read_events(run)]
    steps_and_evaluations = ["step_committed", "evaluated"] * 2
    assert kinds == ["run_started", "controller_started", "waiting", *steps_and_evaluations, "run_finished"]
    assert set(run.files()) >= {"job.yaml", "dataset.json", "result.json", "claims/00000001.json"}
    assert "lease.json" not in run.files()
    assert len(run.files("ledger")) == 1


def test_a_resumed_run_reports_its_own_figures_and_those_of_the_whole(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path)
    past = Past(generation=0, committed=4, metrics={1: {"accuracy": 0.5}}, recoveries=2, stall_s=3.0)
    record = RunRecord(run, batch_size=8, rows=80, end=None, past=past)
    listeners = FakeListeners()
    record.open(Fence(run, 0), Beginning("name: x\n", {}, {}, "here"), listeners)
    record.reports.joined(WorkerLocation(worker="a", pid=1, node="n", address="127.0.0.1"))
    record.go_back(1, 0, None, made=4, evaluated=1)
    record.regroup(0.0, ["a"], 1, 0)
    record.report("a", [step(2), step(3)])
    listeners.texts = ["mlflow is slow"]
    result = record.finish("x", "stopped", None, None, 0.0)
    record.journal.close()
    assert (result.steps, result.trained_steps, result.trained_samples) == (4, 2, 16)
    assert (result.recoveries, result.stall_s) == (2, 3.0)
    assert listeners.told[:2] == [("begin", 0, {1: {"accuracy": 0.5}}), ("finish", "stopped")]
    # What they say at the end is before the run's last event.
    assert [event.get("text") for event in read_events(run)][-2:] == ["mlflow is slow", None]


def test_a_run_without_an_end_of_its_own_has_failed_for_its_listeners(tmp_path: Path) -> None:
    listeners = FakeListeners()
    record = record_of(LocalFolder(tmp_path))
    record.open(Fence(LocalFolder(tmp_path), 0), Beginning("name: x\n", {}, {}, "here"), listeners)
    record.journal.close()
    assert listeners.told[1:] == [("finish", "failed")]


class Ending(LocalFolder):
    """Records what exists when the result is written, and what was made durable."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fails = False
        self.durable: list[int] = []
        self.there: list[tuple[str, ...]] = []

    def write(self, name: str, data: Iterable[Buffer]) -> None:
        if name == RESULT:
            assert self.durable[-1] == self.files()["events.ndjson"].bytes
            self.there.append(tuple(event["kind"] for event in read_events(self)))
            assert self.files("ledger")
            if self.fails:
                raise OSError("killed")
        super().write(name, data)


def test_the_result_is_written_when_nothing_else_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_writes, "LAST_PAUSES_S", ())
    run = Ending(tmp_path / "run")
    sync = EventLog.sync
    monkeypatch.setattr(
        EventLog, "sync", lambda log: (sync(log), run.durable.append(run.files()["events.ndjson"].bytes))[0]
    )
    record = record_of(run)
    record.open(Fence(run, 0), Beginning("name: x\n", {}, {"rows": 80}, "here"))
    record.reports.joined(WorkerLocation(worker="a", pid=1, node="n", address="127.0.0.1"))
    record.regroup(0.0, ["a"], -1, 0)
    record.report("a", [step(0)])
    run.fails = True
    export = Export(step=0, show=None, state_sha256="ab")
    with pytest.raises(RunError, match="the result cannot be written"):
        record.finish("x", "finished", None, export, 0.0)
    assert Result.load(run) is None
    run.fails = False
    record.finish("x", "failed", "no", export, 0.0)
    record.journal.close()
    assert run.there[0] == ("run_started", "controller_started", "step_committed", "run_finished")
    assert [event["status"] for event in read_events(run) if event["kind"] == "run_finished"] == ["finished", "failed"]


def test_a_resumption_is_durable_before_anything_is_entered_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill in between, the audit found every later step entered twice."""
    durable: list[str] = []
    sync = EventLog.sync

    class Watched(LocalFolder):
        def write(self, name: str, data: Iterable[Buffer]) -> None:
            if name.startswith("ledger/"):
                assert durable[-1] == "resumed"
            super().write(name, data)

    def synced(log: EventLog) -> None:
        sync(log)
        durable.append([event["kind"] for event in read_events(run)][-1])

    run = Watched(tmp_path / "run")
    record = record_of(run)
    record.open(Fence(run, 0), Beginning("name: x\n", {}, {"rows": 80}, "here"))
    monkeypatch.setattr(Aside, "later", lambda self, act, failing: None)
    monkeypatch.setattr(EventLog, "sync", synced)
    record.reports.joined(WorkerLocation(worker="a", pid=1, node="n", address="127.0.0.1"))
    record.go_back(-1, 1, None, 3, -2)
    assert record.journal._outlets._parts is not None
    record.journal._outlets._parts.add(1, 0, NOTES)
    record.journal._outlets._parts.flush()
    assert len(run.files("ledger")) == 1
    record.journal.close()


def test_an_overtaken_controller_enters_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_files, "PERIOD_S", 0.01)
    run = LocalFolder(tmp_path / "run")
    record = record_of(run)
    record.open(Fence(run, 0), Beginning("name: x\n", {}, {}, "here"))
    Fence(run, claims_of(run))
    record.reports.joined(WorkerLocation(worker="a", pid=1, node="n", address="127.0.0.1"))
    record.regroup(0.0, ["a"], -1, 0)

    def enter() -> None:
        deadline = time.monotonic() + 10
        for number in itertools.count():
            assert time.monotonic() < deadline
            record.report("a", [step(number)])
            record.journal.renew()
            time.sleep(0.01)

    with pytest.raises(RunError, match="another controller has taken this run over"):
        enter()
    with pytest.raises(RunError, match="another controller has taken this run over"):
        record.journal.settle()
    record.journal.close()
    assert not run.files("ledger")


def test_a_controller_overtaken_while_closing_enters_nothing_and_closes(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path / "run")
    record = record_of(run)
    record.open(Fence(run, 0), Beginning("name: x\n", {}, {}, "here"))
    assert record.journal._outlets._parts is not None
    record.journal._outlets._parts.add(0, 0, NOTES)
    Fence(run, claims_of(run))
    before = run.read("lease.json")
    record.journal.close()
    assert not run.files("ledger")
    # By now it belongs to the other controller.
    assert run.read("lease.json") == before


class Standing(LocalFolder):
    """Blocks while it is told to, and fails afterwards."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.free = threading.Event()
        self.free.set()
        self.fails = False

    def write(self, name: str, data: Iterable[Buffer]) -> None:
        self.free.wait(1000)
        if self.fails:
            raise OSError("no answer")
        super().write(name, data)


def test_no_storage_delays_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_writes, "LAST_PAUSES_S", (0.01,))
    monkeypatch.setattr(Lease, "due", True)
    run = Standing(tmp_path / "run")
    record = record_of(run)
    record.open(Fence(run, 0), Beginning("name: x\n", {}, {}, "here"))
    record.reports.joined(WorkerLocation(worker="a", pid=1, node="n", address="127.0.0.1"))
    run.free.clear()
    run.fails = True
    for number in range(100):
        record.journal.renew()
        record.go_back(-1, number, None, -1, -2)
        record.regroup(0.0, ["a"], -1, number)
        record.report("a", [step(0)])
    # None of these waited for the storage.
    assert not run.free.is_set()
    run.free.set()
    with pytest.raises(OSError, match="no answer"):
        record.journal.settle()
    with pytest.raises(RunError, match="the result cannot be written"):
        record.finish("x", "finished", None, None, 0.0)
    run.fails = False
    result = record.finish("x", "finished", None, None, 0.0)
    record.journal.close()
    assert Result.load(run) == result


def renew_for(record: RunRecord, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        record.journal.renew()
        time.sleep(0.01)


def test_an_overtaken_controller_writes_nothing_more(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    record = record_of(run)
    record.open(Fence(run, 0), Beginning("name: x\n", {}, {}, "here"))
    record.journal.settle()
    before = {name: run.read(name) for name in run.files()}
    Fence(run, claims_of(run))
    monkeypatch.setattr(Lease, "due", True)
    with pytest.raises(RunError, match="another controller has taken this run over"):
        renew_for(record, 10)
    record.will_leave("node", None)
    with pytest.raises(RunError, match="another controller has taken this run over"):
        record.finish("x", "finished", None, None, 0.0)
    record.journal.close()
    del before["lease.json"]
    assert {name: run.read(name) for name in before} == before
    assert set(run.files()) == {*before, "lease.json", "claims/00000002.json"}


def test_steps_recomputed_from_copies_are_reported_once(run: Folder) -> None:
    record = record_of(run)
    record.open(Fence(run, 0), Beginning("name: x\n", {}, {"rows": 80}, "here"))
    for name in ("a", "b"):
        record.reports.joined(WorkerLocation(worker=name, pid=1, node="n", address="127.0.0.1"))
    record.regroup(0.0, ["a"], -1, 0)
    record.report("a", [step(0), step(1), step(2)])
    record.copied([Sent(worker="a", buddy="b", generation=0, step=0, bytes=8, stall_s=0.25)])
    record.broken(2.5, "a was lost")
    record.regroup(3.0, ["b"], 0, 1)
    assert record.committed == 2
    record.report("b", [step(1), step(2), step(3)])
    result = record.finish("x", "finished", None, None, 0.0)
    record.journal.close()
    events = read_events(run)
    assert [event["step"] for event in events if event["kind"] == "step_committed"] == [0, 1, 2, 3]
    assert not [event for event in events if event["kind"] == "resumed"]
    assert (result.steps, result.samples) == (4, 32)
    assert (result.copies, result.copy_s) == (1, 0.25)
    [part] = run.files("ledger")
    table = pq.read_table(pa.BufferReader(run.read(part)))
    assert sorted(set(table["step"].to_pylist())) == [0, 1, 2, 3]
    assert len(table) == 4 * 4


def test_a_moved_folder_is_reported_with_its_new_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = LocalFolder(tmp_path / "run")
    held = Claimed(run)
    record = record_of(held)
    fence = Fence(held, 0)
    held.hold(fence.claim)
    record.open(fence, Beginning("name: x\n", {}, {}, "here"))
    record.saved(7, 0.1, 0.0, "000000000007-00000000")
    (tmp_path / "run").rename(tmp_path / "its new place")
    monkeypatch.setattr(Lease, "due", True)
    with pytest.raises(RunError, match=r"moved to .*its new place: the run stops") as told:
        renew_for(record, 10)
    assert "the checkpoint after step 8" in str(told.value)
    assert f"raytrain resume '{tmp_path / 'its new place'}'" in str(told.value)
    with pytest.raises(RunError, match="its new place"):
        record.finish("x", "failed", "no", None, 0.0)
    record.journal.close()
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "its new place" / RESULT).exists()


def test_a_removed_folder_is_reported_without_a_place(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Claimed(run)
    record = record_of(held)
    fence = Fence(held, 0)
    held.hold(fence.claim)
    record.open(fence, Beginning("name: x\n", {}, {}, "here"))
    for name in run.files():
        run.remove(name)
    monkeypatch.setattr(Lease, "due", True)
    with pytest.raises(RunError, match=r"was moved or removed: the run stops .* It held no checkpoint"):
        renew_for(record, 10)
    record.journal.close()
    assert not run.files()


class Filling(LocalFolder):
    """Accepts nothing while it is full."""

    full = False

    def write(self, name: str, data: Iterable[Buffer]) -> None:
        if self.full:
            raise StorageError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        super().write(name, data)


def test_a_full_disk_at_the_end_is_waited_for_once_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(last_writes, "LAST_PAUSES_S", (0.01, 0.01))
    run = Filling(tmp_path / "run")
    record = record_of(run)
    record.open(Fence(run, 0), Beginning("name: x\n", {}, {"rows": 80}, "here"))
    record.reports.joined(WorkerLocation(worker="a", pid=1, node="n", address="127.0.0.1"))
    record.regroup(0.0, ["a"], -1, 0)
    record.report("a", [step(0)])
    run.full = True
    with pytest.raises(RunError) as told:
        record.finish("x", "finished", None, None, 0.0)
    assert "the result cannot be written: " in str(told.value)
    assert "No space left on device (" in str(told.value)
    assert " (retried for 0 s). In " in str(told.value)
    assert f"When the storage works again: raytrain resume {tmp_path / 'run'}" in str(told.value)
    assert "no checkpoint is kept. " in str(told.value)
    # A second end does not wait again, and nothing is reported twice.
    monkeypatch.setattr(last_writes, "LAST_PAUSES_S", (60.0,))
    with pytest.raises(RunError, match="cannot be written"):
        record.finish("x", "failed", str(told.value), None, 0.0)
    record.journal.close()
    assert [event["kind"] for event in record.journal.follow(0, 0)].count("storage_failed") == 1
    assert not caplog.records


def test_work_for_a_folder_that_never_answers_is_not_waited_for_without_a_limit(
    run: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(aside, "CLOSE_S", 0.05)
    ends = threading.Event()
    one = Aside(run, SimpleNamespace(lost=None), Outages())  # type: ignore[arg-type]
    one.later(lambda: ends.wait(10) and None, "cannot be written")
    one.close()
    assert "the storage has not answered within 0.05 s, so 1 pieces of work are left" in caplog.text
    ends.set()
