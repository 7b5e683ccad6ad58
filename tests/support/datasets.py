"""Parquet files, jobs on them, and what a reader makes of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_plus.data.ledger.ledger import row_ids
from raytrain_plus.data.reading.reader import Batches
from raytrain_plus.data.reading.transform_block import RowReader
from raytrain_plus.data.reading.unit_cache import UnitCache
from raytrain_plus.data.sources.source import Source
from raytrain_plus.workers.preparation.data_check import same_data


def write(path: Path, rows: int, start: int = 0, group: int = 4, **columns: pa.Array) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"x": pa.array(range(start, start + rows), pa.int64()), **columns})
    pq.write_table(table, path, row_group_size=group)


def augment(table: pa.Table, rng: np.random.Generator) -> pa.Table:
    return pa.table({"x": table.column("x"), "noise": pa.array(rng.random(table.num_rows))})


def to_rows(table: pa.Table) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for row in table.to_pylist()]


def gather(
    rows: RowReader, make_stream=None, cache_mb: int = 0, shards: tuple[int, ...] = (0, 1, 2, 3), first: int = 0
):  # type: ignore[no-untyped-def]
    feed = Batches(
        rows,
        shards=shards,
        first_step=first,
        microbatches=1,
        collate=to_rows,
        cache=UnitCache(rows, cache_mb),
        make_stream=make_stream,
    )
    with feed:
        steps = []
        for step in range(first, rows.sample_order.steps):
            steps.append(feed.get(step, 10).shards)
            await_stream()
    for step, made in enumerate(steps):
        for shard, (only,) in made.items():
            assert (only.start, only.ids) == (
                (step + first) * rows.sample_order.per_shard,
                noted(rows, step + first, shard),
            )
    return {
        (step + first, shard): [row for mb in mbs for row in mb.batch]
        for step, made in enumerate(steps)
        for shard, mbs in made.items()
    }, feed


def await_stream() -> None:
    """Wait until a stream that a reader starts has started."""
    until = time.monotonic() + 10
    while any(thread.name == "start of the stream" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.001)


def ids_of(data: Source, unit: int) -> np.ndarray:
    """Return the ids of the rows of a unit, from the description of its files alone."""
    source, own = data.owner(unit)
    prefix = "" if len(data.parts) == 1 else f"{[one is source for one in data.parts].index(True)}/"
    units = [
        (file["path"], group, rows)
        for file in source.describe()["files"]
        for group, rows in enumerate(file["row_groups"])
        if rows
    ]
    path, group, rows = units[own]
    return row_ids(prefix + path, group, rows)


def seen_again(data: Source, *roots: Path) -> Source:
    """Return the same data as another worker sees it."""
    plan = SimpleNamespace(job=SimpleNamespace(data=SimpleNamespace(prepare=None, on_error="stop")), sights={})
    return same_data(plan, list(roots), data)  # type: ignore[arg-type]


def noted(rows: RowReader, step: int, shard: int) -> int:
    """Return the sum of the ids of the shard's rows in that step, modulo 2^64, computed independently of the reader."""
    total = 0
    for row_range in rows.sample_order.row_ranges(shard, step):
        unit = row_range.unit
        ids = ids_of(rows.source, unit)
        order = rows.sample_order.permutation(row_range.epoch, unit)
        places = range(len(ids)) if order is None else order.tolist()
        total += sum(int(ids[place]) for place in places[row_range.start : row_range.start + row_range.rows])
    return total % 2**64


class ThreadStream:
    """Replace Ray Data's stream: the same reads by a plain thread, in order."""

    def __init__(
        self, rows: RowReader, groups: Iterator[tuple[object, ...]], *, whole_units: bool, expected_rows: object
    ) -> None:
        self.rows, self.groups, self.whole_units = rows, groups, whole_units
        self.delivered, self.ended, self.tables = -1, False, {}
        self.news = threading.Condition()

    def start(self) -> None:
        for group in self.groups:
            for read in group:
                unit = read.row_range.unit
                table = self.rows.source.read_unit(unit) if self.whole_units else self.rows.read(read.row_range)
                self.tables[unit if self.whole_units else read.number] = table
                self.delivered = read.number
        self.ended = True

    def take(self, number: int, timeout_s: float) -> pa.Table:
        return self.tables.pop(number, None)

    def pass_by(self, number: int) -> None:
        self.tables.pop(number, None)

    def take_units(self) -> dict[int, pa.Table]:
        taken, self.tables = self.tables, {}
        return taken

    def close(self) -> None: ...
