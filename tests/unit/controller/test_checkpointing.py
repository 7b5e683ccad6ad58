"""The controller's part in checkpoints: when one is due, what became of it, and what the run can resume from."""

from __future__ import annotations

import queue
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_plus.controller.checkpoints.checkpoint_publisher import Published
from raytrain_plus.controller.checkpoints.checkpointing import GENERATIONS, Checkpoints, publisher_of
from raytrain_plus.controller.event_loop import EventLoop
from raytrain_plus.controller.roster.partitions import Partitions
from raytrain_plus.controller.roster.roster import Roster
from raytrain_plus.controller.run import Run
from raytrain_plus.job.settings import Checkpoint
from raytrain_plus.membership import events as e
from raytrain_plus.membership.group_state import Group, Limits, Phase, WorkerStatus
from raytrain_plus.membership.mesh import Seat, Shape, Stage
from raytrain_plus.membership.pieces import Piece, Pieces
from raytrain_plus.membership.sizes import SizeTable
from raytrain_plus.membership.view import Member
from raytrain_plus.parallel.sizing import size_table
from raytrain_plus.state.stored.checkpoint import survey
from raytrain_plus.state.stored.manifest import FOLDER, name_of
from raytrain_plus.storage.folders.claimed import Claimed
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.outage import Outages
from raytrain_plus.workers.messages import PreparedReport, WorkerLocation, Written
from tests.support.states import shares, state
from tests.unit.controller.fakes import FakeHost, FakeTime, FakeWorkers, job_of

MEMBERS = [
    Member(worker="a", place=Seat(0), shards=(0, 1)),
    Member(worker="b", place=Seat(1), shards=(2,)),
]
EVERY_S = 10.0


def group_of(*living: str) -> Group:
    """Return a training group of these workers."""
    limits = Limits(sizes=SizeTable(1, 2, 2), spares=0, steps=99, max_failures=None, expected=2)
    workers = {name: WorkerStatus("in", holds=5, stage=Stage()) for name in living}
    return Group(limits=limits, phase=Phase.TRAIN, generation=0, workers=workers)


class Machine:
    """A state machine that only records its events."""

    def __init__(self, told: list[Any]) -> None:
        self.group = group_of("a", "b")
        self._told = told

    def feed(self, event: e.Event) -> None:
        assert isinstance(event, e.Saved)
        self._told.append(("saved", event.step))


class Told(FakeWorkers):
    """Workers that record what they are told among the other reports."""

    def __init__(self, told: list[Any]) -> None:
        super().__init__()
        self._told = told

    def call(self, name: str, method: str, *arguments: Any) -> str:
        self._told.append((method, *arguments))
        return super().call(name, method, *arguments)


class Kept:
    """The checkpoints of a run in a folder, and what they reported."""

    def __init__(self, folder: Path) -> None:
        self.run = LocalFolder(folder)
        self.base = 5
        self.told: list[Any] = []
        self.inbox: queue.SimpleQueue[Published] = queue.SimpleQueue()
        self.time = FakeTime()
        journal = SimpleNamespace(settle=lambda: None, check_fence=lambda: None, outages=Outages())
        self.record = SimpleNamespace(
            journal=journal,
            reports=SimpleNamespace(on_our_clock=lambda worker, time: time + (worker == "a") * 100),
            committed=9,
            numbers=SimpleNamespace(begin=self.begin_number),
            saving=lambda step, written, total, per_s: None,
            samples=lambda step: 8 * (step + 1),
            metrics=lambda step: {"loss": 0.5, "bad": float("nan")},
            saved=lambda step, took_s, stall_s, name: self.told.append(("journal", step)),
            not_saved=lambda step, why: self.told.append((step, why)),
        )
        plan = SimpleNamespace(
            job=SimpleNamespace(name="run", seed=3, best=None, checkpoint=Checkpoint(every_s=EVERY_S, keep=2)),
            data=SimpleNamespace(fingerprint="f", rows=9),
        )
        order: Any = SimpleNamespace(plan=plan, past=None, task_sha256=None, job_yaml="seed: 3\n", versions={"v": "1"})
        record: Any = self.record
        run, machine = Claimed(self.run), Machine(self.told)
        publisher = publisher_of(run, order, record.journal, self.inbox.put)
        loop = EventLoop(Told(self.told), self.time.clock)
        loop.start("a")
        roster = Roster()
        roster.record_location(WorkerLocation(worker="a", pid=1, node="n", address="h"))
        roster.prepared("a", PreparedReport(parameters=1, state_bytes=1))
        partitions = Partitions(job_of(), roster, size_table(job_of()))
        self.machine = machine
        clock = self.time.clock
        shared = Run(order, run, loop, machine, record, partitions, roster, clock, FakeHost())
        self.it = Checkpoints(shared, publisher)

    def begin_number(self, generation: int) -> int:
        self.base += 1
        return self.base + generation

    def write(self, step: int, number: int, writers: int = 2, error: str = "") -> list[Written]:
        """Write the shares, and return each writer's report."""
        written = shares(self.run, state(step), name_of(step, number), writers)
        return [
            Written(
                step=step,
                generation=number,
                writer=writer,
                writers=writers,
                share=None if error else share,
                tree={"optimizer": {}, "groups": [], "scheduler": {}, "scales": {}, "persistent": []}
                if writer == 0
                else None,
                metrics={},
                time=time.time(),
                stall_s=0.01,
                error=error,
            )
            for writer, share in enumerate(written)
        ]

    def wrote(self, told: Written, living: Sequence[str]) -> None:
        """Hear of a worker's share when only these workers live."""
        self.machine.group = group_of(*living)
        self.it.wrote(told)

    def requested(self, generation: int) -> bool:
        """Return whether a checkpoint is requested when this generation trains."""
        self.machine.group = replace(group_of("a"), generation=generation)
        self.it.request_in_time(self.time.now)
        requested = ("save", generation) in self.told
        self.told[:] = [told for told in self.told if told != ("save", generation)]
        return requested

    def hold(self, name: str, step: int) -> None:
        """Let only this worker hold the state after that step, outside of any world."""
        workers = {name: WorkerStatus("idle", holds=step, stage=Stage())}
        self.machine.group = replace(group_of(), workers=workers)

    def hear(self) -> None:
        self.it.published(self.inbox.get(timeout=10))

    def files(self) -> list[str]:
        return sorted(path.name for path in (self.run.path / FOLDER).iterdir())


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path)
    yield kept
    kept.it.close()


