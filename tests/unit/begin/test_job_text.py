"""The job file that is written for a task."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from raytrain_plus.begin.job_text import PLACEHOLDER, KnownData, job_text, name_of, sizes_for
from raytrain_plus.job.settings import Job
from raytrain_plus.job.yaml import read_job

KNOWN = KnownData(1437, 23, ["pixels", "label"])


class Plain:
    pass


class Many:
    def __init__(self, width: int = 64, lr: float = 3e-5, kind: str = "yes", other: Any = Path()) -> None:
        pass


class Strict:
    def __init__(self, depth: int, lr: float = 0.1) -> None:
        pass


def read(text: str) -> Job:
    return read_job(text, "job.yaml", "job")


def written(cls: type, path: str | None = None, known: KnownData | None = None, prepare: str | None = None) -> str:
    return job_text(f"mine.tasks:{cls.__name__}", inspect.signature(cls), path, known, prepare)


@pytest.mark.parametrize(
    ("cls", "name"),
    [("ByteGPT", "byte_gpt"), ("GPT", "gpt"), ("Outer.Inner", "inner"), ("MyHTTPTask2", "my_http_task2")],
)
def test_the_name_comes_from_the_class(cls: str, name: str) -> None:
    assert name_of(f"module:{cls}") == name


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 160, 161, 1437, 10**9])
def test_the_sizes_fit_the_rows(rows: int) -> None:
    batch, shards = sizes_for(rows)
    assert batch % shards == 0
    assert shards <= rows
    assert batch <= max(8, rows)


@pytest.mark.parametrize("cls", [Plain, Many])
@pytest.mark.parametrize("path", [None, "data/x", "a b: #c", "true", "1.5", "data/*.parquet", "é'\""])
@pytest.mark.parametrize("known", [None, KNOWN])
def test_the_text_is_a_job_with_a_comment_beside_each_key(cls: type, path: str | None, known: KnownData | None) -> None:
    text = written(cls, path, known)
    job = read(text)
    assert (job.task, job.data.path) == (f"mine.tasks:{cls.__name__}", path or PLACEHOLDER)
    assert (job.workers.min, job.workers.max, job.data.prepare) == (1, 2, None)
    for line in text.splitlines()[1:]:
        assert "  # " in line or line in (f"task: {job.task}", "data:"), line


def test_what_is_known_of_the_data_gives_the_sizes_and_is_told() -> None:
    text = written(Plain, "data", KNOWN)
    assert "# 1,437 rows in 23 row groups: pixels, label" in text
    assert (read(text).data.batch_size, read(text).data.shards) == (64, 8)
    one = written(Plain, "data", KnownData(5, 1, ["x"]))
    assert "# 5 rows in 1 row group: x" in one
    assert read(one).data.batch_size == 5
    pictures = written(Plain, "data", KnownData(5, 1, ["image", "label"], images=True))
    assert ("# image_size: [224, 224]" in pictures, "image_size" in one) == (True, False)
    assert read(pictures.replace("  # image_size", "  image_size")).data.image_size == [224, 224]


def test_the_arguments_are_those_of_the_constructor() -> None:
    assert "# args: {width: 64, lr: 3.0e-05, kind: 'yes'} " in written(Many)
    assert "args" not in written(Plain)
    job = read(written(Strict))
    assert job.args == {"depth": None}
    assert "Strict(...) requires these: give their values, has {lr: 0.1}" in written(Strict)
    # What the comment offers is what the constructor has.
    assert read(written(Many).replace("# args", "args")).args == {"width": 64, "lr": 3e-5, "kind": "yes"}


def test_a_function_that_prepares_the_data_is_named() -> None:
    job = read(written(Plain, prepare="mine.tasks:prepare"))
    assert (job.data.prepare, job.data.path) == ("mine.tasks:prepare", "data/plain/train")
