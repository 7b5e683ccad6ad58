"""Batches follow the sample order, streamed or read directly; a transform depends on the job alone."""

import contextlib
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raytrain_plus import Task
from raytrain_plus.data.ledger.ledger import ROW_ID
from raytrain_plus.data.order.sample_order import SampleOrder
from raytrain_plus.data.reading import reader
from raytrain_plus.data.reading.microbatches import cut
from raytrain_plus.data.reading.reader import NEVER, Batches, Counts, from_stream, held_out, held_out_counts
from raytrain_plus.data.reading.transform_block import RowReader, Transform, without_ids
from raytrain_plus.data.reading.unit_cache import UnitCache
from raytrain_plus.data.sources.parquet_source import ParquetSource, parquet_source
from raytrain_plus.errors import DataChanged, TrainingError, WaitExpired
from tests.support.datasets import ThreadStream, augment, await_stream, gather, noted, to_rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(3):
        values = pa.array(range(number * 100, number * 100 + 37), pa.int64())
        pq.write_table(pa.table({"x": values}), tmp_path / f"{number}.parquet", row_group_size=10)
    return tmp_path


def rows_of(
    folder: Path, *, transform=None, shards: int = 4, epochs: int = 3, granule: int = 4, each: int = 3
) -> RowReader:  # type: ignore[no-untyped-def]
    seen = parquet_source(folder)
    sample_order = SampleOrder(seen.unit_rows, shards=shards, batch_size=shards * each, seed=5, epochs=epochs)
    return RowReader(source=seen, sample_order=sample_order, seed=5, transform=transform, block_rows=granule)


def test_batches_follow_the_sample_order(folder: Path) -> None:
    rows = rows_of(folder)
    made, _ = gather(rows)
    for (step, shard), got in made.items():
        expected = [
            row for one in rows.sample_order.row_ranges(shard, step) for row in to_rows(without_ids(rows.read(one)))
        ]
        assert got == expected
    everything = sorted(value for got in made.values() for (value,) in got)
    assert everything == sorted([n * 100 + i for n in range(3) for i in range(37)] * 3)


@pytest.mark.parametrize("cache_mb", [0, 64])
@pytest.mark.parametrize("transform", [None, augment])
def test_streamed_and_direct_rows_are_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cache_mb: int, transform: object
) -> None:
    monkeypatch.setattr(reader, "lags", lambda waited_s, passed_s: True)
    # The stream starts after some steps: with one row of each shard in a step, before all units have been read.
    rows = rows_of(folder, transform=transform, each=1, epochs=4)
    direct, _ = gather(rows)
    streamed, feed = gather(rows, ThreadStream, cache_mb)
    assert streamed == direct
    assert feed.streamed_reads > 0


def test_rows_on_a_disk_that_are_kept_need_no_stream_unless_steps_wait_for_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(folder, each=1, epochs=20)
    made: list[ThreadStream] = []

    def stream(*arguments: Any, **settings: Any) -> ThreadStream:
        made.append(ThreadStream(*arguments, **settings))
        return made[-1]

    _, feed = gather(rows, stream, cache_mb=64)
    assert not made
    assert (feed.direct_reads, feed.streamed_reads) == (12, 0)
    # Not kept.
    gather(rows, stream)
    assert len(made) == 1

    def slowly(*arguments: Any) -> pa.Table:
        if threading.current_thread().name == "batches":
            time.sleep(0.05)
        return read(*arguments)

    read = ParquetSource.read_unit
    monkeypatch.setattr(ParquetSource, "read_unit", slowly)
    monkeypatch.setattr(reader, "LAG_S", 0.0)
    _, feed = gather(rows, stream, cache_mb=64)
    assert len(made) == 2
    assert feed.streamed_reads > 0


@pytest.mark.parametrize(
    ("waited_s", "passed_s", "expected"), [(0.9, 0.9, False), (0.3, 2.0, True), (0.2, 2.0, False), (0.0, 0.0, False)]
)
def test_lags(waited_s: float, passed_s: float, expected: bool) -> None:
    assert reader.lags(waited_s, passed_s) is expected


