"""Find the rows that a function of rows cannot use: the setting `data.on_error: skip`.

A row that fails is read and tried once more before it is left out, so a failure that does not happen again leaves
nothing out. A failure that may not be the row's own is raised: an input or output error of the operating system, a lack
of memory, a missing package.

Who calls what for a block of rows, with the same generator in each call:

    transform(block) raises           if it is a `RowFault`, the row is known: try it alone
                                      else try each row of the block alone
    transform(row) raises             read the row again, and try it alone once more
    transform(row) raises again       the row is left out
    transform(block without these)    with a fresh generator: this is what the rows become

If no row fails alone, the block is tried once more, and what it raises then ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain_plus.data.ledger.ledger import ROW_ID
from raytrain_plus.data.values.row_fault import RowFault
from raytrain_plus.errors import RaytrainError, first_line

FAULT = "_raytrain_fault"
"""The column that says why a row cannot be used; null for rows that can.

The other columns of such a row repeat another row.
"""

RowByRow = Callable[[pa.Table], pa.Table]
"""Makes the same of each row whatever rows are beside it; gets and returns rows without ids. It must be picklable.

Raises `RowFault` for a row that is wrong."""
Again = Callable[[int], pa.Table]
"""Returns one of the rows at hand, given its place, as it is when it is read once more; without its id."""

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Judged:
    """Rows, some of them unusable."""

    rows: pa.Table
    """The others, without ids."""
    places: Places
    """Their places among all rows, in order."""
    faults: Mapping[int, str]
    """Place among all rows of one that cannot be used -> why."""

    def within(self, start: int, rows: int) -> Judged:
        """Return what is known of `rows` rows from place `start` on."""
        low, high = np.searchsorted(self.places, [start, start + rows]).tolist()
        faults = {place - start: why for place, why in self.faults.items() if start <= place < start + rows}
        return Judged(self.rows.slice(low, high - low), self.places[low:high] - start, faults)

    def then(self, judge: Callable[[pa.Table, Places], Judged]) -> Judged:
        """Return what is known after a further function: `judge` gets the usable rows and their places.

        The place of a `RowFault` that it raises is among all rows.
        """
        if not len(self.places):
            return self
        try:
            found = judge(self.rows, self.places)
        except RowFault as fault:
            raise fault.at(int(self.places[fault.row])) from fault.__cause__
        faults = {int(self.places[place]): why for place, why in found.faults.items()}
        return Judged(found.rows, self.places[found.places], {**self.faults, **faults})

    def spread(self, ids: pa.ChunkedArray) -> pa.Table:
        """Return all rows with their ids and the column `FAULT`; if none can be used, there are no other columns."""
        made = self.rows
        if not len(self.places):
            made = pa.table({})
        elif self.faults:
            sources = np.zeros(len(ids), np.int64)
            sources[self.places] = np.arange(len(self.places))
            made = picked(made, sources)
        why = pa.array([self.faults.get(place) for place in range(len(ids))], pa.string())
        made = pa.table({ROW_ID: ids}) if not made.num_columns else made.append_column(ROW_ID, ids)
        return made.append_column(FAULT, why)


def faults_of(rows: pa.Table) -> dict[int, str]:
    """Return why rows cannot be used, by their places; nothing if all can."""
    if FAULT not in rows.column_names or rows.column(FAULT).null_count == rows.num_rows:
        return {}
    return {place: why for place, why in enumerate(rows.column(FAULT).to_pylist()) if why is not None}


def usable(rows: pa.Table) -> pa.Table:
    """Return the rows that can be used."""
    if not (faults := faults_of(rows)):
        return rows
    return picked(rows, np.setdiff1d(np.arange(rows.num_rows), list(faults)))


def picked(rows: pa.Table, places: Places) -> pa.Table:
    """Return the rows at these places, most of which follow each other.

    Slices, because `take` and `filter` may give other rows (see `columns.selectable`), and slices need no copy.
    """
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1) if len(places) else []
    return pa.concat_tables([rows.slice(int(run[0]), len(run)) for run in runs]) if runs else rows.slice(0, 0)


def is_bare(rows: pa.Table) -> bool:
    """Return whether no row can be used, so that even the columns are unknown."""
    return tuple(rows.column_names) == (ROW_ID, FAULT)


def joined(tables: Sequence[pa.Table]) -> pa.Table:
    """Return the rows of all tables; those without columns get the columns of the others."""
    known = next((table for table in tables if not is_bare(table) and table.num_rows), None)
    if known is None or not any(map(is_bare, tables)):
        return pa.concat_tables(tables)
    return pa.concat_tables([_with_columns(table, known) if is_bare(table) else table for table in tables])


def _with_columns(bare: pa.Table, known: pa.Table) -> pa.Table:
    """Return rows, none of them usable, with the columns of a table that has rows."""
    repeated = picked(known, np.zeros(bare.num_rows, np.int64))
    for name in bare.column_names:
        repeated = repeated.set_column(repeated.schema.get_field_index(name), name, bare.column(name))
    return repeated


def judge(functions: Sequence[RowByRow], rows: pa.Table, again: Again) -> Judged:
    """Apply functions to rows, one after the other, and leave out those that they refuse twice. `rows`: without ids."""
    found: dict[int, pa.Table] = {}
    faults: dict[int, str] = {}
    # Each row passes twice at most: before a row that fails, and with the others of its part.
    left = [(0, rows.num_rows)]
    while left:
        begin, end = left.pop()
        if begin == end:
            continue
        try:
            found[begin] = all_of(functions, rows.slice(begin, end - begin))
        except RowFault as fault:
            place = begin + fault.row
            left += [(begin, place), (place + 1, end)]
            if not is_of_rows(fault):
                raise fault.at(place) from fault.__cause__
            try:
                found[place] = all_of(functions, again(place))
            except RowFault as second:
                if not is_of_rows(second):
                    raise second.at(place) from second.__cause__
                faults[place] = second.what
    parts = sorted(found.items())
    places = [np.arange(begin, begin + part.num_rows) for begin, part in parts]
    made = pa.concat_tables([part for _, part in parts]) if parts else rows.slice(0, 0)
    return Judged(made, np.concatenate(places) if places else np.empty(0, np.int64), faults)


def judge_block(transform: Callable[[pa.Table], pa.Table], rows: pa.Table, again: Again) -> Judged:
    """Apply a function to a block of rows, and leave out those for which it raises: see the module docstring.

    `transform` makes a generator of its own, the same in each call. Raises what it raises if no row alone is at fault.
    The place of a `RowFault` is among all rows.
    """
    places, faults, tried = np.arange(rows.num_rows), dict[int, str](), False
    while len(places):
        block = rows if len(places) == rows.num_rows else picked(rows, places)
        try:
            return Judged(transform(block), places, faults)
        except Exception as error:
            if isinstance(error, RowFault):
                error.row = int(places[error.row])
            if not is_of_rows(error):
                raise
            suspects = [error.row] if isinstance(error, RowFault) else places.tolist()
            wrong = {}
            for place in suspects:
                why = _fails_alone(transform, rows.slice(place, 1), place, again)
                if why is not None:
                    wrong[place] = why
            if not wrong and tried:
                raise
            tried = not wrong
            faults |= wrong
            places = np.setdiff1d(places, list(wrong))
    return Judged(rows.slice(0, 0), places, faults)


def is_of_rows(error: Exception) -> bool:
    """Return whether an error may say that a row cannot be used, rather than that reading it failed."""
    cause = error.__cause__ if isinstance(error, RowFault) and error.__cause__ is not None else error
    if isinstance(cause, (RaytrainError, MemoryError, ImportError)):
        return False
    # Pillow says so of a damaged image, without a number of the operating system.
    return not isinstance(cause, OSError) or (cause.errno is None and _raised_in(cause) == "PIL")


def _raised_in(error: BaseException) -> str:
    """Return the package whose code raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]


def _fails_alone(transform: Callable[[pa.Table], pa.Table], row: pa.Table, place: int, again: Again) -> str | None:
    """Return why a function cannot use a row alone, also after it is read again; None if it can."""
    why = ""
    for read in (lambda: row, lambda: again(place)):
        try:
            transform(read())
            return None
        except Exception as error:
            if not is_of_rows(error):
                raise
            why = _why(error)
    return why


def _why(error: Exception) -> str:
    if isinstance(error, RowFault):
        return error.what
    return f"data.transform raised {type(error).__name__}: {first_line(error)}"


def all_of(functions: Sequence[RowByRow], rows: pa.Table) -> pa.Table:
    """Return what functions make of rows, one after the other."""
    for function in functions:
        rows = function(rows)
    return rows
