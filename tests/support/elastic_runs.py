"""Runs of other formats, sharded, rescaled, drained, and the undisturbed ones."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any, Literal

import psutil
import pyarrow as pa
import pytest
from ray.cluster_utils import Cluster

from raytrain_plus import Data, Evaluate, Job, Parallel, Result, Workers
from raytrain_plus.audit.audit import audit
from raytrain_plus.ray_compat import drain_node
from tests.integration.elastic import Run, job
from tests.integration.sources import HELD_OUT, TRAINED, rows

PAD_S = 0.02


def losses_of_an_undisturbed_run(tmp_path: Path, **changes: Any) -> list[float]:
    run = Run(job(tmp_path, name="undisturbed", workers=Workers(min=2), **changes))
    assert run.finish().status == "finished"
    return run.losses()


def drain(cluster: Cluster, node: str, seconds: float) -> None:
    """Drain a node in Ray, as a cloud's notice does."""
    assert drain_node(cluster.address, node, "taken back", time.time() + seconds)


def alive(pid: int) -> bool:
    """Return whether a process runs. After a drain the raylet ends, so its children may stay zombies."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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
    if format_ == "lance":
        lance = pytest.importorskip("lance")
        lance.write_dataset(pa.Table.from_pylist(made), str(path / "rows.lance"), max_rows_per_file=250)
        return path / "rows.lance"
    table = pa.Table.from_pylist(made)
    with pa.OSFile(str(path / "data-00000-of-00001.arrow"), "wb") as out, pa.ipc.new_stream(out, table.schema) as to:
        to.write_table(table, 50)
    if format_ == "huggingface":
        (path / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    return path


def job_of(tmp_path: Path, format_: str, shuffle: Literal["none", "rows"] = "rows", **changes: Any) -> Job:
    tmp_path.mkdir(exist_ok=True)
    settings: dict[str, Any] = {
        "task": "tasks:Tabular",
        "data": Data(
            path=str(write(tmp_path / "data", format_, rows(TRAINED, 0))), batch_size=48, shards=8, shuffle=shuffle
        ),
        "evaluate": Evaluate(path=str(write(tmp_path / "held", format_, rows(HELD_OUT, 1))), every_steps=50),
        "reduction": "exact",
        "steps": 100,
    }
    return job(tmp_path, **{**settings, **changes})


def many(size: int) -> dict[str, Any]:
    """Return the settings of a run that grows to so many workers, and lasts until one of them is killed."""
    return {"workers": Workers(min=1, max=size), "args": {"pad_s": 0.01}}


def check_alike_through_a_kill(of: Job, size: int, expected: Result) -> Result:
    """Kill a worker of a run, and check that it ends with the expected bits and metrics, and a clean audit."""
    run = Run(of)
    run.until_size(size)
    run.until_step(20)
    run.kill(run.members()[-1])
    run.until_told("recovered")
    result = run.finish()
    assert (result.status, result.error) == ("finished", None)
    assert (result.state_sha256, result.metrics) == (expected.state_sha256, expected.metrics)
    found = audit(result.path)
    assert found.clean, found.faults
    return result


SHARDED, FULL = Parallel(sharded="optimizer"), Parallel(sharded="full")


def exact(tmp_path: Path, name: str, **changes: Any) -> Job:
    data = Data(path=str(tmp_path / "data"), batch_size=36, shards=12, cache_mb=0)
    held_out = Evaluate(path=str(tmp_path / "data"), every_steps=15)
    settings = {"data": data, "steps": 30, "reduction": "exact", "evaluate": held_out, "parallel": SHARDED}
    return job(tmp_path, name=name, **{**settings, **changes})
