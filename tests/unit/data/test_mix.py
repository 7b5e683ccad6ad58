"""A mix is read source by source, each of any format, and its batches are those of its order."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raytrain_plus import Data, Job, Task
from raytrain_plus.data.dataset import dataset, training_data
from raytrain_plus.data.of_job import data_paths, read_factor_of, rows_of, sample_order_of, source_shares
from raytrain_plus.data.reading.reader import Batches
from raytrain_plus.data.reading.transform_block import RowReader, Transform, without_ids
from raytrain_plus.data.reading.unit_cache import UnitCache
from raytrain_plus.data.sources.alike import check_alike
from raytrain_plus.data.sources.converted_source import class_names
from raytrain_plus.data.sources.differences import differences
from raytrain_plus.data.sources.mixed_source import mixed
from raytrain_plus.data.sources.parquet_source import check_restored, check_unchanged, parquet_source
from raytrain_plus.data.sources.row_names import named_rows
from raytrain_plus.data.sources.source import Source, check_enough, facts_of
from raytrain_plus.data.sources.tokenized_source import TokenizedSource
from raytrain_plus.data.values.tokens import TokenizerFile
from raytrain_plus.errors import DataChanged, DataError
from raytrain_plus.job.task_source import source_digests
from raytrain_plus.launch.machine_check import needs_of
from raytrain_plus.workers.preparation.data_check import check_data, same_data, sights_of
from tests.support.datasets import ThreadStream, augment, gather, ids_of, to_rows

ITEMS = """
import torch
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 31
    def __getitem__(self, at): return {"x": 3000 + at}
def numbers(): return Numbers()
"""


def write(folder: Path, first: int, rows: int) -> None:
    folder.mkdir()
    values = pa.array(range(first, first + rows), pa.int64())
    pq.write_table(pa.table({"x": values}), folder / "0.parquet", row_group_size=10)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """Two folders of Parquet, JSON Lines, and a dataset that is read by index."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write(tmp_path / "a", 0, 37)
    write(tmp_path / "b", 1000, 12)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "rows.jsonl").write_text("".join(f'{{"x": {2000 + row}}}\n' for row in range(23)))
    (tmp_path / "mixed_items.py").write_text(ITEMS)
    monkeypatch.syspath_prepend(tmp_path)
    mix = [
        {"path": str(tmp_path / "a"), "weight": 4},
        {"path": str(tmp_path / "b"), "weight": 1},
        {"path": str(tmp_path / "c"), "weight": 2},
        {"dataset": "mixed_items:numbers", "weight": 2},
    ]
    return Job(name="run", task="a:B", data=Data(mix=mix, batch_size=24, shards=4, granule=4), steps=20, seed=5)


def data_of(job: Job) -> Source:
    assert job.data.mix is not None
    return training_data(job, [Path(job.data.mix[0]["path"]).parent])


def rows_in(job: Job, transform: Transform | None = None) -> RowReader:
    return rows_of(job, data_of(job), transform)


@pytest.mark.parametrize("first", [0, 1, 7, 19])
@pytest.mark.parametrize("transform", [None, augment])
def test_batches_are_the_rows_of_the_order(job: Job, first: int, transform: Transform | None) -> None:
    rows = rows_in(job, transform)
    made, feed = gather(rows, first=first)
    assert feed.direct_reads > 0
    for step in range(first, 20):
        for shard in range(4):
            ranges = rows.sample_order.row_ranges(shard, step)
            assert made[step, shard] == [row for one in ranges for row in to_rows(without_ids(rows.read(one)))]
            assert len(made[step, shard]) == 6


@pytest.mark.parametrize("cache_mb", [0, 64])
@pytest.mark.parametrize("transform", [None, augment])
@pytest.mark.parametrize("first", [0, 3])
def test_streamed_and_direct_rows_of_a_mix_are_the_same(
    job: Job, cache_mb: int, transform: Transform | None, first: int
) -> None:
    rows = rows_in(replace(job, steps=60), transform)
    direct, _ = gather(rows, first=first)
    streamed, feed = gather(rows, ThreadStream, cache_mb, first=first)
    assert streamed == direct
    assert feed.streamed_reads > 0 or cache_mb


def test_steps_of_a_mix_collated_at_once_are_those_of_the_order(job: Job) -> None:
    rows = rows_in(replace(job, steps=60))
    feed = Batches(
        rows,
        shards=[0, 2],
        first_step=0,
        microbatches=1,
        collate=Task().collate,
        cache=UnitCache(rows, 0),
        make_stream=None,
    )
    sizes = []
    with feed:
        for step in range(60):
            for shard, (made,) in feed.get(step, 10).shards.items():
                ranges = rows.sample_order.row_ranges(shard, step)
                assert made.batch["x"].tolist() == [
                    x for one in ranges for (x,) in to_rows(without_ids(rows.read(one)))
                ]
                assert made.start == step * 6
                sizes.append(made.rows)
    assert sizes == [6] * 120


