from __future__ import annotations

import threading
from pathlib import Path

import pytest

from raytrain_plus.data.order.sample_order import SampleOrder
from raytrain_plus.data.reading import unit_cache
from raytrain_plus.data.reading.reader import Batches
from raytrain_plus.data.reading.transform_block import RowReader
from raytrain_plus.data.reading.unit_cache import UnitCache
from raytrain_plus.data.sources.parquet_source import parquet_source
from tests.support.datasets import write


@pytest.fixture
def rows(tmp_path: Path) -> RowReader:
    write(tmp_path / "a.parquet", 64)
    source = parquet_source(tmp_path)
    order = SampleOrder(source.unit_rows, shards=1, batch_size=16, seed=0, epochs=1)
    return RowReader(source=source, sample_order=order, seed=0, transform=None, block_rows=8)


@pytest.mark.parametrize(("cache_mb", "again"), [(64, False), (0, True)])
def test_the_next_batches_read_only_what_is_not_in_memory(rows: RowReader, cache_mb: int, again: bool) -> None:
    cache = UnitCache(rows, cache_mb)
    reads = []
    for _ in range(2):
        feed = Batches(
            rows, shards=[0], first_step=0, microbatches=1, collate=len, cache=cache, make_stream=None
        )  # fmt: skip
        with feed:
            for step in range(rows.sample_order.steps):
                feed.get(step, 20)
        reads.append(feed.direct_reads)
    assert reads[0] > 0
    assert (reads[1] > 0) == again
    assert cache.complete != again
    assert not cache.lacking or again


def test_a_thread_waits_for_the_one_that_read_before(rows: RowReader) -> None:
    cache = UnitCache(rows, 64)
    may_end, second_reads = threading.Event(), threading.Event()

    def first() -> None:
        cache.begin()
        may_end.wait(20)

    def second() -> None:
        cache.begin()
        second_reads.set()

    one = threading.Thread(target=first)
    one.start()
    while cache._reading is not one:
        may_end.wait(0.001)
    other = threading.Thread(target=second)
    other.start()
    assert not second_reads.wait(0.1)
    may_end.set()
    assert second_reads.wait(20)
    one.join(20)
    other.join(20)


def test_a_thread_stuck_in_a_read_is_abandoned(rows: RowReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_cache, "JOIN_S", 0.05)
    cache = UnitCache(rows, 64)
    may_end = threading.Event()

    def stuck() -> None:
        cache.begin()
        may_end.wait(20)

    one = threading.Thread(target=stuck)
    one.start()
    while cache._reading is not one:
        may_end.wait(0.001)
    cache.begin()
    assert one.is_alive()
    may_end.set()
    one.join(20)
