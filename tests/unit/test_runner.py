"""Whether a cluster can ever have the workers that a job asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("ray")

from raytrain_plus import Data, Job, Workers, runner
from raytrain_plus.errors import InputError, TaskError


def limits(monkeypatch: pytest.MonkeyPatch, workers: Workers, most: dict[str, float] | None) -> int:
    nodes = [{"Alive": True, "Resources": {"CPU": 2.0, "object_store_memory": 1.0}}]
    monkeypatch.setattr(runner.ray, "nodes", lambda: nodes)
    monkeypatch.setattr(runner, "most_there_can_be", lambda: most)
    job = Job(name="x", task="a:B", data=Data(path="d", batch_size=8), steps=1, workers=workers)
    return runner._limits(job, 1).minimum


@pytest.mark.parametrize(
    ("workers", "most"),
    [
        (Workers(min=2), None),
        (Workers(min=3), {"CPU": 4.0}),
        (Workers(min=3, spares=1), {"CPU": 4.0}),
        (Workers(min=1, gpus=1), {"CPU": 4.0, "GPU": 1.0}),
    ],
)
def test_what_is_there_or_may_come_is_enough(
    monkeypatch: pytest.MonkeyPatch, workers: Workers, most: dict[str, float] | None
) -> None:
    assert limits(monkeypatch, workers, most) == workers.min


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
def test_what_can_never_be_had_is_refused(
    monkeypatch: pytest.MonkeyPatch, workers: Workers, most: dict[str, float] | None, where: str
) -> None:
    with pytest.raises(InputError, match="the cluster has room for") as caught:
        limits(monkeypatch, workers, most)
    assert caught.value.where == where
    assert "its 1 nodes have: 2 CPU, 0 GPU" in caught.value.expected


def test_a_class_that_is_no_task_is_not_sent() -> None:
    job = Job(name="x", task=int, data=Data(path="d", batch_size=8), steps=1)
    with pytest.raises(TaskError, match="builtins:int is the class int"):
        runner._task_to_send(job, [])


def test_workers_that_are_never_formed_are_told_of_and_no_ray_is_started_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[int] = []

    def init(**settings: Any) -> None:
        started.append(settings["num_cpus"])
        raise OSError("no Ray in this test")

    monkeypatch.setattr(runner.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(runner.ray, "init", init)
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
    assert "warning: at most 8 of workers.max = 1000000000 are formed: with data.shards = 8" in capsys.readouterr().err
