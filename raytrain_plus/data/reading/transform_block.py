"""Read and transform rows. A stream's tasks and the worker itself call the same code, so both get the same bytes.

`transform` gets transform blocks (`granule` in settings): a fixed maximum number of rows of one unit, divided at fixed
positions of the unit's row order in that epoch. Its generator is keyed by (seed, epoch, unit, block). So the call is
the same for every reader, wherever a span begins. If it draws from the generators of the process too, as torchvision's
transforms do, these are seeded with the block's key, in a process that does not train. What is done to each row by
itself, before and after the transform, may get any rows at once.

A row that one of these functions cannot use ends the run, or is left out (`RowReader.skip`): see `unusable`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain_plus.data.ledger.ledger import ROW_ID
from raytrain_plus.data.order.mixed_order import AnyOrder
from raytrain_plus.data.order.sample_order import RowRange, mix
from raytrain_plus.data.reading.unusable import FAULT, Judged, Places, RowByRow, all_of, joined, judge, judge_block
from raytrain_plus.data.sources.source import Source
from raytrain_plus.data.values.columns import selectable
from raytrain_plus.data.values.row_fault import RowFault
from raytrain_plus.errors import DataError, TrainingError

Transform = Callable[[pa.Table, np.random.Generator], pa.Table]
Between = Callable[[int, int], pa.Table]
"""Returns the rows [begin, end) of a unit, in the epoch's order."""
Again = Callable[[], Between]

_BLOCKS = 3
JUDGED = 8
"""Rows of a block by which it is judged whether a transform draws from the generators of the process."""


def without_ids(rows: pa.Table) -> pa.Table:
    """Return the rows without the columns of ids and faults, as they are in their files."""
    return rows.drop_columns([name for name in (ROW_ID, FAULT) if name in rows.column_names])


