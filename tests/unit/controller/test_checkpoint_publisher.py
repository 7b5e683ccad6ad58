"""A checkpoint is made of existing shares, after ledger and events; a failing storage is retried."""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus.controller.checkpoints.checkpoint_publisher import Published, Publisher
from raytrain_plus.errors import RunError
from raytrain_plus.job.settings import KeepBest
from raytrain_plus.state.stored.checkpoint import survey
from raytrain_plus.state.stored.manifest import FOLDER, name_of
from raytrain_plus.storage import retry
from raytrain_plus.storage.folders.local import Disk, LocalFolder
from tests.support.states import described, shares, state

Make = Callable[..., Publisher]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "PAUSES_S", (0.001, 0.001))


@pytest.fixture
def told() -> queue.SimpleQueue[Published]:
    return queue.SimpleQueue()


@pytest.fixture
def make(tmp_path: Path, told: queue.SimpleQueue[Published]) -> Iterator[Make]:
    made: list[Publisher] = []

    def build(settle: Callable[[], None] = lambda: None, best: KeepBest | None = None, **changes: Any) -> Publisher:
        run = changes.get("run", LocalFolder(tmp_path))
        ours = changes.get("ours", lambda: None)
        made.append(Publisher(run, changes.get("found", ()), 2, best, settle, told.put, ours))
        return made[-1]

    yield build
    for one in made:
        one.close()


def publish(publisher: Publisher, tmp_path: Path, told: queue.SimpleQueue[Published], step: int) -> Published:
    run = LocalFolder(tmp_path)
    publisher.publish(described(step, 0, shares(run, state(step), name_of(step, 0), 2)))
    return told.get(timeout=10)


def steps(folder: Path) -> list[int]:
    return [found.step for found in survey(LocalFolder(folder)) if found.manifest is not None]


def test_the_newest_and_the_best_are_kept(tmp_path: Path, make: Make, told: queue.SimpleQueue[Published]) -> None:
    publisher = make(best=KeepBest(metric="loss"))
    for step in range(5):
        assert publish(publisher, tmp_path, told, step).error == ""
    assert steps(tmp_path) == [4, 3, 0]
    assert [one.step for one in publisher.complete] == [4, 3, 0]
    assert len(list((tmp_path / FOLDER).iterdir())) == 6


def test_ledger_and_events_come_first(tmp_path: Path, make: Make, told: queue.SimpleQueue[Published]) -> None:
    seen: list[list[int]] = []
    publisher = make(settle=lambda: seen.append(steps(tmp_path)))
    publish(publisher, tmp_path, told, 1)
    publish(publisher, tmp_path, told, 2)
    # And once more before old ones are removed: the run may belong to another controller by then.
    assert seen == [[], [1], [1], [2, 1]]


def test_a_storage_that_comes_back_is_retried(tmp_path: Path, make: Make, told: queue.SimpleQueue[Published]) -> None:
    failures = iter([True, True, False])

    def settle() -> None:
        if next(failures, False):
            raise OSError("the storage is away")

    assert publish(make(settle=settle), tmp_path, told, 1).error == ""
    assert steps(tmp_path) == [1]


def test_a_failing_storage_costs_the_checkpoint_and_not_the_previous_one(
    tmp_path: Path, make: Make, told: queue.SimpleQueue[Published]
) -> None:
    failing = False

    def settle() -> None:
        if failing:
            raise OSError("the storage is away")

    publisher = make(settle=settle)
    publish(publisher, tmp_path, told, 1)
    failing = True
    assert publish(publisher, tmp_path, told, 2).error == "the storage is away (tried 3 times)"
    assert (steps(tmp_path), [one.step for one in publisher.complete]) == ([1], [1])
    failing = False
    assert publish(publisher, tmp_path, told, 3).error == ""
    assert steps(tmp_path) == [3, 1]


def folders(folder: Path) -> list[str]:
    """Return the checkpoints of which anything is on the disk."""
    return sorted(path.name for path in (folder / FOLDER).iterdir() if path.is_dir())


def test_the_shares_of_a_failed_checkpoint_are_not_left_on_a_full_disk(
    tmp_path: Path, make: Make, told: queue.SimpleQueue[Published]
) -> None:
    full = False

    def settle() -> None:
        if full:
            raise OSError("the disk is full")

    publisher = make(settle=settle)
    publish(publisher, tmp_path, told, 1)
    full = True
    assert "the disk is full" in publish(publisher, tmp_path, told, 2).error
    assert folders(tmp_path) == [name_of(1, 0)]


def test_only_the_shares_of_an_abandoned_checkpoint_are_removed(
    tmp_path: Path, make: Make, told: queue.SimpleQueue[Published]
) -> None:
    go = threading.Event()

    def settle() -> None:
        assert go.wait(10)

    publisher, run = make(settle=settle), LocalFolder(tmp_path)
    written = {step: shares(run, state(step), name_of(step, 0), 2) for step in (1, 2, 3)}
    publisher.publish(described(1, 0, written[1]))
    for step in (1, 3):
        publisher.discard(name_of(step, 0))
    publisher.publish(described(2, 0, written[2]))
    go.set()
    assert [told.get(timeout=10).error for _ in range(2)] == ["", ""]
    assert folders(tmp_path) == [name_of(1, 0), name_of(2, 0)]
    assert steps(tmp_path) == [2, 1]


