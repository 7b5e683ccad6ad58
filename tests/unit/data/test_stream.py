"""The stream's guarantees to its reader, tested without Ray."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from raytrain_plus.data.order.reads import Read
from raytrain_plus.data.order.sample_order import RowRange, SampleOrder
from raytrain_plus.data.reading.stream import Stream, _numbered, _split
from raytrain_plus.data.reading.transform_block import RowReader
from raytrain_plus.data.sources.parquet_source import parquet_source
from tests.support.datasets import write


def stream() -> Stream:
    return Stream(cast(Any, None), [], whole_units=False, expected_rows=lambda read: 1, node="", roots=[])


def arrive(into: Stream, number: int) -> None:
    assert into._put(Read(number, 0, 0, RowRange(0, number, 0, 1)), pa.table({"x": [number]}))


def test_rows_that_cannot_be_read_are_left_to_the_reader(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / f"{name}.parquet", 4)
    seen = parquet_source(tmp_path)
    line = SampleOrder(seen.unit_rows, shards=1, batch_size=4, seed=0, epochs=1, shuffle="none")
    rows = RowReader(source=seen, sample_order=line, seed=0, transform=None, block_rows=4)
    os.utime(tmp_path / "a.parquet", (1, 1))
    group = tuple(Read(unit, 0, unit, RowRange(0, unit, 0, 4)) for unit in (0, 1))
    for whole_units in (False, True):
        [table] = _numbered(rows, group, whole_units)
        assert table.column("_raytrain_read").to_pylist() == [1] * 4


def test_a_read_that_arrived_is_taken_and_those_before_it_are_dropped() -> None:
    made = stream()
    for number in range(3):
        arrive(made, number)
    taken = made.take(1, 5)
    assert taken is not None
    assert taken.column("x").to_pylist() == [1]
    assert made.take(0, 5) is None
    assert list(made._arrived) == [2]


def test_take_does_not_wait_for_skipped_reads() -> None:
    made = stream()
    arrive(made, 0)
    made._begin_at(5)
    # A wait for them would outlast the test's time limit.
    assert made.take(3, 1000) is None
    assert made.take(4, 1000) is None
    assert made.delivered == 4


def test_a_stream_that_has_delivered_nothing_does_not_seem_to_be_ahead() -> None:
    made = stream()
    made._begin_at(5)
    assert made.delivered == -1


def test_an_execution_is_passed_when_the_reader_is_beyond_its_first_tasks() -> None:
    made = stream()
    groups = [tuple(Read(number, 0, 0, RowRange(0, 0, 0, 1)) for number in pair) for pair in ((3, 4), (5, 6), (7, 8))]
    made.pass_by(5)
    assert not made._is_passed(groups)
    made.pass_by(6)
    assert made._is_passed(groups)


def test_take_returns_when_the_read_arrives_and_when_the_stream_closes() -> None:
    made = stream()
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.extend([made.take(2, 5), made.take(3, 5)]))
    waiting.start()
    for number in range(3):
        arrive(made, number)
    made.close()
    waiting.join(5)
    assert [table and table.column("x").to_pylist() for table in got] == [[2], None]


def test_a_block_is_split_by_read() -> None:
    block = pa.table({"x": [1, 2, 3, 4], "_raytrain_read": [7, 7, 9, 9]})
    assert [(number, part.column("x").to_pylist()) for number, part in _split(block)] == [(7, [1, 2]), (9, [3, 4])]
    assert list(_split(block.slice(0, 0))) == []


def test_a_unit_that_is_kept_is_a_copy_of_its_part_of_a_block() -> None:
    flat = pa.array(range(48))
    column = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(flat, 3), 2)
    block = pa.table({"image": column, "_raytrain_read": [7] * 3 + [9] * 5})
    made = Stream(cast(Any, None), [], whole_units=True, expected_rows=lambda read: 1, node="", roots=[])
    for number, part in _split(block):
        assert made._put(Read(number, 0, 0, RowRange(0, number, 0, part.num_rows)), part)
    kept = made.take_units()
    assert kept[7]["image"].to_pylist() == column.to_pylist()[:3]
    assert kept[9]["image"].to_pylist() == column.to_pylist()[3:]
    assert kept[9].get_total_buffer_size() == 5 * 6 * 8
