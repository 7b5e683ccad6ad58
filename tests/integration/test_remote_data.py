"""A job trains on data at an address with the bits that it has on the same files of a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from raytrain_plus import Data, Evaluate, Workers
from raytrain_plus.data.audit import audit
from raytrain_plus.storage.open import open_folder
from tests.integration.elastic import Run, job
from tests.integration.tasks import write_data
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