def test_fewer_shards_at_once_get_the_same_rows(job: Job) -> None:
    rows = rows_in(job)
    whole, _ = gather(rows)
    halves = {**gather(rows, shards=(0, 3))[0], **gather(rows, shards=(1, 2))[0]}
    assert halves == whole


def test_each_row_of_a_source_is_used_once_in_its_epoch(job: Job) -> None:
    # 480 rows, a ninth of which are 53.3: more than four epochs of 12 rows.
    made, _ = gather(rows_in(job))
    values = [value for step in range(20) for shard in range(4) for (value,) in made[step, shard]]
    counts = {
        number: [values.count(at) for at in numbers] for number, numbers in enumerate((range(37), range(1000, 1012)))
    }
    assert {*counts[0]} <= {5, 6}
    assert {*counts[1]} <= {4, 5}
    assert abs(sum(counts[0]) - 480 * 4 / 9) < 4


def test_ids_carry_the_source(job: Job) -> None:
    seen = data_of(job)
    ids = [seen.read_unit(unit).column("_raytrain_id").to_numpy() for unit in range(len(seen.unit_rows))]
    for unit, found in enumerate(ids):
        assert np.array_equal(found, ids_of(seen, unit))
    assert len(np.unique(np.concatenate(ids))) == 37 + 12 + 23 + 31
    files = [file["path"] for file in seen.describe()["files"]]
    assert (files[:2], files[-1]) == (["0/0.parquet", "1/0.parquet"], "3/mixed_items:numbers")


def test_what_a_mix_says_of_itself(job: Job, tmp_path: Path) -> None:
    seen = data_of(job)
    said = json.loads(json.dumps(seen.describe()))
    assert [source["rows"] for source in said["sources"]] == [37, 12, 23, 31]
    assert said["sources"][2]["converted_from"] == str(tmp_path / "c")
    assert "dataset" in said["sources"][3]
    assert (said["path"], said["rows"], seen.rows) == ("data.mix", 103, 103)
    assert differences(said, said) == []
    assert data_paths(job) == {f"data.mix[{number}].path": str(tmp_path / "abc"[number]) for number in range(3)}
    lines = [source.line() for source in source_shares(job, seen)]
    assert lines[1] == f"  source 1, {tmp_path / 'b'}: 12 rows, weight 1, 11.11 % of each step, 4.50 epochs"
    factor = read_factor_of(sample_order_of(job, seen), seen)
    assert factor is not None
    assert 1 <= factor < 3
    assert seen.name(0) == f"{tmp_path / 'a' / '0.parquet'}, row group 0"
    assert seen.name_rows(5, [1]) == f"row 1 of {tmp_path / 'b' / '0.parquet'}, row group 1"
    names = named_rows(seen, sample_order_of(job, seen), 1, 6, 6)
    assert f"of {tmp_path / 'a' / '0.parquet'}" in names
    assert "of mixed_items:numbers" in names


def test_differences_of_mixes(job: Job, tmp_path: Path) -> None:
    then = json.loads(json.dumps(data_of(job).describe()))
    assert differences({**then, "sources": then["sources"][:3]}, then) == ["data.mix has another number of sources"]
    assert differences(parquet_source(tmp_path / "a").describe(), then) == ["data.mix has another number of sources"]
    pq.write_table(pa.table({"x": [1, 2, 3]}), tmp_path / "b" / "0.parquet")
    (tmp_path / "mixed_items.py").write_text(ITEMS.replace("return 31", "return 32"))
    now = mixed([parquet_source(tmp_path / "a"), parquet_source(tmp_path / "b")]).describe()
    both = {**now, "sources": [*now["sources"], *then["sources"][2:]], "files": [*now["files"], *then["files"][2:]]}
    [changed] = differences(both, then)
    assert changed.startswith("1/0.parquet has ")
    items = then["sources"][3]["dataset"]
    fewer = {**then["sources"][3], "dataset": {**items, "length": 7}}
    assert differences({**then, "sources": [*then["sources"][:3], fewer]}, then) == ["source 3: it has 7 items, not 31"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"y": [1]}, r"column 'x' is missing; 1 of 2 sources differ from the first"),
        ({"x": ["007"]}, r"column 'x' is string; 1 of 2 sources differ from the first"),
        ({"x": [1], "z": [1]}, r"column 'z' is int64; 1 of 2 sources differ"),
    ],
)
def test_sources_with_other_columns_are_refused(tmp_path: Path, other: dict[str, list[object]], words: str) -> None:
    write(tmp_path / "a", 0, 3)
    (tmp_path / "b").mkdir()
    pq.write_table(pa.table(other), tmp_path / "b" / "0.parquet")
    with pytest.raises(DataError, match=words) as caught:
        mixed([parquet_source(tmp_path / "a"), parquet_source(tmp_path / "b")])
    assert caught.value.where == f"data.mix[1]: {tmp_path / 'b'}"
    assert f"as in data.mix[0]: {tmp_path / 'a'}" in str(caught.value)
    assert "or name those to read, with their types, in data.columns" in str(caught.value)