def test_a_damaged_checkpoint_stays_for_repair(tmp_path: Path, make: Make, told: queue.SimpleQueue[Published]) -> None:
    before = make()
    for step in (1, 2):
        publish(before, tmp_path, told, step)
    # One was reported by its reader; the other was found damaged at the start.
    found = [replace(one, damaged=one.step == 1) for one in survey(LocalFolder(tmp_path))]
    publisher = make(found=[replace(one, manifest=None) if one.damaged else one for one in found])
    publisher.drop(before.complete[0])
    assert publisher.complete == ()
    for step in (3, 4, 5):
        publish(publisher, tmp_path, told, step)
    assert steps(tmp_path) == [5, 4, 2, 1]
    assert [one.step for one in publisher.complete] == [5, 4]


def test_an_overtaken_controller_removes_nothing(
    tmp_path: Path, make: Make, told: queue.SimpleQueue[Published]
) -> None:
    def overtaken() -> None:
        raise RunError("another controller has taken this run over")

    publisher = make(settle=overtaken, ours=overtaken)
    assert "taken this run over" in publish(publisher, tmp_path, told, 1).error
    publisher.discard(name_of(1, 0))
    publisher.publish(described(2, 0, []))
    told.get(timeout=10)
    assert folders(tmp_path) == [name_of(1, 0)]


def test_a_manifest_that_cannot_be_created_is_reported_and_the_previous_stays(
    tmp_path: Path, make: Make, told: queue.SimpleQueue[Published]
) -> None:
    class Full(Disk):
        full = False

        def link(self, path: Path, to: Path) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().link(path, to)

    disk = Full()
    publisher = make(run=LocalFolder(tmp_path, disk))
    assert publish(publisher, tmp_path, told, 1).error == ""
    disk.full = True
    error = f"No space left on device: '{tmp_path}/{FOLDER}/{name_of(2, 0)}.json' (tried 3 times)"
    assert error in publish(publisher, tmp_path, told, 2).error
    assert (steps(tmp_path), [one.step for one in publisher.complete]) == ([1], [1])
    assert folders(tmp_path) == [name_of(1, 0)]
    disk.full = False
    assert publish(publisher, tmp_path, told, 3).error == ""
    assert steps(tmp_path) == [3, 1]


def test_a_manifest_whose_creation_failed_only_in_its_answer_is_left_alone(
    tmp_path: Path, make: Make, told: queue.SimpleQueue[Published]
) -> None:
    class Deaf(LocalFolder):
        def create(self, name: str, data: bytes) -> bool:
            super().create(name, data)
            raise OSError("no answer")

        def read(self, name: str) -> bytes:
            raise OSError("no answer")

    assert "no answer" in publish(make(run=Deaf(tmp_path)), tmp_path, told, 1).error
    assert steps(tmp_path) == [1]


def test_shares_written_elsewhere_make_no_checkpoint(
    tmp_path: Path, make: Make, told: queue.SimpleQueue[Published]
) -> None:
    publisher = make()
    written = shares(LocalFolder(tmp_path / "elsewhere"), state(1), name_of(1, 0), 2)
    publisher.publish(described(1, 0, written))
    assert "is not shared by their machines" in told.get(timeout=10).error
    assert steps(tmp_path) == []


def test_two_checkpoints_of_one_name_are_not_both_made(
    tmp_path: Path, make: Make, told: queue.SimpleQueue[Published]
) -> None:
    first, second = make(), make()
    publish(first, tmp_path, told, 1)
    second.publish(replace(first.complete[0], time=2.5))
    assert "another controller has written this checkpoint" in told.get(timeout=10).error


def test_a_checkpoint_made_void_by_a_resumption_is_not_published(
    tmp_path: Path, make: Make, told: queue.SimpleQueue[Published]
) -> None:
    publisher = make()
    publish(publisher, tmp_path, told, 1)
    publisher.forget([(1, 1)])
    assert "resumed from an earlier step" in publish(publisher, tmp_path, told, 2).error
    assert (steps(tmp_path), [one.step for one in publisher.complete]) == ([1], [1])


class Standing(LocalFolder):
    """Creates a file when it is told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked, self.go = threading.Event(), threading.Event()

    def create(self, name: str, data: bytes) -> bool:
        self.asked.set()
        assert self.go.wait(10)
        return super().create(name, data)


def test_a_resumption_does_not_wait_for_a_stalled_storage(
    tmp_path: Path, make: Make, told: queue.SimpleQueue[Published]
) -> None:
    run = Standing(tmp_path)
    publisher = make(run=run)
    publisher.publish(described(2, 0, shares(run, state(2), name_of(2, 0), 2)))
    assert run.asked.wait(10)
    publisher.forget([(1, 1)])
    publisher.discard(name_of(2, 0))
    run.go.set()
    assert "resumed from an earlier step" in told.get(timeout=10).error
    assert publisher.complete == ()
    assert [found.why[:4] for found in survey(run, [(1, 1)])] == ["void"]
    assert publish(publisher, tmp_path, told, 1).error == ""


def test_checkpoints_made_void_by_a_resumption_are_dropped(
    tmp_path: Path, make: Make, told: queue.SimpleQueue[Published]
) -> None:
    publisher = make()
    for step in (1, 2):
        publish(publisher, tmp_path, told, step)
    publisher.forget([(3, 1)])
    assert [one.step for one in publisher.complete] == [1]
    later = replace(described(2, 4, []), files=(), tensors={})
    publisher.publish(later)
    assert told.get(timeout=10).error == ""
    assert [one.name for one in publisher.complete] == [name_of(2, 4), name_of(1, 0)]