def test_a_checkpoint_is_made_of_all_shares_and_counts_when_complete(kept: Kept) -> None:
    kept.it.formed(4, MEMBERS)
    first, second = kept.write(7, 4)
    kept.wrote(second, ["a", "b"])
    kept.it.make()
    assert (kept.it.busy, kept.it.publishing, kept.it.durable) == (True, False, -1)
    kept.wrote(first, ["a", "b"])
    kept.record.committed = 6
    kept.it.make()
    assert not kept.it.publishing, "its step is not committed yet"
    kept.record.committed = 7
    kept.it.make()
    assert (kept.it.busy, kept.it.publishing) == (True, True)
    kept.hear()
    assert kept.told == [("journal", 7), ("saved", 7), ("settled", 7, 4)]
    assert (kept.it.busy, kept.it.publishing, kept.it.durable) == (False, False, 7)
    [found] = survey(kept.run)
    assert found.manifest is not None
    assert kept.it.newest is not None
    assert found.manifest.name == kept.it.newest.name
    assert [member["worker"] for member in found.manifest.layout] == ["a", "b"]
    assert found.manifest.data == {"fingerprint": "f", "rows": 9, "samples": 64}
    assert found.manifest.metrics == {"loss": 0.5}, "no JSON reader takes NaN"
    assert found.manifest.time == pytest.approx(first.time + 100), "by the controller's clock, 100 s ahead of this one"
    assert (kept.it.has(7, "loss"), kept.it.has(7, "bad"), kept.it.has(6, "loss")) == (True, False, False)


def test_a_checkpoint_is_due_once_a_generation_after_a_long_time(kept: Kept) -> None:
    assert not kept.requested(0)
    kept.time.now += EVERY_S + 1
    assert kept.requested(0)
    assert not kept.requested(0), "it was said"
    assert kept.requested(1), "its recipient is gone"
    kept.it.formed(4, MEMBERS)
    first, second = kept.write(7, 4)
    kept.wrote(first, ["a", "b"])
    assert not kept.requested(2), "one is under way"
    kept.wrote(second, ["a"])
    kept.it.make()
    assert not kept.requested(2), "its manifest is being written"
    kept.hear()
    assert not kept.requested(2)
    kept.time.now += EVERY_S + 1
    assert kept.requested(2)


def test_an_incomplete_checkpoint_is_reported_and_its_late_shares_are_removed(kept: Kept) -> None:
    kept.it.formed(4, MEMBERS)
    first, second = kept.write(7, 4)
    kept.wrote(first, ["a", "b"])
    kept.it.lost(["a"])
    assert kept.told == [(7, "b was lost before it had written its share"), ("settled", 7, 4)]
    assert not kept.it.busy
    kept.told.clear()
    kept.wrote(second, ["a"])
    # It may have copied its share after it heard that the checkpoint was given up.
    assert kept.told == [("settled", 7, 4)]
    deadline = time.monotonic() + 10
    while kept.files():
        assert time.monotonic() < deadline, kept.files()
        time.sleep(0.01)
    assert kept.it.durable == -1


