"""Checks before a run: whether the cluster has enough room, and whether a job can resume from a folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("ray")

import yaml

from raytrain_plus import Data, Job, Workers
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.data.sources.source import READING, Source
from raytrain_plus.errors import CheckpointError, DataError, InputError, TaskError
from raytrain_plus.job.task_source import source_digests
from raytrain_plus.launch import cluster, preflight, runner
from raytrain_plus.parallel.sizing import size_table
from raytrain_plus.result import Result
from raytrain_plus.runs.history import load_history
from raytrain_plus.runs.resumption import check_resumable
from raytrain_plus.state.stored.checkpoint import commit
from raytrain_plus.state.stored.manifest import name_of
from raytrain_plus.storage.folders.local import LocalFolder
from tests.support.datasets import write
from tests.support.states import described


def limits(
    monkeypatch: pytest.MonkeyPatch, workers: Workers, most: dict[str, float] | None, autoscaler: bool = False
) -> int:
    nodes = [{"Alive": True, "Resources": {"CPU": 2.0, "object_store_memory": 1.0}}]
    monkeypatch.setattr(cluster.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(cluster, "most_there_can_be", lambda: most)
    monkeypatch.setattr(cluster, "has_autoscaler", lambda: autoscaler)
    job = Job(name="x", task="a:B", data=Data(path="d", batch_size=8), steps=1, workers=workers)
    return cluster.limits_of(job, 1, size_table(job)).sizes.fewest


@pytest.mark.parametrize(
    ("workers", "most"),
    [
        (Workers(min=2), None),
        (Workers(min=3), {"CPU": 4.0}),
        (Workers(min=3, spares=1), {"CPU": 4.0}),
        (Workers(min=1, gpus=1), {"CPU": 4.0, "GPU": 1.0}),
    ],
)
def test_present_or_possible_room_is_enough(
    monkeypatch: pytest.MonkeyPatch, workers: Workers, most: dict[str, float] | None
) -> None:
    assert limits(monkeypatch, workers, most) == workers.min


def test_nodes_without_the_accelerator_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="room for 0 workers of 1 CPU and 0 GPU each, on nodes with H100"):
        limits(monkeypatch, Workers(accelerator="H100"), None)


def test_an_autoscaler_with_unknown_limits_may_add_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits(monkeypatch, Workers(min=4, gpus=1), None, autoscaler=True) == 4
    with pytest.raises(InputError):
        limits(monkeypatch, Workers(min=5), {"CPU": 4.0}, autoscaler=True)


@pytest.mark.parametrize(
    ("workers", "most", "where"),
    [
        (Workers(min=3), None, "workers.min: 3"),
        (Workers(min=5), {"CPU": 4.0}, "workers.min: 5"),
        (Workers(min=2, spares=1), None, "workers.spares: 1"),
        (Workers(min=2, spares=3), {"CPU": 4.0}, "workers.spares: 3"),
        (Workers(min=1, gpus=1), {"CPU": 4.0}, "workers.min: 1"),
    ],
)
def test_impossible_requests_are_refused(
    monkeypatch: pytest.MonkeyPatch, workers: Workers, most: dict[str, float] | None, where: str
) -> None:
    with pytest.raises(InputError, match="the cluster has room for") as caught:
        limits(monkeypatch, workers, most)
    assert caught.value.where == where
    assert "its 1 nodes have: 2 CPU, 0 GPU" in caught.value.expected


def test_a_class_that_is_not_a_task_is_not_sent(tmp_path: Path) -> None:
    job = Job(name="x", task=int, data=Data(path="d", batch_size=8), steps=1, storage=str(tmp_path))
    with pytest.raises(TaskError, match="builtins:int is the class int"):
        preflight.order_of(job)


def test_unused_workers_are_warned_about_and_ray_has_no_room_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[int] = []

    def init(**settings: Any) -> None:
        started.append(settings["num_cpus"])
        raise OSError("no Ray in this test")

    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"x": list(range(20))}), tmp_path / "data" / "0.parquet")
    job = Job(
        name="x",
        task="examples.digits:Digits",
        data=Data(path=str(tmp_path / "data"), batch_size=8),
        steps=1,
        workers=Workers(min=1, max=10**9, spares=1),
        storage=str(tmp_path / "runs"),
    )
    with pytest.raises(InputError, match="no Ray in this test"):
        runner.run(job, quiet=True)
    assert started == [9]
    assert "warning: at most 8 of workers.max = 1000000000 are used: with data.shards = 8" in capsys.readouterr().err


class Begun:
    """A run's folder with a checkpoint after step 3, with its job and data."""

    def __init__(self, folder: Path) -> None:
        write(folder / "data" / "a.parquet", 40)
        self.run = LocalFolder(folder / "run")
        self.job = Job(name="x", task="a:B", data=Data(path=str(folder / "data"), batch_size=8), steps=9, args={"w": 1})
        self.seen: Source = parquet_source(folder / "data")
        self.run.write("dataset.json", [json.dumps(self.seen.describe()).encode()])
        self.save(3)

    def save(self, step: int, job: Job | None = None, **changes: Any) -> None:
        settings = yaml.safe_load((job or self.job).to_yaml())
        data = {"fingerprint": self.seen.fingerprint}
        commit(self.run, described(step, 0, [], **{"job": settings, "data": data, **changes}))

    def goes_on(self, job: Job | None = None) -> None:
        check_resumable(load_history(self.run), self.run, job or self.job, self.seen)


