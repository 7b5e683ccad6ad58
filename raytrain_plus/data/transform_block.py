"""Read and transform rows. A stream's tasks and the worker itself call the same code, so both get the same bytes.

`transform` gets transform blocks (`granule` in settings): a fixed maximum number of rows of one unit, divided at fixed
positions of the unit's row order in that epoch. Its generator is keyed by (seed, epoch, unit, block). So the call is
the same for every reader, wherever a span begins.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from raytrain_plus.data.ledger import ROW_ID
from raytrain_plus.data.sample_order import RowRange, SampleOrder, mix
from raytrain_plus.data.source import Index, read_unit
from raytrain_plus.errors import TrainingError

Transform = Callable[[pa.Table, np.random.Generator], pa.Table]

_BLOCKS = 3


def without_ids(rows: pa.Table) -> pa.Table:
    """Return the rows without the column of ids, as they are in their files."""
    return rows.drop_columns([ROW_ID])


@dataclass(frozen=True, slots=True)
class Rows:
    """Read the rows of a job. `block_rows`: the maximum rows of a transform block."""

    index: Index
    sample_order: SampleOrder
    seed: int
    transform: Transform | None
    block_rows: int

    def read(self, row_range: RowRange) -> pa.Table:
        """Return the rows of one range, with their ids."""
        return self.cut(read_unit(self.index, row_range.unit), row_range)

    def cut(self, unit: pa.Table, row_range: RowRange) -> pa.Table:
        """Return the rows of one range, given its whole unit in the file's order.

        Raises `TrainingError` if `transform` does not keep the number of rows.
        """
        permutation = self.sample_order.permutation(row_range.epoch, row_range.unit)
        if self.transform is None:
            if permutation is None:
                return unit.slice(row_range.start, row_range.rows)
            return unit.take(permutation[row_range.start : row_range.start + row_range.rows])
        first = row_range.start // self.block_rows
        last = (row_range.start + row_range.rows - 1) // self.block_rows
        parts = []
        for number in range(first, last + 1):
            begin = number * self.block_rows
            end = min(begin + self.block_rows, unit.num_rows)
            rows = unit.slice(begin, end - begin) if permutation is None else unit.take(permutation[begin:end])
            made = self._transformed(rows, row_range, number)
            start = max(row_range.start, begin)
            parts.append(made.slice(start - begin, min(row_range.start + row_range.rows, end) - start))
        return pa.concat_tables(parts)

    def _transformed(self, rows: pa.Table, row_range: RowRange, number: int) -> pa.Table:
        assert self.transform is not None
        rng = np.random.Generator(np.random.PCG64(mix(self.seed, _BLOCKS, row_range.epoch, row_range.unit, number)))
        made = self.transform(without_ids(rows), rng)
        if not isinstance(made, pa.Table) or made.num_rows != rows.num_rows:
            got = f"{made.num_rows} rows" if isinstance(made, pa.Table) else type(made).__name__
            raise TrainingError(
                f"data.transform returned {got} for {rows.num_rows} rows (transform block {number} of "
                f"{self.index.name(row_range.unit)}); it must keep the number of rows: filter in data.prepare instead"
            )
        return made.append_column(ROW_ID, rows.column(ROW_ID))
