"""The held-out rows of an evaluation: all of them, or batches that the seed draws, the same in each evaluation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus import Data, Evaluate, Job
from raytrain_plus.data.dataset import both_data
from raytrain_plus.data.of_job import evaluation_order_of, held_out_rows_of
from raytrain_plus.data.reading.reader import held_out, held_out_counts
from raytrain_plus.data.sources.parquet_source import parquet_source
from tests.support.datasets import to_rows, write

ROWS = 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("rows")
    for number in range(4):
        write(found / f"{number}.parquet", ROWS // 4, start=number * ROWS // 4, group=25)
    return found


def job_of(folder: Path, batches: int | None, *, seed: int = 0, shards: int = 4, each: int = 3) -> Job:
    return Job(
        name="x",
        task="t:T",
        data=Data(path=str(folder), batch_size=shards * each, shards=shards),
        steps=1,
        seed=seed,
        evaluate=Evaluate(path=str(folder), every_steps=5, batches=batches),
    )


def used(job: Job, shards: range | None = None) -> list[int]:
    """Return the rows that a worker with these shards, or one with all of them, evaluates."""
    rows = held_out_rows_of(job, parquet_source(job.data.path), None)
    own = range(job.data.shards) if shards is None else shards
    return [row for shard in own for one in held_out(rows, shard, 3, to_rows) for (row,) in one.batch]


@given(st.integers(1, 60), st.integers(0, 2**32), st.sampled_from([1, 3, 6]), st.integers(1, 4))
def test_the_drawn_rows_are_the_same_on_one_and_on_three_workers(
    folder: Path, batches: int, seed: int, shards: int, each: int
) -> None:
    job = job_of(folder, batches, seed=seed, shards=shards, each=each)
    alone = used(job)
    third = -(-shards // 3)
    apart = [row for worker in range(3) for row in used(job, range(worker * third, min(shards, (worker + 1) * third)))]
    assert apart == alone == used(job)
    assert len(alone) == len({*alone}) == min(ROWS, batches * shards * each)


def test_the_seed_draws_them_from_everywhere(folder: Path) -> None:
    drawn = used(job_of(folder, 10))
    assert drawn != used(job_of(folder, 10, seed=1))
    assert np.histogram(drawn, 4, (0, ROWS))[0].min() > 0


def test_without_batches_or_with_too_many_all_rows_are_used_in_their_order(folder: Path) -> None:
    assert used(job_of(folder, None)) == list(range(ROWS))
    assert used(job_of(folder, 10_000)) == list(range(ROWS))


def test_whoever_needs_no_rows_counts_as_many(folder: Path) -> None:
    job = job_of(folder, 7)
    order = evaluation_order_of(job, parquet_source(folder))
    for shard in range(4):
        rows = held_out_rows_of(job, parquet_source(folder), None)
        read = [one.rows for one in held_out(rows, shard, 3, to_rows)]
        assert [one.rows for one in held_out_counts(order, shard, 3)] == read == [3] * 7


def test_drawn_windows_are_from_anywhere_in_their_file(tmp_path: Path) -> None:
    np.arange(10_000, dtype=np.uint16).tofile(tmp_path / "val.bin")
    path = str(tmp_path / "val.bin")
    job = Job(
        name="x",
        task="t:T",
        data=Data(path=path, format="uint16", windows=8, batch_size=32, shards=4),
        steps=1,
        evaluate=Evaluate(path=path, every_steps=5, batches=4),
    )
    _, tested = both_data(job, [])
    assert tested is not None
    rows = held_out_rows_of(job, tested, None)
    begins = [x[0] for shard in range(4) for one in held_out(rows, shard, 8, to_rows) for x, _ in one.batch]
    assert len({*begins}) == 128
    assert np.histogram(begins, 8, (0, 10_000))[0].min() > 5