@pytest.fixture
def begun(tmp_path: Path) -> Begun:
    return Begun(tmp_path)


def test_a_job_resumes_with_allowed_changes_and_under_another_name(begun: Begun) -> None:
    begun.goes_on()
    begun.goes_on(replace(begun.job, name="copied", steps=20, args={"w": 2}, workers=Workers(min=2)))


def test_other_data_is_refused_by_the_folder_or_else_by_the_checkpoint(begun: Begun, tmp_path: Path) -> None:
    write(tmp_path / "data" / "b.parquet", 40)
    begun.seen = parquet_source(tmp_path / "data")
    with pytest.raises(DataError, match=r"the data has changed since the run started: b\.parquet is new"):
        begun.goes_on()
    begun.run.remove("dataset.json")
    with pytest.raises(DataError, match=r"the data has changed since the checkpoint 0+3-0+ was written"):
        begun.goes_on()


def test_a_run_whose_version_followed_no_links_says_which_are_followed_now(begun: Begun, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "b.parquet", 40)
    (tmp_path / "data" / "more").symlink_to(tmp_path / "elsewhere")
    begun.seen = parquet_source(tmp_path / "data")
    with pytest.raises(
        DataError, match=r"more/b\.parquet is new; versions before this one followed no links, such as m"
    ):
        begun.goes_on()
    (tmp_path / "data" / "more").unlink()
    begun.seen = parquet_source(tmp_path / "data")
    begun.goes_on()


def test_a_new_file_that_matches_the_pattern_is_other_data(begun: Begun, tmp_path: Path) -> None:
    pattern = tmp_path / "data" / "*.parquet"
    begun.job = replace(begun.job, data=replace(begun.job.data, path=str(pattern)))
    begun.run.write("dataset.json", [json.dumps(parquet_source(pattern).describe()).encode()])
    begun.run.remove("checkpoints")
    begun.save(3)
    write(tmp_path / "data" / "aside" / "c.parquet", 40)
    begun.seen = parquet_source(pattern)
    begun.goes_on()
    write(tmp_path / "data" / "b.parquet", 40)
    begun.seen = parquet_source(pattern)
    with pytest.raises(DataError, match=r"the data has changed since the run started: b\.parquet is new"):
        begun.goes_on()


@pytest.mark.parametrize("damaged", [b"{", b"[]", b"{}", b'{"fingerprint": ""}', b'{"fingerprint": "", "files": [1]}'])
def test_a_damaged_description_of_the_data_is_reported(begun: Begun, damaged: bytes) -> None:
    begun.run.write("dataset.json", [damaged])
    with pytest.raises(InputError, match=r"run/dataset\.json.*: the file is damaged") as caught:
        begun.goes_on()
    assert "move the file away" in caught.value.remedy
    begun.run.remove("dataset.json")
    begun.goes_on()


def test_another_jobs_checkpoint_is_refused_at_any_position(begun: Begun) -> None:
    other = replace(begun.job, seed=1, data=replace(begun.job.data, batch_size=16))
    begun.save(1, job=other, run="theirs")
    match = (
        r"checkpoints/0+1-0+\.json: the checkpoint belongs to another job \(theirs\); they differ in seed, data\.batch"
    )
    with pytest.raises(CheckpointError, match=match):
        begun.goes_on()