class LateStream(ThreadStream):
    """Take long to start, as Ray Data does on a busy machine."""

    may_start = threading.Event()

    def start(self) -> None:
        self.may_start.wait(10)


def test_no_batch_and_no_next_reader_waits_for_the_start_of_the_stream(folder: Path) -> None:
    rows = rows_of(folder)
    LateStream.may_start.clear()

    cache = UnitCache(rows, 0)

    def opened() -> Batches:
        return Batches(
            rows,
            shards=[0],
            first_step=0,
            microbatches=1,
            collate=to_rows,
            cache=cache,
            make_stream=LateStream,
        )

    try:
        with opened() as first:
            for step in range(12):
                first.get(step, 5)
        with opened() as second:
            second.get(0, 5)
    finally:
        LateStream.may_start.set()
    await_stream()


def test_a_stream_that_does_not_start_ends_the_batches(folder: Path) -> None:
    def broken(*arguments: object, **settings: object) -> object:
        raise TrainingError("no stream")

    with pytest.raises(TrainingError, match="no stream"):
        gather(rows_of(folder), broken)


class WaryStream(ThreadStream):
    """Leave out reads that fail, as Ray Data's tasks do."""

    def start(self) -> None:
        for group in self.groups:
            for read in group:
                with contextlib.suppress(DataChanged):
                    self.tables[read.number] = self.rows.read(read.row_range)
                self.delivered = read.number
        self.ended = True


@pytest.mark.parametrize("make_stream", [None, WaryStream])
def test_a_file_that_changes_ends_the_batches(folder: Path, make_stream: object) -> None:
    rows = rows_of(folder)
    os.utime(folder / "1.parquet", (1, 1))
    with pytest.raises(DataChanged, match=r"1\.parquet on \S+: the file changed while the run used it: its modifi"):
        gather(rows, make_stream)


def test_a_shard_that_moves_within_a_transform_block_sees_the_same_noise(folder: Path) -> None:
    rows = rows_of(folder, transform=augment)
    whole, _ = gather(rows)
    moved, _ = gather(rows, shards=(2,), first=5)
    assert moved == {key: value for key, value in whole.items() if key[0] >= 5 and key[1] == 2}


def test_another_transform_block_or_epoch_gives_other_noise(folder: Path) -> None:
    made, _ = gather(rows_of(folder, transform=augment))
    noise = [row[1] for got in made.values() for row in got]
    assert len(set(noise)) == len(noise)


@pytest.mark.parametrize("transform", [None, augment])
def test_each_row_is_changed_before_and_after_the_transform_and_keeps_its_id(
    folder: Path, transform: Transform | None
) -> None:
    def doubled(table: pa.Table) -> pa.Table:
        return table.set_column(0, "x", pa.array([2 * x for x in table.column("x").to_pylist()]))

    def named(table: pa.Table) -> pa.Table:
        return table.rename_columns(["y", *table.column_names[1:]])

    plain = rows_of(folder, transform=transform)
    changed = replace(plain, before=(doubled,), after=(named,))
    for row_range in plain.sample_order.row_ranges(2, 3):
        was, now = plain.read(row_range), changed.read(row_range)
        assert now.column("y").to_pylist() == [2 * x for x in was.column("x").to_pylist()]
        assert now.drop_columns("y").equals(was.drop_columns("x"))
    assert plain.as_read == (transform is None)
    assert not changed.as_read


def selects(table: pa.Table, rng: np.random.Generator) -> pa.Table:
    return table.take(rng.permutation(table.num_rows))


