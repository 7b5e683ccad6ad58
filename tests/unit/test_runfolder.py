"""Whether a job may use a run's folder."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from raytrain_plus import runfolder
from raytrain_plus.errors import InputError
from raytrain_plus.job import Data, Job
from raytrain_plus.result import Result
from raytrain_plus.runfolder import (
    LEASE_S,
    Fence,
    Lease,
    check_writable,
    claim,
    claims_of,
    earlier_result,
    lease_holder,
)
from raytrain_plus.storage.local import LocalFolder

JOB = Job(name="run", task="a:B", data=Data(path="d", batch_size=8), steps=3)


def left_by(folder: Path, status: str, job: Job = JOB) -> Result:
    folder.mkdir()
    (folder / "job.yaml").write_text(job.to_yaml())
    result = Result(name="run", status=status, exit_code=0, path=folder, steps=3, samples=24, metrics={"loss": 0.5})
    result.save()
    return result


def test_a_name_that_is_free_may_be_used(tmp_path: Path) -> None:
    assert earlier_result(tmp_path / "run", JOB, fresh=False) is None


def test_the_same_job_that_finished_gives_its_result_again(tmp_path: Path) -> None:
    result = left_by(tmp_path / "run", "finished")
    assert earlier_result(tmp_path / "run", JOB, fresh=False) == result
    # What the result does not depend on may differ.
    elsewhere = replace(JOB, workers=replace(JOB.workers, min=2), elastic=replace(JOB.elastic, wait_s=1))
    assert earlier_result(tmp_path / "run", elsewhere, fresh=False) == result


@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_one_that_did_not_finish_goes_on(tmp_path: Path, status: str) -> None:
    left_by(tmp_path / "run", status)
    assert earlier_result(tmp_path / "run", JOB, fresh=False) is None


def test_a_finished_run_goes_on_to_more_steps_where_that_was_asked_for(tmp_path: Path) -> None:
    left_by(tmp_path / "run", "finished")
    longer = replace(JOB, steps=9, args={"width": 3})
    with pytest.raises(InputError, match="they differ in args, steps"):
        earlier_result(tmp_path / "run", longer, fresh=False)
    assert earlier_result(tmp_path / "run", longer, fresh=False, may_change=("args", "steps")) is None


def test_a_folder_that_is_no_run_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(InputError, match=r"no run's: it has no job\.yaml"):
        earlier_result(tmp_path / "run", JOB, fresh=False)


def test_the_newest_controller_alone_may_write(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path / "run")
    first = Fence(run, 0)
    assert first.overtaken() is None
    with pytest.raises(InputError, match="has begun in the meantime"):
        Fence(run, 0)
    second = Fence(run, claims_of(run))
    assert second.overtaken() is None
    assert str(os.getpid()) in (first.overtaken() or "")
    # Moved aside, and another one's in its place.
    run.move("aside")
    assert second.overtaken() == "its folder was moved away"
    third = Fence(run, 0)
    assert second.overtaken() is not None
    assert third.overtaken() is None


def test_of_controllers_that_begin_at_once_one_gets_the_run(tmp_path: Path) -> None:
    got: list[Fence] = []
    late: list[InputError] = []
    ready = threading.Barrier(8)

    def begin() -> None:
        ready.wait()
        try:
            got.append(Fence(LocalFolder(tmp_path / "run"), 0))
        except InputError as error:
            late.append(error)

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(late)) == (1, 7)
    assert got[0].overtaken() is None


def test_another_job_is_in_the_way_and_its_differences_are_named(tmp_path: Path) -> None:
    left_by(tmp_path / "run", "finished")
    other = replace(JOB, seed=1, data=replace(JOB.data, batch_size=16))
    with pytest.raises(InputError, match=r"they differ in seed, data\.batch_size"):
        earlier_result(tmp_path / "run", other, fresh=False)


def test_fresh_moves_aside_and_overwrites_nothing(tmp_path: Path) -> None:
    for _ in range(3):
        left_by(tmp_path / "run", "failed")
        assert earlier_result(tmp_path / "run", JOB, fresh=True) is None
        assert (tmp_path / "run").exists()
        claim(tmp_path / "run", fresh=True, claims=None)
        shutil.rmtree(tmp_path / "run")
    claim(tmp_path / "run", fresh=False, claims=None)
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["claims"]
    assert len(list(tmp_path.iterdir())) == 4


def test_a_living_run_is_in_the_way_even_of_a_fresh_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_by(tmp_path / "run", "failed")
    monkeypatch.setattr(runfolder, "LEASE_S", 0.5)
    over = threading.Event()

    def renew() -> None:
        while not over.wait(0.02):
            Lease(tmp_path / "run").renew()

    holder = threading.Thread(target=renew)
    Lease(tmp_path / "run").renew()
    holder.start()
    with pytest.raises(InputError, match=r"is going on \(process \d+ on "):
        earlier_result(tmp_path / "run", JOB, fresh=True)
    over.set()
    holder.join()
    # Nobody renews it any more: it is waited for.
    assert lease_holder(tmp_path / "run") is not None
    assert earlier_result(tmp_path / "run", JOB, fresh=True) is None


def test_a_run_that_began_in_the_meantime_is_left_alone(tmp_path: Path) -> None:
    left_by(tmp_path / "run", "finished")
    with pytest.raises(InputError, match=r"has begun in the meantime \(and ended\)"):
        claim(tmp_path / "run", fresh=False, claims=None)
    Lease(tmp_path / "run").renew()
    with pytest.raises(InputError, match=r"has begun in the meantime \(process "):
        claim(tmp_path / "run", fresh=True, claims=None)
    assert (tmp_path / "run" / "result.json").exists()


def test_a_lease_that_nobody_renews_ends(tmp_path: Path) -> None:
    lease = {"time": time.time() - LEASE_S - 1, "pid": 1, "host": "h"}
    (tmp_path / "lease.json").write_text(json.dumps(lease))
    assert lease_holder(tmp_path) is None
    (tmp_path / "lease.json").write_text(json.dumps({**lease, "time": time.time()}))
    assert (lease_holder(tmp_path) or "").startswith("process 1 on h")
    (tmp_path / "lease.json").write_text("{torn")
    assert lease_holder(tmp_path) is None


def test_a_storage_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        check_writable(tmp_path / "file" / "below")