def test_a_damaged_checkpoint_gives_a_warning_and_the_one_before_is_used(
    begun: Begun, capsys: pytest.CaptureFixture[str]
) -> None:
    begun.save(5)
    begun.run.write(f"checkpoints/{name_of(5, 0)}.json", [b"{}"])
    begun.goes_on()
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: the checkpoint {name_of(5, 0)} cannot be used: the manifest is damaged")
    with pytest.raises(InputError, match=r"2 steps are fewer than the run has already made \(4\)"):
        begun.goes_on(replace(begun.job, steps=2))


def test_a_run_does_not_start_over_if_every_checkpoint_is_damaged(begun: Begun) -> None:
    begun.run.write(f"checkpoints/{name_of(3, 0)}.json", [b"{}"])
    with pytest.raises(CheckpointError, match="can be used; the newest: the manifest is damaged") as caught:
        begun.goes_on()
    assert caught.value.where == f"{begun.run.where}/checkpoints/{name_of(3, 0)}"


def test_a_finished_run_without_a_checkpoint_cannot_resume(begun: Begun) -> None:
    begun.run.remove("checkpoints")
    begun.goes_on()
    Result(name="x", status="finished", exit_code=0, path=begun.run.path, steps=9, samples=72).save(begun.run)
    with pytest.raises(InputError, match="the finished run has no checkpoint") as caught:
        begun.goes_on()
    assert caught.value.where == f"run folder {begun.run.where}"


def job_of_a_task(folder: Path, **changes: Any) -> Job:
    write(folder / "data" / "a.parquet", 40)
    (folder / "job_code.py").write_text("from raytrain_plus import Task\n\n\nclass B(Task):\n    width = 2\n")
    data = Data(path=str(folder / "data"), batch_size=8)
    return Job(name="run", task="job_code:B", data=data, steps=9, storage=str(folder), **changes)


def began(job: Job, folder: Path, status: str = "") -> None:
    """Leave what a run of the job as it is now leaves."""
    run = LocalFolder(folder / "run")
    run.write("job.yaml", [job.to_yaml().encode()])
    run.write("task.json", [json.dumps({"modules": source_digests(job, [folder])}).encode()])
    if status:
        result = Result(name="run", status=status, exit_code=0, path=folder / "run", steps=9, samples=72)
        replace(result, trained_steps=9).save(run)


def test_a_finished_run_trains_nothing_and_refuses_an_edited_task(tmp_path: Path) -> None:
    job = job_of_a_task(tmp_path)
    began(job, tmp_path, "finished")
    done = preflight.order_of(job, roots=[tmp_path])
    assert isinstance(done, Result)
    assert done.trained_steps == 0
    (tmp_path / "job_code.py").write_text("from raytrain_plus import Task\n\n\nclass B(Task):\n    width = 3\n")
    with pytest.raises(InputError, match="the task's source has changed since this run finished: job_code") as caught:
        preflight.order_of(job, roots=[tmp_path])
    assert "--fresh" in caught.value.remedy
    (tmp_path / "run" / "task.json").unlink()
    assert isinstance(preflight.order_of(job, roots=[tmp_path]), Result)


def test_an_edited_task_of_an_unfinished_or_extended_run_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "check_resumable", lambda *given: None)
    job = job_of_a_task(tmp_path)
    for status in ("", "finished"):
        began(job, tmp_path, status)
        longer = replace(job, steps=12) if status else job
        preflight.order_of(longer, roots=[tmp_path], resumes=True)
        assert "source" not in capsys.readouterr().err
        with (tmp_path / "job_code.py").open("a") as file:
            file.write("# edited\n")
        order = preflight.order_of(longer, roots=[tmp_path], resumes=True)
        assert not isinstance(order, Result)
        assert order.task_modules == source_digests(job, [tmp_path])
        warning = "warning: the task's source has changed since this run was last started: job_code\n"
        assert warning in capsys.readouterr().err


def test_a_run_of_an_older_version_is_known_by_the_description_of_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "check_resumable", lambda *given: None)
    job = job_of_a_task(tmp_path)
    began(job, tmp_path)
    said = parquet_source(tmp_path / "data").describe()
    for marked in (said, {**said, READING: 2}):
        LocalFolder(tmp_path / "run").write("dataset.json", [json.dumps(marked).encode()])
        order = preflight.order_of(job, roots=[tmp_path])
        assert not isinstance(order, Result)
        assert order.older == (READING not in marked)