def test_functions_of_the_users_may_select_rows_with_images(tmp_path: Path) -> None:
    """Arrow selects other rows, without an error, from a slice of nested lists of fixed sizes."""
    flat = pa.array(np.repeat(np.arange(32), 6))
    column = pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(flat, 3), 2)
    pq.write_table(pa.table({"image": column, "row": range(32)}), tmp_path / "a.parquet", row_group_size=16)
    seen = parquet_source(tmp_path)
    sample_order = SampleOrder(seen.unit_rows, shards=1, batch_size=8, seed=5, epochs=1, shuffle="units")
    rows = RowReader(source=seen, sample_order=sample_order, seed=5, transform=selects, block_rows=4)

    def last_first(table: pa.Table) -> list[tuple[list[int], int]]:
        table = table.take(np.arange(table.num_rows)[::-1])
        return list(
            zip(np.array(table["image"].to_pylist()).reshape(-1, 6).tolist(), table["row"].to_pylist(), strict=True)
        )

    for transform in (None, selects):
        rows = replace(rows, transform=transform)
        given = pa.concat_tables(rows.read(part) for part in sample_order.row_ranges_between(0, 0, 32))
        found = [row for made in cut(given, 4, last_first) for row in made.batch]
        assert sorted(row for _, row in found) == list(range(32))
        assert all(image == [row] * 6 for image, row in found)


def test_a_transform_that_drops_rows_is_refused(folder: Path) -> None:
    rows = rows_of(folder, transform=lambda table, rng: table.slice(1))
    with pytest.raises(TrainingError, match=r"returned 3 rows for 4 rows \(transform block \d+ of .*must keep"):
        gather(rows)


@pytest.mark.parametrize("place", ["collate", "transform"])
@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_tasks_code_reaches_the_step(folder: Path, place: str, kind: type[BaseException]) -> None:
    def fails(*arguments: object) -> pa.Table:
        raise kind("label")

    rows = rows_of(folder, transform=fails if place == "transform" else None)
    collate = fails if place == "collate" else to_rows
    feed = Batches(
        rows, shards=[0], first_step=0, microbatches=1, collate=collate, cache=UnitCache(rows, 0), make_stream=None
    )
    with feed, pytest.raises(kind, match="label"):
        feed.get(0, 10)


def test_a_step_that_never_arrives_names_the_missing_data(folder: Path) -> None:
    gate = threading.Event()
    rows = rows_of(folder)
    feed = Batches(
        rows,
        shards=[0],
        first_step=0,
        microbatches=1,
        collate=lambda t: gate.wait(5),
        cache=UnitCache(rows, 0),
        make_stream=None,
    )
    with feed:
        with pytest.raises(WaitExpired, match="the data of step 0 did not arrive within"):
            feed.get(0, 0.05)
        gate.set()


def test_microbatches_split_a_shards_rows_and_the_last_takes_the_rest(folder: Path) -> None:
    seen = parquet_source(folder)
    sample_order = SampleOrder(seen.unit_rows, shards=2, batch_size=16, seed=0, epochs=1)
    rows = RowReader(source=seen, sample_order=sample_order, seed=0, transform=None, block_rows=8)
    feed = Batches(
        rows, shards=[0, 1], first_step=0, microbatches=4, collate=to_rows, cache=UnitCache(rows, 0), make_stream=None
    )
    with feed:
        steps = [feed.get(step, 10).shards[0] for step in range(sample_order.steps)]
    sizes = [[mb.rows for mb in made] for made in steps]
    assert [mb.start for mb in steps[1]] == [8, 10, 12, 14]
    assert sum(mb.ids for mb in steps[1]) % 2**64 == noted(rows, 1, 0)
    assert sizes[0] == [2, 2, 2, 2]
    assert sum(sizes[-1]) == sample_order.rows_in_step(0, sample_order.steps - 1)
    assert all(size == 2 for size in sizes[-1][:-1])


