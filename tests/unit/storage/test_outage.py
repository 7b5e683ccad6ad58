"""A failing storage is reported once, whichever and however many writers fail."""

from __future__ import annotations

import doctest
import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus.storage import outage as module
from raytrain_plus.storage.folders.appended import Appended
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import SETTLE_S, Outage, Outages, mount_of, outage_of
from tests.unit.storage.store import KINDS


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def full(place: str = "/mnt", code: int = errno.ENOSPC, wanted: int = 10) -> Outage:
    return Outage(place=place, code=code, reason=os.strerror(code), wanted=wanted, free=0)


def kinds(outages: Outages, last: bool = False) -> list[tuple[str, str]]:
    return [(kind, fields["place"]) for kind, fields in outages.news(last)]


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(module).failed == 0


def test_many_writers_with_one_cause_give_two_events() -> None:
    clock = Clock()
    outages = Outages(clock)
    for _ in range(500):
        for writer in ("events", "ledger", "checkpoints"):
            outages.failed(writer, full())
    assert outages.news() == [
        ("storage_failed", {"place": "/mnt", "error": "No space left on device", "wanted": 10, "free": 0})
    ]
    outages.worked("events")
    outages.worked("ledger")
    clock.now += 60
    assert kinds(outages) == [], "one has not written yet"
    assert outages.knows(full())
    assert not outages.knows(replace(full(), code=5))
    outages.worked("checkpoints")
    clock.now += SETTLE_S
    [(kind, fields)] = outages.news()
    assert (kind, fields["seconds"]) == ("storage_recovered", 60)
    assert not outages.knows(full())


def test_all_writers_of_a_bucket_meet_one_outage(bucket: Folder) -> None:
    run = bucket.inside("runs").inside("x")
    found = [outage_of(OSError("no answer"), folder) for folder in (run, run.inside("tensorboard"))]
    assert found[0] == found[1]
    assert found[0].place == "s3://contract"


def test_a_nearly_full_disk_is_reported_once() -> None:
    clock = Clock()
    outages = Outages(clock)
    told = []
    for _ in range(100):
        outages.failed("events", full())
        clock.now += 1
        outages.worked("events")
        clock.now += 1
        told += kinds(outages)
    assert told == [("storage_failed", "/mnt")]
    # The final call reports what later calls would have.
    assert kinds(outages, last=True) == [("storage_recovered", "/mnt")]


def test_other_disks_and_other_errors_are_other_causes() -> None:
    outages = Outages()
    outages.failed("events", full())
    outages.failed("events", full(place="/share"))
    outages.failed("events", full(code=errno.EROFS))
    assert [place for _, place in kinds(outages)] == ["/mnt", "/share", "/mnt"]


def test_what_is_known_of_a_file_system(tmp_path: Path) -> None:
    assert os.path.ismount(mount_of(tmp_path / "not" / "there"))
    found = outage_of(OSError(errno.ENOSPC, "full"), LocalFolder(tmp_path), 7)
    assert (found.place, found.wanted) == (str(mount_of(tmp_path)), 7)
    assert found.free is not None
    assert found.free > 0
    # Free space explains nothing if the error has another cause.
    assert outage_of(PermissionError(errno.EACCES, "no"), LocalFolder(tmp_path)).free is None
    assert outage_of(OSError("said the store"), LocalFolder(tmp_path)).reason == "said the store"


def test_a_writer_reports_how_its_writing_ends(tmp_path: Path) -> None:
    outages = Outages()
    run = LocalFolder(tmp_path)
    with pytest.raises(OSError, match="full"), outages.watching("ledger", run, lambda: 9):
        raise OSError(errno.ENOSPC, "full")
    [(kind, fields)] = outages.news()
    assert (kind, fields["wanted"]) == ("storage_failed", 9)
    with outages.watching("ledger", run, lambda: 9):
        pass
    assert [kind for kind, _ in outages.news(last=True)] == ["storage_recovered"]


@pytest.fixture
def growing(tmp_path: Path) -> Any:
    made = Appended(LocalFolder(tmp_path), tmp_path / "file", "events", Outages())
    yield made
    made.abandon()
    made.close()


def test_a_file_that_grows_follows_its_folder(tmp_path: Path, growing: Appended) -> None:
    growing.append(b"a")
    (tmp_path / "file").rename(tmp_path / "other")
    growing.append(b"b")
    assert (growing.place(), (tmp_path / "other").read_bytes()) == (tmp_path / "other", b"ab")
    (tmp_path / "other").unlink()
    assert growing.place() is None


@pytest.mark.parametrize("run", ["local", *KINDS], indirect=True)
def test_an_outage_names_the_bucket_or_mount_point(run: Folder) -> None:
    store = outage_of(OSError("said the store"), run)
    assert run.where.startswith(store.place) if run.path is None else store.place == str(mount_of(run.path))
    assert not store.place.endswith("/run")
