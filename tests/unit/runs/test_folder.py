"""A run's folder: whether a job may use it, its claims and its lease."""

from __future__ import annotations

import doctest
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from raytrain_plus.errors import InputError
from raytrain_plus.job.data_settings import Data
from raytrain_plus.job.settings import Job
from raytrain_plus.result import Result
from raytrain_plus.runs import folder
from raytrain_plus.runs.folder import (
    LEASE_S,
    Fence,
    Lease,
    check_writable,
    claim,
    claims_of,
    earlier_result,
    find_run,
    job_of,
    lease_holder,
    lost_holder,
)
from raytrain_plus.runs.history import Past, load_history
from raytrain_plus.runs.process import this_process
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.interface import Folder

JOB = Job(name="run", task="a:B", data=Data(path="d", batch_size=8), steps=3)


def left_by(run: Folder, status: str, job: Job = JOB) -> Result:
    run.write("job.yaml", [job.to_yaml().encode()])
    path = run.path or run.address
    result = Result(name="run", status=status, exit_code=0, path=path, steps=3, samples=24, metrics={"loss": 0.5})
    result.save(run)
    return result


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    """An empty storage folder, local or on S3."""
    if request.param == "local":
        return LocalFolder(tmp_path)
    bucket: Folder = request.getfixturevalue("bucket")
    return bucket.inside(tmp_path.name)


@pytest.fixture
def run(storage: Folder) -> Folder:
    return storage.inside("run")


def test_a_free_name_may_be_used(run: Folder) -> None:
    assert earlier_result(run, JOB, fresh=False) is None


def test_the_same_job_that_finished_gives_its_result_again(run: Folder) -> None:
    result = left_by(run, "finished")
    assert earlier_result(run, JOB, fresh=False) == result
    # Settings that do not affect the result may differ.
    elsewhere = replace(JOB, workers=replace(JOB.workers, min=2), elastic=replace(JOB.elastic, wait_s=1))
    assert earlier_result(run, elsewhere, fresh=False) == result


@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_an_unfinished_run_may_resume(run: Folder, status: str) -> None:
    left_by(run, status)
    assert earlier_result(run, JOB, fresh=False) is None


def test_a_finished_run_may_continue_to_more_steps(run: Folder) -> None:
    left_by(run, "finished")
    longer = replace(JOB, steps=9, args={"width": 3})
    with pytest.raises(InputError, match="they differ in args, steps"):
        earlier_result(run, longer, fresh=False)
    assert earlier_result(run, longer, fresh=False, resumes=True) is None
    with pytest.raises(InputError, match="they differ in seed") as caught:
        earlier_result(run, replace(longer, seed=1), fresh=False, resumes=True)
    assert caught.value.remedy == (
        "only args, steps and early_stop may change when a run is resumed; to start over, use run --fresh"
    )


def test_a_folder_that_is_not_a_run_is_refused(run: Folder) -> None:
    run.write("thesis", [b"x"])
    with pytest.raises(InputError, match=r"does not belong to a run: it has no job\.yaml"):
        earlier_result(run, JOB, fresh=False)


def test_a_controller_killed_before_it_wrote_the_job_blocks_nobody(
    run: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "LEASE_S", 0.2)
    claim(run, fresh=False, claims=None)
    Lease(run, "here:1").renew()
    assert earlier_result(run, JOB, fresh=False) is None
    past = load_history(run)
    assert past == Past(claims=1)
    claim(run, fresh=False, claims=past.claims)
    assert claims_of(run) == 2


def test_a_file_at_the_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(InputError, match="run: the path is a file"):
        earlier_result(LocalFolder(tmp_path / "run"), JOB, fresh=True)


def test_a_run_is_found_by_its_path_its_address_or_its_name(storage: Folder, run: Folder) -> None:
    left_by(run, "finished")
    for found in (find_run(run.address, "nowhere"), find_run("run", storage.address)):
        assert found.address == run.address
    assert job_of(find_run("run", storage.address), ["seed=3"]) == replace(JOB, seed=3)
    with pytest.raises(InputError, match="there is no run 'walk'"):
        find_run("walk", storage.address)
    with pytest.raises(InputError, match="there is no run '"):
        find_run(storage.inside("walk").address, storage.address)


def test_the_nearest_runs_are_named(tmp_path: Path) -> None:
    for name in ("digits", "digits2", "bytes"):
        left_by(LocalFolder(tmp_path / name), "finished")
    with pytest.raises(InputError, match=r"did you mean digits or digits2\?"):
        find_run("digit", str(tmp_path))