@pytest.mark.parametrize(
    ("number", "delivered", "ended", "silent_at", "expected"),
    [
        (0, -1, False, NEVER, False),  # Ray Data starts
        (3, 5, False, NEVER, True),  # it is here
        (6, 5, False, NEVER, True),  # it is the next to come
        (9, 5, False, NEVER, True),  # it is being worked on: nobody does the same work twice
        (9, 5, False, 5, False),  # a read has waited in vain
        (3, 5, False, 5, True),
        (9, 6, False, 5, True),  # it delivers again
        (6, 5, True, NEVER, False),  # nothing more comes
        (5, 5, True, NEVER, True),
    ],
)
def test_from_stream(number: int, delivered: int, ended: bool, silent_at: int, expected: bool) -> None:
    assert from_stream(number, delivered=delivered, ended=ended, silent_at=silent_at) is expected


class SilentStream(ThreadStream):
    """Deliver nothing."""

    waits = 0

    def start(self) -> None:
        # Nothing that any of the hosted shards needs.
        self.delivered = 0

    def take(self, number: int, timeout_s: float) -> None:
        type(self).waits += 1


def test_a_silent_stream_is_waited_for_once(folder: Path) -> None:
    rows = rows_of(folder)
    assert gather(rows, SilentStream)[0] == gather(rows)[0]
    assert SilentStream.waits == 1


def test_held_out_rows_are_used_once(folder: Path) -> None:
    seen = parquet_source(folder)
    sample_order = SampleOrder(seen.unit_rows, shards=4, batch_size=4, seed=0, shuffle="none", epochs=1)
    rows = RowReader(source=seen, sample_order=sample_order, seed=0, transform=None, block_rows=8)
    batches = [mb for shard in range(4) for mb in held_out(rows, shard, 5, to_rows)]
    assert [value for mb in batches for (value,) in mb.batch] == [n * 100 + i for n in range(3) for i in range(37)]
    assert max(mb.rows for mb in batches) == 5


def test_a_type_error_in_collate_shows_the_users_frames() -> None:
    table = pa.table({"x": ["a"]}).append_column(ROW_ID, pa.array([1], pa.uint64()))

    def collate(rows: pa.Table) -> object:
        return rows.num_rows + "1"

    with pytest.raises(TrainingError, match="cannot collate the rows into a batch: unsupported operand") as caught:
        cut(table, 1, collate)
    assert 'rows.num_rows + "1"' in caught.value.user_traceback
    # The default collate's error needs no traceback.
    with pytest.raises(TrainingError, match="column 'x' has type string") as caught:
        cut(table, 1, Task().collate)
    assert caught.value.user_traceback == ""


@pytest.mark.parametrize("lists", [[[1], [2, 3, 4]], [[1, 2], [3]]])
def test_lists_of_different_lengths_are_refused_whatever_their_sum(lists: list[list[int]]) -> None:
    """In the past [[1], [2, 3, 4]] became [[1, 2], [3, 4]]."""
    table = pa.table({"x": lists}).append_column(ROW_ID, pa.array([1, 2], pa.uint64()))
    with pytest.raises(TrainingError, match="column 'x' holds lists of different lengths"):
        cut(table, 2, Task().collate)
    # Each alone can be collated.
    assert [one.batch["x"].tolist() for one in cut(table, 1, Task().collate)] == [[lists[0]], [lists[1]]]


COLUMNS = {
    "number": pa.array(range(200), pa.int32()),
    "flag": pa.array([n % 3 == 0 for n in range(200)]),
    "fixed": pa.FixedSizeListArray.from_arrays(pa.array([float(n) for n in range(400)]), 2),
    "nested": pa.array([[[n], [n + 1]] for n in range(200)]),
}


