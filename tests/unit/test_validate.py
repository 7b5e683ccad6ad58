"""What a job is refused for without being run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_plus import Data, Evaluate, Job, Workers
from raytrain_plus.errors import DataError, TaskError
from raytrain_plus.validate import validate_job


def write(folder: Path, name: str) -> None:
    folder.mkdir()
    pq.write_table(pa.table({name: list(range(20))}), folder / "0.parquet")


def job(tmp_path: Path, prepare: str | None = None, data: str = "data", held_out: str = "held_out") -> Job:
    return Job(
        name="x",
        task="examples.digits:Digits",
        data=Data(path=str(tmp_path / data), prepare=prepare, batch_size=8),
        steps=3,
        evaluate=Evaluate(path=str(tmp_path / held_out), every_steps=1),
    )


def test_held_out_data_that_is_missing_or_another_table(tmp_path: Path) -> None:
    write(tmp_path / "data", "x")
    with pytest.raises(DataError, match=r"held_out: there is no such file or folder"):
        validate_job(job(tmp_path), [])
    write(tmp_path / "held_out", "y")
    with pytest.raises(DataError, match=r"other columns than the training data: x, y"):
        validate_job(job(tmp_path), [])


def test_data_that_cannot_be_looked_at_is_named(tmp_path: Path) -> None:
    write(tmp_path / "data", "x")
    for paths in ({"data": "y" * 300}, {"held_out": "y" * 300}):
        with pytest.raises(DataError, match="y: cannot be looked at: File name too long"):
            validate_job(job(tmp_path, "examples.digits:prepare", **paths), [])


def test_arguments_that_the_task_does_not_take(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"unexpected keyword argument 'widht'(.|\n)*given: widht"):
        validate_job(replace(job(tmp_path), args={"widht": 3}), [])


def test_a_class_that_is_no_task(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="is the class int"):
        validate_job(replace(job(tmp_path), task=int), [])


def test_more_workers_than_shards_are_said_not_to_be_formed(tmp_path: Path) -> None:
    write(tmp_path / "data", "x")
    whole = replace(job(tmp_path), evaluate=None, workers=Workers(min=2, max=10**12))
    report = validate_job(whole, [])
    assert [size.workers for size in report.sizes] == [2, 3, 4, 5, 6, 7, 8]
    assert report.lines()[-1].startswith(
        "  warning: at most 8 of workers.max = 1000000000000 are formed: with data.sha"
    )
    # Seven workers would be no faster than four.
    report = validate_job(replace(whole, workers=Workers(min=2, max=7)), [])
    assert "at most 4 of workers.max = 7 are formed" in report.lines()[-1]
    assert not validate_job(replace(whole, workers=Workers(min=2, max=4)), []).left_out
