"""The report of `raytrain status` on a run, from its folder alone."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from pyarrow import fs

from raytrain_plus.errors import InputError
from raytrain_plus.result import Result
from raytrain_plus.runs.folder import LEFT, Fence, Lease
from raytrain_plus.runs.history import load_history
from raytrain_plus.runs.status import listed, state_of, status, what_is_kept
from raytrain_plus.state.stored.checkpoint import commit
from raytrain_plus.state.stored.manifest import name_of
from raytrain_plus.storage.folders.hdfs import HdfsFolder
from raytrain_plus.storage.folders.local import Disk, LocalFolder
from raytrain_plus.storage.interface import Folder
from tests.support.events import committed, resumed, tell
from tests.support.states import described, shares, state
from tests.unit.storage.disk import Linkless


def test_a_running_run_names_its_holder(run: Folder) -> None:
    tell(run, committed(0, 0, 1, 2))
    assert status(run).lines() == ["run: unfinished; 3 steps", "  no checkpoints yet"]
    Lease(run, "here:1").renew()
    assert status(run).state.startswith("running (process ")
    Lease(run, "here:1").release()
    Result(name="run", status="stopped", exit_code=130, path=run.path or run.address, steps=3, samples=24).save(run)
    assert status(run).to_json()["state"] == "stopped"


def test_a_dead_controller_is_reported_with_checkpoint_and_resume_command(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path / "run")
    assert what_is_kept(run) == "nothing was written yet: run the job again"
    tell(run, committed(0, *range(10)))
    Lease(run, "here:1").renew()
    lease = json.loads(run.read("lease.json"))
    dead = {**lease, "born": "1", "host": "h", "pid": os.getpid()}
    run.write("lease.json", [json.dumps(dead).encode()])
    assert state_of(run) == f"running (its controller, process {os.getpid()} on h, died and is being replaced)"
    run.write("lease.json", [json.dumps({**dead, "time": time.time() - 20}).encode()])
    command = f"raytrain resume {run.path}"
    assert what_is_kept(run) == (
        f"no checkpoint is complete, so it restarts from its first step; resume with: {command}"
    )
    for step, whole in ((1, True), (3, True), (5, False)):
        written = shares(run, state(step), name_of(step, 0), 2)
        if whole:
            commit(run, described(step, 0, written, time=time.time()))
    assert what_is_kept(run) == f"the checkpoint after step 4 is kept; resume with: {command}"
    found = status(run)
    assert found.lines()[0] == f"run: unfinished (its controller died: process {os.getpid()} on h); 10 steps"
    assert found.lines()[-1] == f"  resume with: {command}"
    assert found.to_json()["resume"] == command
    # A controller that lives and only cannot write its lease does not count as dead.
    old = {**lease, "time": time.time() - 60}
    run.write("lease.json", [json.dumps(old).encode()])
    silent = f"process {os.getpid()} on {lease['host']}"
    assert status(run).state == f"running ({silent}, which has not renewed its lease for 60 s)"
    run.write("lease.json", [json.dumps({**old, "machine": "another"}).encode()])
    assert status(run).state == f"unfinished ({silent} has not renewed its lease for 60 s)"
    assert status(run).resume == command
    # A run with a result has ended, whatever its lease says.
    Result(name="run", status="failed", exit_code=1, path=run.path, steps=3, samples=24).save(run)
    assert (status(run).state, status(run).resume) == ("failed", "")


def left(writer: object, **changes: object) -> bytes:
    share = {"step": 4, "generation": 0, "writer": writer, "writers": 2, **changes}
    return json.dumps({"format": 1, "written": share}).encode()


@pytest.mark.parametrize(
    ("files", "whole"),
    [
        ([left(0), left(1)], True),
        ([left(0)], False),
        ([left(0), b'{"format": 1, "written": null}'], False),
        ([left(0), b'{"format": 1, "writ'], False),
        ([left(0), left(1, step=3)], False),
        ([left(0), left(0)], False),
        ([left("x"), left(1)], False),
    ],
)
def test_only_a_whole_state_that_workers_have_left_is_one(tmp_path: Path, files: list[bytes], whole: bool) -> None:
    run = LocalFolder(tmp_path / "run")
    tell(run, committed(0, *range(5)))
    for number, content in enumerate(files):
        run.write(f"{LEFT}/worker-{number}.json", [content])
    said = "its workers have written the state that they had" if whole else "no checkpoint is complete"
    assert what_is_kept(run).startswith(said)


def test_checkpoints_are_listed_with_age_size_and_state(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path / "run")
    tell(run, committed(0, *range(10)))
    files = {}
    for step in (1, 3, 5):
        written = shares(run, state(step), name_of(step, 0), 2)
        files[step] = [share.file for share in written]
        if step != 5:
            commit(run, described(step, 0, written, time=time.time() - 7200))
    (run.path / "checkpoints" / name_of(1, 0) / files[1][1].name).unlink()
    size = sum(file.bytes for file in files[3])
    none, good, incomplete = status(run).checkpoints
    assert (none.step, none.bytes, none.state) == (5, size, "not finished: there is no manifest")
    assert 0 <= none.age_s < 60
    assert (good.step, good.state, round(good.age_s / 3600)) == (3, "complete", 2)
    assert size < good.bytes < size + 20_000
    assert (incomplete.step, incomplete.state) == (1, f"{files[1][1].name} is missing")
    lines = status(run).lines()
    assert lines[1].split() == ["checkpoint", "after", "step", "age", "size", "state"]
    assert lines[3].split() == [name_of(3, 0), "4", "2", "h", f"{good.bytes / 1000:.1f}", "kB", "complete"]


def test_the_runs_of_a_storage_are_listed(tmp_path: Path) -> None:
    for name, ended in (("b", "stopped"), ("a", "")):
        run = LocalFolder(tmp_path / name)
        run.write("job.yaml", [b""])
        if ended:
            Result(name=name, status=ended, exit_code=143, path=tmp_path / name, steps=1, samples=8).save(run)
    (tmp_path / "no run").mkdir()
    document, lines = listed(str(tmp_path))
    assert document == {"runs": {"a": "unfinished", "b": "stopped"}}
    assert lines == ["a: unfinished", "b: stopped"]
    with pytest.raises(InputError, match="there are no runs"):
        listed(str(tmp_path / "no run"))


def test_the_best_checkpoint_is_marked(run: Folder) -> None:
    tell(run, committed(0, *range(6)))
    judged = {"checkpoint": {"keep_best": {"metric": "loss", "mode": "min"}}}
    for step, loss in ((1, 2.0), (3, 0.5), (5, 1.0)):
        shared = shares(run, state(step), name_of(step, 0), 2)
        commit(run, described(step, 0, shared, job=judged, metrics={"loss": loss}))
    assert [one.best for one in status(run).checkpoints] == [False, True, False]
    assert [line.rpartition("  ")[2] for line in status(run).lines()[2:5]] == [
        "complete",
        "complete, the best",
        "complete",
    ]


def test_events_that_are_cut_off_are_reported(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path / "run")
    tell(run, committed(0, 0, 1, 2, 3))
    assert status(run).incomplete_from is None
    # A checkpoint is written after the events of its steps, and so is a part of the ledger, and the result.
    commit(run, described(5, 0, shares(run, state(5), name_of(5, 0), 2), time=time.time()))
    found = status(run)
    assert (found.incomplete_from, found.steps) == (4, 6)
    assert found.lines()[:2] == [
        "run: unfinished; 6 steps",
        "  the record (events.ndjson) is incomplete: it ends after step 4",
    ]
    run.write("ledger/00000000-000000000007.parquet", [b""])
    assert (status(run).incomplete_from, status(run).steps) == (4, 8)
    result = Result(name="run", status="finished", exit_code=0, path=run.path, steps=10, samples=80)
    result.save(run)
    found = status(run)
    assert found.state == "finished"
    assert (found.incomplete_from, found.steps, found.to_json()["incomplete_from"]) == (4, 10, 4)
    # The events of a running run may be read before its newest checkpoint is.
    Lease(run, "here:1").renew()
    assert (status(run).incomplete_from, status(run).steps) == (None, 4)
    Lease(run, "here:1").release()
    tell(run, committed(0, *range(4, 10)))
    assert (status(run).state, status(run).incomplete_from) == ("finished", None)
    # The event that it resumed is missing, though it has not come as far since.
    run.write("ledger/00000002-000000000007.parquet", [b""])
    assert status(run).incomplete_from == 10
    tell(run, [resumed(2, 6, 9), *committed(2, 7, 8, 9)])
    assert status(run).incomplete_from is None


def test_damaged_files_are_input_errors(tmp_path: Path) -> None:
    """Each is reported as an input error, not a traceback."""
    for damage, match in (
        (lambda run: run.write("events.ndjson", [b"{}\n"]), r"run/events\.ndjson, line 1: the file is damaged"),
        (lambda run: run.write("result.json", [b"{}"]), r"run/result\.json: not a valid result"),
        (lambda run: (run.path / "checkpoints").symlink_to(tmp_path), "run/checkpoints: a link points outside"),
        (lambda run: (run.path / "claims").symlink_to(tmp_path), "run/claims: a link points outside"),
    ):
        run = LocalFolder(tmp_path / "run")
        tell(run, committed(0, 0))
        damage(run)
        with pytest.raises(InputError, match=match):
            status(run)
        shutil.rmtree(tmp_path / "run")


def test_a_storage_without_exclusive_creation_is_named(tmp_path: Path) -> None:
    run = HdfsFolder(fs.LocalFileSystem(), str(tmp_path / "bare"), "hdfs://host/bare")
    found = status(run)
    assert found.run == "bare"
    assert found.lines()[-1].startswith("  single writer not enforced")
    Fence(run, 0)
    assert not status(run).single_writer


def test_a_file_system_that_falsely_claims_exclusive_creation_is_detected(tmp_path: Path) -> None:
    class Replacing(Disk):
        def link(self, path: Path, to: Path) -> None:
            path.replace(to)

    assert status(LocalFolder(tmp_path / "run")).single_writer
    Fence(LocalFolder(tmp_path / "run", Replacing()), 0)
    assert not status(LocalFolder(tmp_path / "run")).single_writer
    Fence(LocalFolder(tmp_path / "run", Linkless()), 1)
    assert status(LocalFolder(tmp_path / "run")).single_writer
    (tmp_path / "run" / "claims" / "00000002.json").write_bytes(b"{")
    assert status(LocalFolder(tmp_path / "run")).single_writer


def test_a_living_run_shows_the_newest_reading_of_each_gpu(run: Folder) -> None:
    members = [
        {"worker": name, "pid": pid, "node": "n", "replica": pid, "stage": 0, "params": 1, "shards": [pid]}
        for pid, name in enumerate("abc")
    ]
    view = {"members": members, "spares": [], "collective": "torch", "moved_bytes": 0}
    started = {"job": "", "versions": {}, "address": ""}
    use = {"utilisation": 0.93, "memory_bytes": 61_200_000_000, "power_w": 512.0}
    nothing = dict.fromkeys(use)
    [(generation, kind, fields)] = committed(0, 0)
    readings = {"a": {**use, "power_w": 1.0}, "b": nothing, "gone": use}
    events = [
        (0, "run_started", started),
        (0, "view_formed", {**view, "members": [*members, {**members[0], "worker": "gone"}]}),
        (generation, kind, {**fields, "gpus": readings}),
        (generation, kind, {**fields, "step": 1, "gpus": {"a": use}}),
        (1, "view_formed", view),
    ]
    tell(run, events)
    Lease(run, "here:1").renew()
    assert load_history(run).gpus.keys() == {"a", "b"}
    found = status(run)
    first = found.lines()[1]
    assert first.startswith("  a: process 0 on the node n; GPU 93 % busy, 61.2 GB in use, 512 W, ")
    assert first.endswith(" s ago")
    assert found.lines()[2:4] == ["  b: process 1 on the node n", "  c: process 2 on the node n"]
    assert found.to_json()["workers"][2] == {"worker": "c", "pid": 2, "node": "n", "gpu": None}
    # The next controller names its workers alike.
    tell(run, [(2, "run_started", started), (2, "view_formed", view)])
    assert load_history(run).gpus == {}
    Lease(run, "here:1").release()


def test_a_run_with_experts_shows_the_worst_layer(run: Folder) -> None:
    use = {"load": [3, 1], "max_vio": 0.5, "dropped": 0.25, "entropy": 0.6}
    tell(run, [(0, "experts", {"step": 0, "layers": {"a": use, "b": {**use, "max_vio": 1.0}}})])
    assert not any("experts" in line for line in status(run).lines()[2:])
    tell(run, [(0, "experts", {"step": 1, "layers": {"b": {**use, "dropped": 0.0}, "c": use}})])
    found = status(run)
    assert found.lines()[1] == "  experts: MaxVio 0.50 at most (a), 25.0 % dropped at most"
    assert found.to_json()["experts"]["c"] == use
