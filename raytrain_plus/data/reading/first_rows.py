"""Read the first rows of a job, on which a task is tried before it trains."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pyarrow as pa

from raytrain_plus.data.reading.microbatches import Collate, Microbatch, cut, microbatch_rows
from raytrain_plus.data.reading.transform_block import RowReader
from raytrain_plus.data.reading.unusable import faults_of, joined, usable
from raytrain_plus.errors import DataError

TRIED = 16
"""How many times the rows of a first microbatch are searched for as many usable ones."""


def first_microbatch(rows: RowReader, microbatches: int, collate: Collate) -> Microbatch:
    """Return the first microbatch of shard 0 in step 0."""
    return microbatch_of(first_rows(rows, microbatch_rows(rows.sample_order, microbatches)), collate)


def first_rows(rows: RowReader, count: int) -> pa.Table:
    """Return the first `count` rows of shard 0, or its rows of step 0 if these are fewer.

    Rows that cannot be used are left out, and later ones take their place. Raises `DataError` if there are none.
    """
    order = rows.sample_order
    count = min(count, order.rows_in_step(0, 0))
    found: list[pa.Table] = []
    for begin in itertools.count(0, count):
        read = joined([rows.read(row_range) for row_range in order.row_ranges_between(0, begin, begin + count)])
        found.append(usable(read))
        have = sum(table.num_rows for table in found)
        if have >= count:
            return pa.concat_tables([table for table in found if table.num_rows]).slice(0, count)
        if begin >= TRIED * count:
            raise _none_usable(rows, begin + count, faults_of(read))
    raise AssertionError("count ends by itself")


def _none_usable(rows: RowReader, tried: int, faults: Mapping[int, str]) -> DataError:
    why = next(iter(faults.values()))
    return DataError(
        f"of the first {tried:,} rows of shard 0, data.on_error: skip leaves too few to try the task: {why}",
        where=rows.source.named,
        remedy="correct data.transform if the mistake is there, or remove such rows from the data",
    )


def microbatch_of(table: pa.Table, collate: Collate) -> Microbatch:
    """Return all rows as one microbatch. Raises `TrainingError` if they cannot be collated."""
    return cut(table, table.num_rows, collate)[0]