@dataclass(frozen=True, slots=True)
class RowReader:
    """Read the rows of a job. `block_rows`: the maximum rows of a transform block.

    `before` is applied to the rows that `transform` gets, in order, and `after` to those that it returns.
    """

    source: Source
    sample_order: AnyOrder
    seed: int
    transform: Transform | None
    block_rows: int
    before: tuple[RowByRow, ...] = ()
    after: tuple[RowByRow, ...] = ()
    skip: bool = False
    """Whether a row that cannot be used is returned with its fault, instead of raised; see `unusable.FAULT`."""
    draws: bool = False
    """Whether `transform` draws from the generators of the process."""
    elsewhere: Callable[[RowRange], pa.Table] | None = None
    """Reads in another process, if this one may not seed its generators."""

    @property
    def as_read(self) -> bool:
        """Whether nothing is done to rows once they are read."""
        return self.transform is None and not self.before and not self.after

    def fit(self, cache_mb: int) -> bool:
        """Return whether a worker may keep all rows in `cache_mb` megabytes of memory."""
        worth = self.as_read and not self.source.in_memory
        return worth and sum(self.source.unit_bytes) + 8 * self.source.rows <= cache_mb << 20

    def read(self, row_range: RowRange) -> pa.Table:
        """Return the rows of one range, with their ids."""
        if self.elsewhere is not None:
            return self.elsewhere(row_range)
        return self._cut(self._between(row_range), row_range)

    def cut(self, unit: pa.Table, row_range: RowRange) -> pa.Table:
        """Return the rows of one range, given its whole unit in the file's order.

        Raises `TrainingError` if `transform` does not keep the number of rows, and `DataError` for a row that is wrong,
        unless it is to be skipped.
        """
        return self._cut(self._between(row_range, unit), row_range)

    def _between(self, row_range: RowRange, unit: pa.Table | None = None) -> Between:
        """Return what returns rows of a range's unit, which is read now if it is not given."""
        permutation = self._permutation(row_range)
        if unit is None and self.source.owner(row_range.unit)[0].by_index:

            def of_items(begin: int, end: int) -> pa.Table:
                places = np.arange(begin, end) if permutation is None else permutation[begin:end]
                return self.source.read_rows(row_range.unit, places)

            return of_items
        whole = self.source.read_unit(row_range.unit) if unit is None else unit

        def between(begin: int, end: int) -> pa.Table:
            return whole.slice(begin, end - begin) if permutation is None else whole.take(permutation[begin:end])

        return between

    def _permutation(self, row_range: RowRange) -> npt.NDArray[np.int64] | None:
        return self.sample_order.permutation(row_range.epoch, row_range.unit)

    def _cut(self, between: Between, row_range: RowRange) -> pa.Table:
        """Return the rows of one range, given what returns rows of its unit."""
        made = self._judged if self.skip else self._made
        # The rows that fail are read once more, all from one further read of the unit.
        again = functools.cache(lambda: self._between(row_range))
        start, stop = row_range.start, row_range.start + row_range.rows
        if self.transform is None:
            return made(between, again, row_range, start, stop, None)
        parts = []
        for number in range(start // self.block_rows, (stop - 1) // self.block_rows + 1):
            begin = number * self.block_rows
            end = min(begin + self.block_rows, self.source.unit_rows[row_range.unit])
            parts.append(made(between, again, row_range, begin, end, number))
        return joined(parts)

    def _made(
        self,
        between: Between,
        again: Again,
        row_range: RowRange,
        begin: int,
        end: int,
        number: int | None,
    ) -> pa.Table:
        """Return those of the rows [begin, end) of a unit that are in the range.

        `number`: that of the transform block, if these rows are one. `again` reads the unit once more.
        """
        rows = between(begin, end)
        start, count = _overlap(row_range, begin, end)
        with self._naming(row_range, begin):
            made = _applied(self.before, rows)
            if number is not None:
                made = self._transformed(without_ids(made), row_range, number)
                made = made.append_column(ROW_ID, rows.column(ROW_ID))
        with self._naming(row_range, begin + start):
            return _applied(self.after, made.slice(start, count))

    def _judged(
        self,
        between: Between,
        again: Again,
        row_range: RowRange,
        begin: int,
        end: int,
        number: int | None,
    ) -> pa.Table:
        """Return the same as `_made`, with the faults of rows that cannot be used."""
        start, count = _overlap(row_range, begin, end)
        rows = between(begin, end)
        ids = rows.column(ROW_ID)

        def once_more(place: int) -> pa.Table:
            return without_ids(again()(begin + place, begin + place + 1))

        functions = self.before if number is not None else (*self.before, *self.after)
        with self._naming(row_range, begin):
            found = judge(functions, without_ids(rows), once_more)
        if number is None:
            return found.spread(ids)

        def blocks(usable: pa.Table, places: Places) -> Judged:
            def prepared(place: int) -> pa.Table:
                return all_of(self.before, once_more(int(places[place])))

            return judge_block(lambda some: self._transformed(some, row_range, number), usable, prepared)

        with self._naming(row_range, begin):
            found = found.then(blocks).within(start, count)
        with self._naming(row_range, begin + start):
            found = found.then(lambda made, _: judge(self.after, made, lambda place: made.slice(place, 1)))
        return found.spread(ids.slice(start, count))

    @contextmanager
    def _naming(self, row_range: RowRange, begin: int) -> Iterator[None]:
        """Name the row of a `RowFault` that is raised inside, given the place in the epoch's order of the first row."""
        try:
            yield
        except RowFault as fault:
            place, permutation = begin + fault.row, self._permutation(row_range)
            row = place if permutation is None else int(permutation[place])
            raise DataError(fault.what, self.source.name_rows(row_range.unit, [row]), remedy=fault.remedy) from fault

    def _transformed(self, rows: pa.Table, row_range: RowRange, number: int) -> pa.Table:
        """Return what `transform` makes of rows of a block, without ids, with the block's generator."""
        assert self.transform is not None
        key = mix(self.seed, _BLOCKS, row_range.epoch, row_range.unit, number)
        with _seeded(key) if self.draws else nullcontext():
            made = self.transform(selectable(rows), np.random.Generator(np.random.PCG64(key)))
        if not isinstance(made, pa.Table) or made.num_rows != rows.num_rows:
            got = f"{made.num_rows} rows" if isinstance(made, pa.Table) else type(made).__name__
            raise TrainingError(
                f"data.transform returned {got} for {rows.num_rows} rows (transform block {number} of "
                f"{self.source.name(row_range.unit)}); it must keep the number of rows: filter in data.prepare instead"
            )
        return made


def _seeded(key: int) -> AbstractContextManager[None]:
    # It loads torch, which the controller does without.
    from raytrain_plus.generators import seeded

    return seeded(key)


def with_draws(rows: RowReader) -> RowReader:
    """Return the same, with whether `transform` draws from the generators of the process, judged by the first rows."""
    if rows.transform is None:
        return rows
    from raytrain_plus.generators import draws

    # A few rows of each source, which a worker reads before it can join.
    few, found = replace(rows, block_rows=JUDGED), dict[int, RowRange]()
    for one in rows.sample_order.row_ranges_between(0, 0, rows.sample_order.rows_in_step(0, 0)):
        found.setdefault(id(rows.source.owner(one.unit)[0]), replace(one, rows=1))
    return replace(rows, draws=any(draws(functools.partial(few.read, one)) for one in found.values()))


def _overlap(row_range: RowRange, begin: int, end: int) -> tuple[int, int]:
    """Return the first of the rows [begin, end) that is in the range, counted from `begin`, and how many are."""
    start = max(row_range.start, begin)
    return start - begin, min(row_range.start + row_range.rows, end) - start


def _applied(functions: Sequence[RowByRow], rows: pa.Table) -> pa.Table:
    """Return what these functions make of rows, one after the other; the rows keep their ids."""
    if not functions:
        return rows
    return all_of(functions, without_ids(rows)).append_column(ROW_ID, rows.column(ROW_ID))