def test_a_folder_without_a_job_is_reported(run: Folder) -> None:
    with pytest.raises(InputError, match=r"run/job\.yaml: there is no such file"):
        job_of(run)


def test_the_newest_controller_alone_may_write(run: Folder) -> None:
    first = Fence(run, 0)
    assert first.overtaken() is None
    with pytest.raises(InputError, match="has started in the meantime"):
        Fence(run, 0)
    second = Fence(run, claims_of(run))
    assert second.overtaken() is None
    assert str(os.getpid()) in (first.overtaken() or "")
    # The folder is moved aside, and another run takes its place.
    run.move("aside")
    assert second.overtaken() == "its folder was moved away"
    third = Fence(run, 0)
    assert second.overtaken() is not None
    assert third.overtaken() is None


def test_a_new_controller_removes_unfinished_files(tmp_path: Path) -> None:
    old = [".model.safetensors.ab.part", "ledger/.00000000-000000000000.parquet.cd.part"]
    others = ["claims/.00000001.json.ef.part", "checkpoints/000000000001-00000000/.00000-of-00001.safetensors.01.part"]
    run = LocalFolder(tmp_path)
    for name in (*old, *others, ".lease.json.23.part", "job.yaml"):
        run.write(name, [b"x"])
        if name != ".lease.json.23.part":
            os.utime(tmp_path / name, (0, time.time() - 2 * LEASE_S))
    Fence(run, 0)
    assert set(run.unfinished()) == {*others, ".lease.json.23.part"}
    assert set(run.files()) == {"job.yaml", "claims/00000001.json"}


@pytest.mark.parametrize("damaged", [b"", b"[]", b"{}", b"\xff"])
def test_a_damaged_newer_claim_stops_a_controller_too(tmp_path: Path, damaged: bytes) -> None:
    run = LocalFolder(tmp_path)
    fence = Fence(run, 0)
    run.write("claims/00000001.json", [damaged])
    assert fence.overtaken() == "its claim, claims/00000001.json, is damaged"
    with pytest.raises(InputError, match="has started in the meantime"):
        Fence(run, 0)


@pytest.mark.parametrize("damaged", [b"\xff\xfe", b"a: [", b"a: b: c"])
def test_a_damaged_job_is_reported(run: Folder, damaged: bytes) -> None:
    run.write("job.yaml", [damaged])
    with pytest.raises(InputError, match=r"run/job\.yaml: the file is damaged"):
        earlier_result(run, JOB, fresh=False)
    assert earlier_result(run, JOB, fresh=True) is None


def test_one_of_several_simultaneous_controllers_gets_the_run(tmp_path: Path) -> None:
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


def test_another_job_is_refused_and_its_differences_are_named(run: Folder) -> None:
    left_by(run, "finished")
    other = replace(JOB, seed=1, data=replace(JOB.data, batch_size=16))
    with pytest.raises(InputError, match=r"they differ in seed, data\.batch_size"):
        earlier_result(run, other, fresh=False)


