"""The digits example: the data that it prepares, and that it learns from them."""

import hashlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from examples.digits import Digits, prepare
from raytrain_plus.data.paths.page_checksum import without_checksums
from raytrain_plus.job.yaml import load_job


def tables(folder: Path) -> dict[str, pa.Table]:
    for name in ("train", "held_out"):
        (folder / name).mkdir(parents=True)
        prepare(folder / name, name)
    return {name: pq.read_table(folder / name) for name in ("train", "held_out")}


def test_every_image_is_in_one_split_the_same_bytes_each_time(tmp_path: Path) -> None:
    found = tables(tmp_path / "first")
    assert {name: table.num_rows for name, table in found.items()} == {"train": 1437, "held_out": 360}
    for table in found.values():
        assert table.schema.field("pixels").type == pa.list_(pa.float32(), 64)
        assert table.schema.field("label").type == pa.int64()
    images = [tuple(row) for table in found.values() for row in table.column("pixels").to_pylist()]
    assert len(set(images)) == len(images) == 1797
    tables(tmp_path / "second")
    for name in found:
        one, two = (tmp_path / place / name / "digits.parquet" for place in ("first", "second"))
        assert hashlib.sha256(one.read_bytes()).digest() == hashlib.sha256(two.read_bytes()).digest()
        groups = pq.ParquetFile(one).metadata
        assert max(groups.row_group(index).num_rows for index in range(groups.num_row_groups)) == 64
        assert without_checksums([one]) == ()


def test_a_plain_loop_learns_them(tmp_path: Path) -> None:
    task = Digits()
    batches = {name: task.collate(table) for name, table in tables(tmp_path).items()}
    torch.manual_seed(0)
    model = task.model()
    assert any(isinstance(module, torch.nn.BatchNorm1d) for module in model.modules())
    assert any(isinstance(module, torch.nn.Dropout) for module in model.modules())
    optimizer = task.optimizer(model.named_parameters())
    rows = len(batches["train"]["label"])
    order = torch.Generator().manual_seed(0)
    for _ in range(10):
        for chosen in torch.randperm(rows, generator=order).split(96):
            optimizer.zero_grad()
            task.loss(model, {name: value[chosen] for name, value in batches["train"].items()}).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        told = task.evaluate(model, batches["held_out"])
    assert float(told["accuracy"]) > 0.95
    assert float(told["loss"]) < 0.25


def test_its_job_file_is_a_job() -> None:
    job, _ = load_job("jobs/digits.yaml")
    assert (job.data.shards, job.data.batch_size % 12, job.epochs) == (12, 0, 20)