@pytest.mark.parametrize(("shards", "batch_size", "microbatches"), [(1, 1, 1), (2, 4, 1), (3, 18, 2), (1, 64, 1)])
def test_steps_collated_at_once_are_the_same_as_one_by_one(
    tmp_path: Path, shards: int, batch_size: int, microbatches: int
) -> None:
    pq.write_table(pa.table(COLUMNS), tmp_path / "a.parquet", row_group_size=30)
    seen = parquet_source(tmp_path)
    order = SampleOrder(seen.unit_rows, shards=shards, batch_size=batch_size, seed=3, epochs=1)
    rows = RowReader(source=seen, sample_order=order, seed=0, transform=None, block_rows=8)
    default = Task().collate
    found = []
    for collate in (default, lambda table: default(table)):
        feed = Batches(
            rows, shards=range(shards), first_step=0, microbatches=microbatches, collate=collate,
            cache=UnitCache(rows, 9), make_stream=None,
        )  # fmt: skip
        with feed:
            found.append([feed.get(step, 20).shards for step in range(order.steps)])
    for together, alone in zip(*found, strict=True):
        assert together.keys() == alone.keys()
        for shard, microbatch in together.items():
            for one, other in zip(microbatch, alone[shard], strict=True):
                assert (one.rows, one.start, one.ids) == (other.rows, other.start, other.ids)
                assert one.batch.keys() == other.batch.keys() == COLUMNS.keys()
                assert all(torch.equal(one.batch[name], other.batch[name]) for name in COLUMNS)


def test_of_steps_collated_at_once_the_one_that_cannot_be_is_known(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [None if n == 37 else n for n in range(60)]}), tmp_path / "a.parquet")
    seen = parquet_source(tmp_path)
    order = SampleOrder(seen.unit_rows, shards=1, batch_size=3, seed=0, shuffle="none", epochs=1)
    rows = RowReader(source=seen, sample_order=order, seed=0, transform=None, block_rows=8)
    feed = Batches(
        rows,
        shards=(0,),
        first_step=0,
        microbatches=1,
        collate=Task().collate,
        cache=UnitCache(rows, 9),
        make_stream=None,
    )
    with feed:
        for step in range(12):
            feed.get(step, 20)
        with pytest.raises(TrainingError, match="column 'x' holds 1 null"):
            feed.get(12, 20)
    assert feed.failed == (12, 0)


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_counts_know_how_many_rows_the_others_read(folder: Path, microbatches: int) -> None:
    rows = rows_of(folder, epochs=1)
    counts = Counts(rows.sample_order, (2, 0, 1), microbatches)
    feed = Batches(
        rows,
        shards=(0, 1, 2),
        first_step=0,
        microbatches=microbatches,
        collate=to_rows,
        cache=UnitCache(rows, 0),
        make_stream=None,
    )
    with feed:
        for step in range(rows.sample_order.steps):
            read, counted = feed.get(step, 10).shards, counts.get(step, 10).shards
            assert {shard: [one.rows for one in some] for shard, some in read.items()} == {
                shard: [one.rows for one in some] for shard, some in counted.items()
            }
    assert all(one.batch is None for some in counted.values() for one in some)


@pytest.mark.parametrize("size", [1, 2, 4, 5, 100])
def test_counts_of_held_out_rows(folder: Path, size: int) -> None:
    rows = rows_of(folder, epochs=1)
    for shard in range(4):
        read = [one.rows for one in held_out(rows, shard, size, to_rows)]
        assert [one.rows for one in held_out_counts(rows.sample_order, shard, size)] == read


def test_batches_are_pinned_on_the_thread_that_makes_them(folder: Path) -> None:
    rows = rows_of(folder)
    threads = set()

    def pin(batch: list[tuple[object, ...]]) -> tuple[str, int]:
        threads.add(threading.current_thread().name)
        return "pinned", len(batch)

    feed = Batches(
        rows,
        shards=(0, 1),
        first_step=0,
        microbatches=1,
        collate=to_rows,
        cache=UnitCache(rows, 0),
        make_stream=None,
        pin=pin,
    )
    with feed:
        for step in range(rows.sample_order.steps):
            made = feed.get(step, 10).shards
            assert [one.batch for shard in made.values() for one in shard] == [
                ("pinned", one.rows) for shard in made.values() for one in shard
            ]
    assert threads == {"batches"}
