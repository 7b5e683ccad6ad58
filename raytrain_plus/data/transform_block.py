"""Read and transform rows. A stream's tasks and the worker itself call the same code, so both get the same bytes.

`transform` gets transform blocks (`granule` in settings): a fixed maximum number of rows of one unit, divided at fixed
positions of the unit's row order in that epoch. Its generator is keyed by (seed, epoch, unit, block). So the call is
the same for every reader, wherever a span begins. What is done to each row by itself, before and after the transform,
may get any rows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain_plus.data.ledger import ROW_ID
from raytrain_plus.data.mixed_order import AnyOrder
from raytrain_plus.data.row_fault import RowFault
from raytrain_plus.data.row_names import named_row
from raytrain_plus.data.sample_order import RowRange, mix
from raytrain_plus.data.source import Index, read_places, read_unit
from raytrain_plus.errors import DataError, TrainingError

Transform = Callable[[pa.Table, np.random.Generator], pa.Table]
RowByRow = Callable[[pa.Table], pa.Table]
"""Makes the same of each row whatever rows are beside it; gets and returns rows without ids. It must be picklable.

Raises `RowFault` for a row that is wrong."""
Between = Callable[[int, int], pa.Table]
"""Returns the rows [begin, end) of a unit, in the epoch's order."""

_BLOCKS = 3


def without_ids(rows: pa.Table) -> pa.Table:
    """Return the rows without the column of ids, as they are in their files."""
    return rows.drop_columns([ROW_ID])


@dataclass(frozen=True, slots=True)
class Rows:
    """Read the rows of a job. `block_rows`: the maximum rows of a transform block.

    `before` is applied to the rows that `transform` gets, in order, and `after` to those that it returns.
    """

    index: Index
    sample_order: AnyOrder
    seed: int
    transform: Transform | None
    block_rows: int
    before: tuple[RowByRow, ...] = ()
    after: tuple[RowByRow, ...] = ()

    @property
    def as_read(self) -> bool:
        """Whether nothing is done to rows once they are read."""
        return self.transform is None and not self.before and not self.after

    def read(self, row_range: RowRange) -> pa.Table:
        """Return the rows of one range, with their ids."""
        if self.index.owner(row_range.unit)[0].items is None:
            return self.cut(read_unit(self.index, row_range.unit), row_range)
        permutation = self._permutation(row_range)

        def between(begin: int, end: int) -> pa.Table:
            places = np.arange(begin, end) if permutation is None else permutation[begin:end]
            return read_places(self.index, row_range.unit, places)

        return self._cut(between, row_range)

    def cut(self, unit: pa.Table, row_range: RowRange) -> pa.Table:
        """Return the rows of one range, given its whole unit in the file's order.

        Raises `TrainingError` if `transform` does not keep the number of rows, and `DataError` for a row that is wrong.
        """
        permutation = self._permutation(row_range)

        def between(begin: int, end: int) -> pa.Table:
            return unit.slice(begin, end - begin) if permutation is None else unit.take(permutation[begin:end])

        return self._cut(between, row_range)

    def _permutation(self, row_range: RowRange) -> npt.NDArray[np.int64] | None:
        return self.sample_order.permutation(row_range.epoch, row_range.unit)

    def _cut(self, between: Between, row_range: RowRange) -> pa.Table:
        """Return the rows of one range, given what returns rows of its unit."""
        if self.transform is None:
            stop = row_range.start + row_range.rows
            return _applied(self.after, self._prepared(between, row_range, row_range.start, stop))
        first = row_range.start // self.block_rows
        last = (row_range.start + row_range.rows - 1) // self.block_rows
        parts = []
        for number in range(first, last + 1):
            begin = number * self.block_rows
            end = min(begin + self.block_rows, self.index.unit_rows[row_range.unit])
            rows = self._prepared(between, row_range, begin, end)
            made = self._transformed(rows, row_range, number)
            start = max(row_range.start, begin)
            wanted = made.slice(start - begin, min(row_range.start + row_range.rows, end) - start)
            parts.append(_applied(self.after, wanted))
        return pa.concat_tables(parts)

    def _prepared(self, between: Between, row_range: RowRange, begin: int, end: int) -> pa.Table:
        """Return what `before` makes of the rows [begin, end) of the range's unit, in the epoch's order."""
        try:
            return _applied(self.before, between(begin, end))
        except RowFault as fault:
            place, permutation = begin + fault.row, self._permutation(row_range)
            row = place if permutation is None else int(permutation[place])
            raise DataError(fault.what, named_row(self.index, row_range.unit, row), remedy=fault.remedy) from fault

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


def _applied(functions: Sequence[RowByRow], rows: pa.Table) -> pa.Table:
    """Return what these functions make of rows, one after the other; the rows keep their ids."""
    if not functions:
        return rows
    made = without_ids(rows)
    for function in functions:
        made = function(made)
    return made.append_column(ROW_ID, rows.column(ROW_ID))
