"""Name rows by their place in the data's files, for people."""

from __future__ import annotations

import numpy as np

from raytrain_plus.data.order.mixed_order import AnyOrder
from raytrain_plus.data.sources.source import Index

NAMED = 8
"""Maximum number of rows that are named."""


def named_rows(data: Index, sample_order: AnyOrder, shard: int, start: int, rows: int) -> str:
    """Return the names of `rows` rows of a shard's own sequence, from position `start` on.

    Rows are counted from 0 in each row group: "rows 4, 17 of a.parquet, row group 0".
    """
    said, left = [], NAMED
    for row_range in sample_order.row_ranges_between(shard, start, start + rows):
        if not left:
            break
        order = sample_order.permutation(row_range.epoch, row_range.unit)
        count = min(left, row_range.rows)
        places = range(row_range.start, row_range.start + count)
        listed = [place if order is None else int(order[place]) for place in places]
        source, unit = data.owner(row_range.unit)
        if source.items is not None:
            listed = source.items.at(unit, np.array(listed)).tolist()
            said.append(f"{'item' if count == 1 else 'items'} {', '.join(map(str, listed))} of {source.named}")
            left -= count
            continue
        said.append(f"{'row' if count == 1 else 'rows'} {', '.join(map(str, listed))} of {data.name(row_range.unit)}")
        left -= count
    return "; ".join([*said, *[f"{rows - NAMED:,} more"] * (rows > NAMED)])


def file_and_row(data: Index, sample_order: AnyOrder, shard: int, position: int) -> tuple[str, str]:
    """Return the names of the file, and of the row in it, at a position of a shard's own sequence.

    A dataset that is read by index is one file.
    """
    [row_range] = sample_order.row_ranges_between(shard, position, position + 1)
    order = sample_order.permutation(row_range.epoch, row_range.unit)
    row = row_range.start if order is None else int(order[row_range.start])
    source, unit = data.owner(row_range.unit)
    file = source.named if source.items is not None else source.file(source.unit_file[unit])
    return str(file), named_row(data, row_range.unit, row)


def named_row(data: Index, unit: int, row: int) -> str:
    """Return the name of one row of a unit, counted in the file's order: "row 4 of a.parquet, row group 0".

    A row of image files is named by its file, and one of a dataset that is read by index by its item.
    """
    data, unit = data.owner(unit)
    if data.origin is not None and data.origin.format == "images":
        return data.origin.files[sum(data.unit_rows[:unit]) + row][0]
    if data.items is not None:
        return f"item {data.items.at(unit, np.array([row]))[0]} of {data.named}"
    return f"row {row} of {data.name(unit)}"
