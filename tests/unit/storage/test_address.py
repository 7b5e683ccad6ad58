"""Paths and addresses of folders, taken apart and put together."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from raytrain_plus.errors import InputError
from raytrain_plus.storage import interface as module
from raytrain_plus.storage.address import split, within

SETTINGS = "?endpoint_override=http://127.0.0.1:9000/&scheme=http"


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("storage", "name", "run"),
    [
        ("/runs", "a", "/runs/a"),
        ("s3://bucket", "a", "s3://bucket/a"),
        (f"s3://bucket/runs{SETTINGS}", "a.20240101-000000", f"s3://bucket/runs/a.20240101-000000{SETTINGS}"),
        ("gs://anonymous@bucket/x#y", "a", "gs://anonymous@bucket/x/a#y"),
        ("hdfs:///", "runs", "hdfs:///runs"),
        ("hdfs://host:9000/x", "runs", "hdfs://host:9000/x/runs"),
        ("file:///", "tmp", "file:///tmp"),
    ],
)
def test_split_is_the_inverse_of_within(storage: str, name: str, run: str) -> None:
    assert within(storage, name) == run
    assert split(run) == (storage, name)


def test_a_path_may_be_relative_and_an_address_end_in_a_slash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert within("runs", "a") == "runs/a"
    assert split("runs/../a/") == (str(tmp_path), "a")
    assert within(f"s3://bucket/runs//{SETTINGS}", "a b/c") == f"s3://bucket/runs/a%20b/c{SETTINGS}"
    assert split(f"s3://bucket/runs/a%20b/{SETTINGS}") == (f"s3://bucket/runs{SETTINGS}", "a b")


def test_names_outside_an_address_are_refused() -> None:
    with pytest.raises(InputError, match="not a valid name"):
        within("s3://bucket/runs", "../other")
