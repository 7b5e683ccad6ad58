"""What is sent with a job, and where to."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_plus import Data, Evaluate, InputError, Job
from raytrain_plus.submission import check_sendable, check_shown, largest, unneeded_by


def job(**changes: object) -> Job:
    data = Data(path=str(changes.pop("path", "data/train")), batch_size=8, prepare=changes.pop("prepare", None))  # type: ignore[arg-type]
    return Job(name="job", task="tasks:Net", steps=1, data=data, **changes)  # type: ignore[arg-type]


def test_data_that_is_made_there_is_unneeded_by(tmp_path: Path) -> None:
    made = job(prepare="tasks:prepare", evaluate=Evaluate(path="data/held_out", every_steps=2), storage="s3://b/runs")
    assert unneeded_by(made, tmp_path) == ["/data/train/**/*.parquet", "/data/held_out/**/*.parquet"]
    assert unneeded_by(job(path="/share/data", storage="../elsewhere"), tmp_path) == []
    assert unneeded_by(job(), tmp_path) == ["/runs/*/"]


def test_the_job_file_must_be_among_what_is_sent(tmp_path: Path) -> None:
    inside, outside = tmp_path / "project" / "jobs" / "a.yaml", tmp_path / "b.yaml"
    assert check_sendable(job(path="/share"), inside, tmp_path / "project") == "jobs/a.yaml"
    with pytest.raises(InputError, match="not inside the working directory"):
        check_sendable(job(path="/share"), outside, tmp_path / "project")


def test_data_is_not_sent(tmp_path: Path) -> None:
    for good in (job(path="s3://bucket/data"), job(prepare="tasks:prepare")):
        check_sendable(good, tmp_path / "job.yaml", tmp_path)
    with pytest.raises(InputError, match=r"data\.path: data/train.*relative"):
        check_sendable(job(), tmp_path / "job.yaml", tmp_path)


def test_the_largest_are_named(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "one").write_bytes(b"x" * 3000)
    (tmp_path / "small").write_bytes(b"x")
    assert largest(tmp_path).startswith("big (")
    assert largest(tmp_path).count("(") == 2


def test_no_key_is_among_what_a_cluster_shows() -> None:
    check_shown(["run", "job.yaml", "--set", "storage=s3://bucket/runs?region=eu-west-1"])
    with pytest.raises(InputError) as error:
        check_shown(["run", "job.yaml", "--set", "storage=s3://KEY:SECRET@bucket/runs"])
    assert "SECRET" not in str(error.value)


def test_held_out_data_is_not_sent_either(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"evaluate\.path: data/held_out"):
        check_sendable(
            job(path="/share", evaluate=Evaluate(path="data/held_out", every_steps=2)), tmp_path / "a.yaml", tmp_path
        )
