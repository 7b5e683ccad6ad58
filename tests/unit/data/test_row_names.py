"""Rows are named by their place in the files."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_plus.data.order.sample_order import SampleOrder, Shuffle
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.data.sources.row_names import named_rows


def test_rows_are_counted_in_their_row_group(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": list(range(20))}), tmp_path / "a.parquet", row_group_size=10)
    seen = parquet_source(tmp_path)
    order = SampleOrder(seen.unit_rows, shards=2, batch_size=8, seed=0, shuffle="none", steps=9)
    file = tmp_path / "a.parquet"
    assert named_rows(seen, order, 1, 3, 1) == f"row 3 of {file}, row group 1"
    # The shard's own sequence goes on in the next epoch.
    assert named_rows(seen, order, 0, 8, 4) == f"rows 8, 9 of {file}, row group 0; rows 0, 1 of {file}, row group 0"
    assert named_rows(seen, order, 0, 0, 10) == f"rows 0, 1, 2, 3, 4, 5, 6, 7 of {file}, row group 0; 2 more"


@pytest.mark.parametrize("shuffle", ["rows", "units"])
def test_the_named_rows_are_those_that_are_read(tmp_path: Path, shuffle: Shuffle) -> None:
    pq.write_table(pa.table({"x": list(range(20))}), tmp_path / "a.parquet", row_group_size=20)
    seen = parquet_source(tmp_path)
    order = SampleOrder(seen.unit_rows, shards=2, batch_size=8, seed=3, shuffle=shuffle, steps=9)
    unit = seen.read_unit(0).column("x").to_pylist()
    [row_range] = order.row_ranges(1, 0)
    permutation = order.permutation(0, 0)
    read = unit if permutation is None else [unit[place] for place in permutation]
    wanted = read[row_range.start : row_range.start + 4]
    assert named_rows(seen, order, 1, 0, 4).startswith(f"rows {', '.join(map(str, wanted))} of ")