def test_a_source_needs_a_row_for_each_shard(tmp_path: Path) -> None:
    write(tmp_path / "a", 0, 30)
    write(tmp_path / "b", 0, 3)
    seen = mixed([parquet_source(tmp_path / "a"), parquet_source(tmp_path / "b")])
    check_enough(seen, 3)
    with pytest.raises(DataError, match=r"the data has 3 rows, fewer than data\.shards = 4") as caught:
        check_enough(seen, 4)
    assert caught.value.where == str(tmp_path / "b")
    check_alike(seen, parquet_source(tmp_path / "a"))


def test_a_changed_file_of_a_source_is_found(job: Job, tmp_path: Path) -> None:
    seen = data_of(job)
    check_unchanged(seen)
    file = tmp_path / "b" / "0.parquet"
    was = file.stat()
    os.utime(file, ns=(was.st_atime_ns, was.st_mtime_ns + 10**9))
    file.write_bytes(file.read_bytes()[:-1] + b"2")
    with pytest.raises(DataChanged, match="the file changed while the run used it") as caught:
        check_unchanged(seen)
    with pytest.raises(DataChanged):
        seen.read_unit(4)
    seen.read_unit(3)
    assert caught.value.first is not None
    with pytest.raises(DataError, match="has not been restored"):
        check_restored(seen, caught.value.first)


def plan_of(job: Job, seen: Source) -> SimpleNamespace:
    return SimpleNamespace(job=job, sights={}, data=seen, held_out=None)


def test_a_node_compares_each_source(job: Job, tmp_path: Path) -> None:
    seen = data_of(job)
    plan = plan_of(job, seen)
    here = same_data(plan, [tmp_path], seen)  # type: ignore[arg-type]
    assert (here, here.describe()) == (seen, seen.describe())
    assert sights_of(plan)[str(tmp_path / "b")] == here.parts[1].sights  # type: ignore[arg-type, attr-defined]
    check_data(plan)  # type: ignore[arg-type]
    pq.write_table(pa.table({"x": [1, 2, 3, 4, 5]}), tmp_path / "b" / "0.parquet")
    with pytest.raises(DataError, match=r"sees different data than the driver: 0\.parquet has ") as caught:
        same_data(plan, [tmp_path], seen)  # type: ignore[arg-type]
    assert caught.value.where == str(tmp_path / "b")


def test_machines_see_the_files_of_each_source(job: Job, tmp_path: Path) -> None:
    plan = SimpleNamespace(**vars(plan_of(job, data_of(job))), collective="torch")
    files = [tmp_path / "a" / "0.parquet", tmp_path / "b" / "0.parquet", tmp_path / "c" / "rows.jsonl"]
    needs = needs_of(SimpleNamespace(plan=plan), None)  # type: ignore[arg-type]
    assert needs.data == {str(file): file.stat().st_size for file in files}


def test_the_functions_of_a_mix_belong_to_the_tasks_source(job: Job, tmp_path: Path) -> None:
    assert set(source_digests(job, [tmp_path])) == {"mixed_items"}


def test_images_of_other_classes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for source, label in (("a", "cat"), ("a", "dog"), ("b", "cat"), ("b", "dog"), ("c", "cat"), ("c", "fox")):
        (tmp_path / source / label).mkdir(parents=True)
        Image.new("RGB", (2, 2)).save(tmp_path / source / label / "0.png")
    seen = {name: dataset(tmp_path / name, cache=tmp_path / "cache") for name in "abc"}
    assert class_names(mixed([seen["a"], seen["b"]])) == ["cat", "dog"]
    with pytest.raises(DataError, match="only one of two sources has images of dog, fox") as caught:
        mixed([seen["a"], seen["c"]])
    assert caught.value.where == f"data.mix[1]: {tmp_path / 'c'}"


def test_a_tokenizer_is_a_part_of_what_a_mix_is(job: Job) -> None:
    seen = data_of(job)
    file = TokenizerFile("somewhere", "0" * 64)
    other = TokenizedSource(**facts_of(seen), source=seen, tokenizer=file)
    assert differences(other.describe(), seen.describe()) == ["data.tokenizer has another content"]