def test_fresh_moves_aside_and_overwrites_nothing(
    storage: Folder, run: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All moves happen within one second; the store has its own clock.
    clock = SimpleNamespace(**{**vars(time), "strftime": lambda *_: "20240101-000000"})
    monkeypatch.setattr(folder, "time", clock)
    for _ in range(3):
        left_by(run, "failed")
        assert earlier_result(run, JOB, fresh=True) is None
        assert "job.yaml" in run.files()
        claim(run, fresh=True, claims=None)
        for name in run.files():
            run.remove(name)
    claim(run, fresh=False, claims=None)
    assert list(run.files()) == ["claims/00000001.json"]
    left = {name.partition("/")[0] for name in storage.files()}
    assert left == {"run", *(f"run.20240101-000000{more}" for more in ("", ".2", ".3"))}


@contextmanager
def living(run: Folder) -> Iterator[None]:
    """Hold the run and renew its lease while this is open."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(0.02):
            Lease(run, "here:1").renew()

    holder = threading.Thread(target=renew)
    Lease(run, "here:1").renew()
    holder.start()
    try:
        yield
    finally:
        over.set()
        holder.join()


def test_a_living_run_blocks_even_a_fresh_one(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    left_by(run, "failed")
    with living(run), pytest.raises(InputError, match=r"is already running \(process \d+ on "):
        earlier_result(run, JOB, fresh=True)
    # Nobody renews the lease any more: wait until it expires.
    monkeypatch.setattr(folder, "LEASE_S", 0.4)
    Lease(run, "here:1").renew()
    assert earlier_result(run, JOB, fresh=True) is None


def test_a_living_lease_is_always_readable(run: Folder) -> None:
    with living(run):
        assert all(lease_holder(run) is not None for _ in range(100 if run.path else 25))


def test_a_run_that_started_in_the_meantime_is_left_alone(run: Folder) -> None:
    left_by(run, "finished")
    with pytest.raises(InputError, match=r"has started in the meantime \(and ended\)"):
        claim(run, fresh=False, claims=None)
    with living(run), pytest.raises(InputError, match=r"has started in the meantime \(process "):
        claim(run, fresh=True, claims=None)
    assert "result.json" in run.files()


def test_a_dead_holders_fast_clock_blocks_nobody(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "LEASE_S", 0.2)
    left_by(run, "failed")
    run.write("lease.json", [json.dumps({"time": time.time() + 3600, "pid": 1, "host": "h"}).encode()])
    assert earlier_result(run, JOB, fresh=False) is None
    claim(run, fresh=False, claims=0)
    claim(run, fresh=True, claims=None)
    assert "result.json" not in run.files()


def test_a_lease_that_is_not_renewed_expires(run: Folder) -> None:
    lease = {"time": time.time() - LEASE_S - 1, "pid": 1, "host": "h"}
    run.write("lease.json", [json.dumps(lease).encode()])
    assert lease_holder(run) is None
    run.write("lease.json", [json.dumps({**lease, "time": time.time()}).encode()])
    assert (lease_holder(run) or "").startswith("process 1 on h")
    for damaged in (b"{torn", b"[]", b"null", b"{}", b'{"time": "now"}', b"\xff"):
        run.write("lease.json", [damaged])
        assert lease_holder(run) is None
    Lease(run, "here:1").release()
    assert lease_holder(run) is None
    assert not run.files()


def left_by_the_dead(run: Folder) -> None:
    """A lease of a process on this machine that has just been killed."""
    renew = (
        "import sys; from raytrain_plus.runs.folder import Lease; "
        "from raytrain_plus.storage.folders.open import open_folder; "
        "import os, signal; Lease(open_folder(sys.argv[1]), 'here:1').renew(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", renew, run.address]).returncode == -signal.SIGKILL


@pytest.mark.skipif(not this_process(), reason="needs /proc")
def test_a_holder_that_died_on_this_machine_blocks_nobody(run: Folder) -> None:
    """Such a lease must not be waited for, nor count as a running run for 10 s."""
    left_by(run, "failed")
    left_by_the_dead(run)
    assert time.time() - json.loads(run.read("lease.json"))["time"] < 5, "its lease has not expired"
    assert lease_holder(run) is None
    lost = lost_holder(run)
    assert lost is not None
    assert (lost.process[:8], lost.lives) == ("process ", False)
    assert earlier_result(run, JOB, fresh=True) is None
    assert time.time() - json.loads(run.read("lease.json"))["time"] < LEASE_S, "it waited for the end of the lease"
    # A holder whose state is unknown keeps the folder until its lease expires.
    lease = json.loads(run.read("lease.json"))
    run.write("lease.json", [json.dumps({**lease, "time": time.time(), "machine": "another"}).encode()])
    assert lease_holder(run) is not None
    assert lost_holder(run) is None


def test_a_writable_storage_is_unchanged_by_the_check(storage: Folder, tmp_path: Path) -> None:
    assert check_writable(storage.inside("new").address).address == storage.inside("new").address
    assert not storage.files()


def test_a_storage_that_cannot_be_written_is_reported(tmp_path: Path, bucket: Folder) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written: Not a directory"):
        check_writable(tmp_path / "file" / "below")
    with pytest.raises(InputError, match=r"storage: s3://nowhere/runs: .* cannot be written: .*bucket does not exist"):
        check_writable(bucket.address.replace("contract", "nowhere/runs"))
    with pytest.raises(InputError, match="Unrecognized filesystem"):
        check_writable("ftp://host/runs")


def test_a_checkpoints_folder_names_its_run() -> None:
    assert doctest.testmod(folder).failed == 0
    name = "000000000059-00000000"
    assert folder.checkpoint_at(f"/runs/a/checkpoints/{name}.json") == ("/runs/a", name)
    for other in ("a", f"/runs/a/{name}", "/runs/a/checkpoints", f"/runs/a/checkpoints/{name}/0.safetensors"):
        assert folder.checkpoint_at(other) is None
