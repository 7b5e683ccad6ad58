"""Data of every format trains alike, whatever happens to the workers."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from ray.cluster_utils import Cluster

from raytrain_plus import Data, Evaluate, Job, Result, Workers
from raytrain_plus.data.audit import audit
from tests.integration.elastic import Run, job, raylets

pytestmark = pytest.mark.timeout(240)

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # Converted data is kept in the user's home.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        with raylets(3) as cluster:
            yield cluster


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, 6))
    y = (x[:, 0] + x[:, 1] > 0).astype(int) + (x[:, 2] > 1)
    return [{**{f"x{n}": float(v) for n, v in enumerate(of)}, "y": int(label)} for of, label in zip(x, y, strict=True)]


def write(path: Path, format_: str, made: list[dict[str, Any]]) -> Path:
    """Write these rows, and return what a job names."""
    path.mkdir()
    if format_ == "csv":
        with (path / "rows.csv").open("w", newline="") as out:
            writer = csv.DictWriter(out, list(made[0]))
            writer.writeheader()
            writer.writerows(made)
        return path / "rows.csv"
    if format_ == "jsonl":
        half = len(made) // 2
        for name, part in (("a.jsonl", made[:half]), ("b.jsonl", made[half:])):
            (path / name).write_text("".join(json.dumps(row) + "\n" for row in part))
        return path / "*.jsonl"
    table = pa.Table.from_pylist(made)
    with pa.OSFile(str(path / "data-00000-of-00001.arrow"), "wb") as out, pa.ipc.new_stream(out, table.schema) as to:
        to.write_table(table, 50)
    if format_ == "huggingface":
        (path / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    return path


def job_of(tmp_path: Path, format_: str, **changes: Any) -> Job:
    settings: dict[str, Any] = {
        "task": "tasks:Tabular",
        "data": Data(path=str(write(tmp_path / "data", format_, rows(900, 0))), batch_size=48, shards=8),
        "evaluate": Evaluate(path=str(write(tmp_path / "held", format_, rows(90, 1))), every_steps=50),
        "reduction": "exact",
        "steps": 100,
    }
    return job(tmp_path, **{**settings, **changes})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, cluster: Cluster) -> Result:
    return Run(job_of(tmp_path_factory.mktemp("alone"), "arrow", workers=Workers(min=1))).finish()


@pytest.mark.parametrize(
    ("format_", "size"),
    [
        ("jsonl", 2),
        pytest.param("csv", 3, marks=SLOW),
        pytest.param("huggingface", 2, marks=SLOW),
        pytest.param("arrow", 2, marks=SLOW),
    ],
)
def test_every_format_trains_alike_through_a_kill(tmp_path: Path, alone: Result, format_: str, size: int) -> None:
    run = Run(job_of(tmp_path, format_, workers=Workers(min=1, max=size), args={"pad_s": 0.01}))
    run.until_size(size)
    run.until_step(20)
    run.kill(run.members()[-1])
    run.until_told("recovered")
    result = run.finish()
    assert (result.status, result.error) == ("finished", None)
    assert (result.state_sha256, result.metrics) == (alone.state_sha256, alone.metrics)
    found = audit(result.path)
    assert found.clean, found.faults
