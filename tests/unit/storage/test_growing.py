"""Records in parts: each is stored once and in order, even if the storage fails meanwhile."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from raytrain_plus.storage.folders import growing as module
from raytrain_plus.storage.folders.growing import Growing
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.interface import Buffer, Folder
from raytrain_plus.storage.outage import Outages


class Failing(LocalFolder):
    """A folder whose next `fails` calls fail; with `done`, a failed call has taken effect all the same."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fails = 0
        self.done = False
        self.calls: list[str] = []

    def write(self, name: str, data: Iterable[Buffer]) -> None:
        self._fail(name, lambda: super(Failing, self).write(name, data))

    def create(self, name: str, data: bytes) -> bool:
        # As on object stores: an existing file with the same bytes counts as created.
        return self._fail(name, lambda: super(Failing, self).create(name, data) or self.read(name) == data) or False

    def _fail(self, name: str, act: Callable[[], bool | None]) -> bool | None:
        self.calls.append(name)
        if self.fails:
            self.fails -= 1
            if self.done:
                act()
            raise OSError("no answer")
        return act()


def growing(folder: Folder, first: int = 1) -> Growing:
    numbers = itertools.count(first)
    return Growing(folder, lambda: f"part-{next(numbers)}", 60)


def parts(folder: Folder) -> dict[str, bytes]:
    return {name: folder.read(name) for name in sorted(folder.files())}


def test_records_are_stored_in_parts_and_never_split(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 6)
    grown = growing(run)
    for number in range(5):
        grown.append(f"rec{number}".encode())
        if number != 2:
            grown.sync()
    grown.close()
    assert parts(run) == {"part-1": b"rec0rec1", "part-2": b"rec2rec3", "part-3": b"rec4"}


def test_nothing_is_written_without_new_records(tmp_path: Path) -> None:
    folder = Failing(tmp_path)
    grown = growing(folder)
    grown.sync()
    grown.append(b"a")
    for _ in range(3):
        grown.sync()
    grown.append(b"b")
    grown.close()
    assert folder.calls == ["part-1", "part-1"]
    assert parts(folder) == {"part-1": b"ab"}


def test_it_is_written_in_the_background(run: Folder) -> None:
    grown = Growing(run, lambda: "part", 0.01)
    grown.append(b"a")
    deadline = time.monotonic() + 10
    while not run.files():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    grown.close()
    assert parts(run) == {"part": b"a"}


def test_abandoned_records_are_never_written(run: Folder) -> None:
    grown = growing(run)
    grown.append(b"a")
    grown.abandon()
    grown.close()
    assert not run.files()


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("fails", [1, 2, 3])
def test_records_of_failed_writes_are_written_later_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int, done: bool
) -> None:
    monkeypatch.setattr(module, "PART_BYTES", 4)
    folder = Failing(tmp_path)
    folder.done = done
    grown = growing(folder)
    grown.append(b"ab")
    for number in range(6):
        # The answer to the first create can get lost, too.
        folder.fails = fails if number % 2 == 0 else 0
        try:
            grown.sync()
        except OSError:
            assert number % 2 == 0
        grown.append(f"{number}-".encode())
    folder.fails = 0
    grown.close()
    assert b"".join(parts(folder).values()) == b"ab0-1-2-3-4-5-"
    assert len(parts(folder)) == 4


def test_the_parts_of_another_are_never_touched(run: Folder) -> None:
    run.write("part-1", [b"theirs"])
    run.write("part-2", [b"theirs, too"])
    grown = growing(run)
    grown.append(b"mine")
    grown.close()
    assert parts(run) == {"part-1": b"theirs", "part-2": b"theirs, too", "part-3": b"mine"}


def test_a_failing_storage_is_retried_in_the_background(tmp_path: Path) -> None:
    folder = Failing(tmp_path)
    folder.fails = 3
    outages = Outages()
    grown = Growing(folder, lambda: "part", 0.01, writer="events", outages=outages)
    grown.append(b"a")
    deadline = time.monotonic() + 10
    while not folder.files():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    grown.close()
    assert parts(folder) == {"part": b"a"}
    assert [kind for kind, _ in outages.news(last=True)] == ["storage_failed", "storage_recovered"]
