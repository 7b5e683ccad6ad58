"""Name rows of a shard's sequence by their place in the data's files, for people."""

from __future__ import annotations

from raytrain_plus.data.order.mixed_order import AnyOrder
from raytrain_plus.data.sources.source import Source

NAMED = 8
"""Maximum number of rows that are named."""


def named_rows(data: Source, sample_order: AnyOrder, shard: int, start: int, rows: int) -> str:
    """Return the names of `rows` rows of a shard's own sequence, from position `start` on.

    As their source names them, such as "rows 4, 17 of a.parquet, row group 0", counted from 0.
    """
    said, left = [], NAMED
    for row_range in sample_order.row_ranges_between(shard, start, start + rows):
        if not left:
            break
        order = sample_order.permutation(row_range.epoch, row_range.unit)
        count = min(left, row_range.rows)
        places = range(row_range.start, row_range.start + count)
        listed = [place if order is None else int(order[place]) for place in places]
        said.append(data.name_rows(row_range.unit, listed))
        left -= count
    return "; ".join([*said, *[f"{rows - NAMED:,} more"] * (rows > NAMED)])


def file_and_row(data: Source, sample_order: AnyOrder, shard: int, position: int) -> tuple[str, str]:
    """Return the names of the file, and of the row in it, at a position of a shard's own sequence."""
    [row_range] = sample_order.row_ranges_between(shard, position, position + 1)
    order = sample_order.permutation(row_range.epoch, row_range.unit)
    row = row_range.start if order is None else int(order[row_range.start])
    return data.file_of(row_range.unit), data.name_rows(row_range.unit, [row])
