"""`data.on_error` on a real cluster: bad images are left out alike by all workers, through a death, or end the run."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from ray.cluster_utils import Cluster

from raytrain_plus import Data, Evaluate, Job, Workers
from raytrain_plus.audit.audit import Audit, audit
from raytrain_plus.observe.views.summary import summary
from tests.integration.elastic import Run, job, raylets

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]

NO_IMAGE, TRUNCATED = 37, 151
"""Rows of the file."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with raylets(3) as cluster:
        yield cluster


def write_images(file: Path, rows: int, bad: bool) -> Path:
    rng = np.random.default_rng(rows)
    images = []
    for number in range(rows):
        out = io.BytesIO()
        pixels = rng.integers(0, 200, (24, 20, 3)) + 25 * (number % 3)
        Image.fromarray(pixels.astype(np.uint8)).save(out, "JPEG")
        images.append(out.getvalue())
    if bad:
        images[NO_IMAGE], images[TRUNCATED] = b"no image", images[TRUNCATED][:400]
    pq.write_table(pa.table({"image": images, "label": [row % 3 for row in range(rows)]}), file, row_group_size=50)
    return file


def job_of(tmp_path: Path, name: str, on_error: Any = "skip", **changes: Any) -> Job:
    train = write_images(tmp_path / "train.parquet", 200, bad=True)
    held_out = write_images(tmp_path / "held_out.parquet", 60, bad=False)
    table = pq.read_table(held_out)
    images = [*table.column("image").to_pylist()[:-1], None]
    pq.write_table(table.set_column(0, "image", pa.array(images, pa.binary())), held_out)
    data = Data(path=str(train), image_size=(8, 8), batch_size=48, shards=8, on_error=on_error)
    settings: dict[str, Any] = {"task": "tasks:Pictures", "data": data, "steps": 50, "reduction": "exact", **changes}
    evaluate = Evaluate(path=str(held_out), every_steps=25)
    return job(tmp_path, name=name, **{"evaluate": evaluate, **settings})


@pytest.mark.slow
def test_bad_images_are_skipped_alike_on_any_number_of_workers_through_a_death(tmp_path: Path) -> None:
    alone = Run(job_of(tmp_path, "alone", workers=Workers(min=1)))
    expected = alone.finish()
    assert (expected.status, expected.error) == ("finished", None)
    run = Run(job_of(tmp_path, "killed", workers=Workers(min=2, max=3), args={"fault": "applied:kill:20"}))
    result = run.finish()
    assert (result.status, result.error) == ("finished", None)
    assert len(run.events("recovered")) >= 1
    assert result.state_sha256 == expected.state_sha256
    assert result.metrics == expected.metrics
    for one in (expected, result):
        found = audit(one.path)
        assert_only_the_bad_rows_are_skipped(found)
        # 50 steps of 48 rows are 12 epochs of 200.
        assert (one.rows_skipped, one.samples) == (24, 2400 - 24)
        assert one.metrics["rows_skipped"] == 1
        assert any("24 skipped, which could not be used" in line for line in summary(one, None))
    told = sorted(event["text"] for event in run.events("noted") if "is skipped" in event["text"])
    assert len(told) == 2
    for row in (NO_IMAGE, TRUNCATED):
        assert any(f"row {row % 50} of " in one and f"row group {row // 50} is skipped" in one for one in told), told


def assert_only_the_bad_rows_are_skipped(found: Audit) -> None:
    assert found.clean, found.faults
    assert [(epoch.never, epoch.once, epoch.more, epoch.skipped) for epoch in found.epochs] == [(0, 198, 0, 2)] * 12
    assert (found.skipped.times, found.skipped.rows) == (24, 2)
    named = [f"row {row % 50} of train.parquet, row group {row // 50}" for row in (NO_IMAGE, TRUNCATED)]
    assert sorted(found.skipped.named) == sorted(named)
    assert {f"    {name}" for name in named} <= set(found.lines())
    assert found.lines()[-1] == "  every row that was due was used exactly once, or skipped"


def test_image_files_that_are_none_are_skipped_and_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder = tmp_path / "images"
    for number in range(40):
        file = folder / f"class{number % 3}" / f"{number:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (9, 9, 3)).astype(np.uint8)).save(file)
    whole = (folder / "class1" / "04.png").read_bytes()
    bad = {"class0/03.png": b"", "class1/10.png": b"<html>not found</html>", "class2/05.png": whole[: len(whole) // 2]}
    for name, content in bad.items():
        (folder / name).write_bytes(content)
    data = Data(path=str(folder), image_size=(8, 8), batch_size=40, shards=4, on_error="skip")
    job_of_images = job(tmp_path, name="images", task="tasks:Pictures", data=data, steps=3, workers=Workers(min=2))
    result = Run(job_of_images).finish()
    assert (result.status, result.error) == ("finished", None)
    found = audit(result.path)
    assert found.clean, found.faults
    assert (found.skipped.times, found.skipped.rows) == (9, 3)
    assert sorted(found.skipped.named) == sorted(str(folder / name) for name in bad)


@pytest.mark.slow
def test_stop_names_file_and_row(tmp_path: Path) -> None:
    run = Run(job_of(tmp_path, "stop", on_error="stop", workers=Workers(min=2), evaluate=None))
    result = run.finish()
    assert result.status == "failed"
    assert result.error is not None
    assert "train.parquet, row group" in result.error
    assert any(f"row {row % 50} of" in result.error for row in (NO_IMAGE, TRUNCATED))
    assert "holds an image that cannot be decoded" in result.error
