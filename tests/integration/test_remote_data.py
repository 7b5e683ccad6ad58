"""A job trains on data at an address with the bits that it has on the same files of a disk, also once resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from raytrain_plus import Data, Evaluate, Job, Workers
from raytrain_plus.audit.audit import audit
from raytrain_plus.errors import DataError
from raytrain_plus.launch.runner import resume
from raytrain_plus.storage.folders.open import open_folder
from tests.integration.conftest import TASKS
from tests.integration.elastic import Run, job
from tests.integration.sources import HELD_OUT, rows
from tests.integration.tasks import write_data
from tests.support.elastic_runs import check_alike_through_a_kill, job_of, many, write
from tests.unit.storage.store import at, serving

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[str]:
    """The server of a bucket, whose keys are in the environment of a Ray; converted data is kept in the user's home."""
    with serving("rows") as (host, port), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path / "home"))
        ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        yield f"http://{host}:{port}"
        ray.shutdown()


def test_a_job_trains_on_remote_data_as_on_local_files(tmp_path: Path, bucket: str) -> None:
    data, away = write_data(tmp_path / "data"), open_folder(at("s3://rows", bucket))
    for file in data.iterdir():
        away.write(f"data/{file.name}", [file.read_bytes()])
    results = []
    for name, path, other, size in (
        ("local", str(data / "*.parquet"), str(data / "0.parquet"), 1),
        ("remote", at("s3://rows/data/*.parquet", bucket), at("s3://rows/data/0.parquet", bucket), 2),
    ):
        made = job(
            tmp_path,
            name=name,
            steps=60,
            data=Data(path=path, batch_size=48, shards=8),
            evaluate=Evaluate(path=other, every_steps=30),
            reduction="exact",
            workers=Workers(min=size, max=size),
        )
        results.append(Run(made).finish())
        assert (results[-1].status, results[-1].error) == ("finished", None)
        found = audit(results[-1].path)
        assert found.clean, found.faults
    local, remote = results
    assert (remote.state_sha256, remote.metrics) == (local.state_sha256, local.metrics)
    away.write("data/0.parquet", [(data / "1.parquet").read_bytes()])
    assert "0.parquet has changed" in " ".join(audit(remote.path).faults)


def test_a_run_on_remote_data_resumes_unless_an_object_has_changed(tmp_path: Path, bucket: str) -> None:
    data, away = write_data(tmp_path / "data"), open_folder(at("s3://rows", bucket))
    for file in data.iterdir():
        away.write(f"data/{file.name}", [file.read_bytes()])
    settings = {"reduction": "exact", "workers": Workers(min=2, max=2)}
    local = Data(path=str(data), batch_size=48, shards=8)
    expected = Run(job(tmp_path, name="local", steps=60, data=local, **settings)).finish()
    remote = Data(path=at("s3://rows/data", bucket), batch_size=48, shards=8)
    half = Run(job(tmp_path, name="remote", steps=25, data=remote, **settings)).finish()
    assert half.state_sha256 != expected.state_sha256
    whole = resume(half.path, ["steps=60"], quiet=True, roots=[TASKS])
    assert (whole.status, whole.state_sha256) == ("finished", expected.state_sha256)
    found = audit(whole.path)
    assert found.clean, found.faults
    away.write("data/0.parquet", [(data / "1.parquet").read_bytes()])
    with pytest.raises(DataError, match=r"the data has changed since the run started: 0\.parquet has"):
        resume(whole.path, ["steps=70"], quiet=True, roots=[TASKS])


def test_a_mix_of_remote_sources_trains_as_one_of_local_files_through_a_kill(tmp_path: Path, bucket: str) -> None:
    away = open_folder(at("s3://rows", bucket))
    local, remote = [], []
    for name, format_, count, weight in (("lines", "jsonl", 300, 2.0), ("table", "csv", 200, 1.0)):
        written = write(tmp_path / name, format_, rows(count, count))
        for file in (tmp_path / name).iterdir():
            away.write(f"{name}/{file.name}", [file.read_bytes()])
        below = written.relative_to(tmp_path)
        local.append({"path": str(written), "weight": weight})
        remote.append({"path": at(f"s3://rows/{below}", bucket), "weight": weight})
    held_out = Evaluate(path=str(write(tmp_path / "held out", "csv", rows(HELD_OUT, 1))), every_steps=50)

    def mixed(name: str, mix: list[dict[str, object]], **changes: object) -> Job:
        data = Data(mix=mix, batch_size=48, shards=8)
        return job_of(tmp_path / name, "arrow", data=data, evaluate=held_out, **changes)

    alone = Run(mixed("alone", local, workers=Workers(min=1, max=1))).finish()
    assert (alone.status, alone.error) == ("finished", None)
    found = audit(check_alike_through_a_kill(mixed("many", remote, **many(2)), 2, alone).path)
    assert {epoch.source for epoch in found.epochs} == {0, 1}