def test_a_checkpoint_that_the_storage_refuses_is_reported(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytrain_plus.storage.retry.PAUSES_S", (0.001,))
    kept.it.formed(4, MEMBERS)
    written = kept.write(7, 4)
    shutil.rmtree(kept.run.path / FOLDER)
    for told in written:
        kept.wrote(told, ["a", "b"])
    kept.it.make()
    kept.hear()
    [(step, why), last] = kept.told
    assert (step, last, kept.it.busy) == (7, ("settled", 7, 4), False)
    assert "is not shared by their machines" in why


def test_checkpoints_above_the_step_of_a_resumption_no_longer_count(kept: Kept) -> None:
    kept.it.formed(4, MEMBERS)
    for step in (3, 7):
        for told in kept.write(step, 4):
            kept.wrote(told, ["a", "b"])
        kept.it.make()
        kept.hear()
    kept.wrote(kept.write(8, 4)[0], ["a", "b"])
    kept.told.clear()
    kept.it.go_back(5, 4)
    assert (kept.it.durable, kept.it.busy) == (3, False)
    assert kept.told == [(8, "the run has resumed from an earlier step"), ("settled", 8, 4)]


def test_a_checkpoint_that_is_void_when_published_does_not_count(kept: Kept) -> None:
    kept.it.formed(4, MEMBERS)
    for told in kept.write(7, 4):
        kept.wrote(told, ["a", "b"])
    kept.it.make()
    kept.it.go_back(5, 4)
    kept.hear()
    assert kept.it.durable == -1
    [(step, why), last] = kept.told
    assert (step, last) == (7, ("settled", 7, 4))
    assert "resumed from an earlier" in why


def test_workers_that_have_left_their_world_write_the_last_checkpoint(kept: Kept) -> None:
    kept.it.formed(4, MEMBERS)
    kept.hold("a", 8)
    assert kept.it.keep(8)
    [told] = kept.write(8, 6, writers=1)
    kept.wrote(told, ["b"])
    kept.it.make()
    kept.hear()
    assert kept.it.durable == 8
    kept.hold("a", 9)
    assert kept.it.keep(9)
    kept.it.wait_no_longer("it was not written before the run ended")
    assert kept.told[-2:] == [(9, "it was not written before the run ended"), ("settled", 9, 7)]
    assert kept.it.newest is not None
    kept.it.drop(kept.it.newest)
    assert kept.it.newest is None


def test_a_share_of_an_unknown_generation_is_refused(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    kept.it.formed(4, MEMBERS)
    kept.wrote(kept.write(7, 3)[0], ["a", "b"])
    # Its writer would wait for the end of a checkpoint that nobody makes.
    assert (kept.it.busy, kept.told) == (False, [("settled", 7, 3)])
    assert "refused: a share of step 7 in generation 3" in caplog.text


def test_writers_of_long_past_generations_are_forgotten(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(4, 5 + GENERATIONS):
        kept.it.formed(number, MEMBERS)
    kept.wrote(kept.write(7, 4)[0], ["a", "b"])
    assert (kept.it.busy, kept.told) == (False, [("settled", 7, 4)])
    assert "refused: a share of step 7 in generation 4" in caplog.text
    kept.wrote(kept.write(7, 5)[0], ["a", "b"])
    assert kept.it.busy


LIMITS_IN_STAGES = replace(
    group_of().limits,
    sizes=SizeTable(1, 2, 2, (2, 1)),
    parts={
        Stage(): Pieces.of([Piece("front"), Piece("back")]),
        Stage(0, 2): Pieces.of([Piece("front")]),
        Stage(1, 2): Pieces.of([Piece("back")]),
    },
)


def test_nothing_is_kept_if_those_that_live_do_not_have_the_whole_state(kept: Kept) -> None:
    """The group may not have heard of a loss yet: a dead stage's worker counted as a holder."""
    stages = {
        "a": WorkerStatus("idle", holds=8, stage=Stage(0, 2)),
        "b": WorkerStatus("idle", holds=8, stage=Stage(1, 2)),
    }
    kept.machine.group = replace(group_of(), limits=LIMITS_IN_STAGES, shape=Shape(1, 2), workers=stages)
    assert not kept.it.keep(8), "the process of b is gone"
    assert not kept.it.busy
    assert kept.told == []


def test_shares_that_are_not_the_whole_state_make_no_checkpoint(kept: Kept) -> None:
    kept.machine.group = replace(group_of("a", "b"), limits=LIMITS_IN_STAGES)
    kept.it.formed(4, MEMBERS)
    kept.it.shares(4, [Stage(0, 2)], {})
    for told in kept.write(7, 4):
        kept.it.wrote(told)
    kept.it.make()
    assert not kept.it.busy
    assert [told for told in kept.told if told[0] == 7] == [
        (7, "its writers lack a part of the state (back); please report this")
    ]
