"""Read the entries of a run's ledger, and find those that are missing, repeated or undue, for the audit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_plus.audit.audit_faults import Faults
from raytrain_plus.audit.audit_order import ExpectedOrder, Ints
from raytrain_plus.errors import first_line
from raytrain_plus.storage.interface import Folder

_NUMBERS = ("generation", "step", "shard", "start", "rows")
_SUMS = ("ids", "step_ids")
_COLUMNS = (*_NUMBERS, *_SUMS)
_LATER = {"skipped": pa.int64(), "skipped_rows": pa.list_(pa.int64())}
"""The columns that parts without a skipped row lack, such as all of an older version."""
ENTRY = np.dtype(
    [
        *((name, "<i8") for name in _NUMBERS),
        *((name, "<u8") for name in _SUMS),
        ("summed", "?"),
        ("skipped", "<i8"),
        ("skipped_rows", "O"),
    ]
)
"""A row of the ledger; `summed`: whether the row holds its step's sum; `skipped_rows`: a list, or None."""
_SCHEMA = pa.schema(
    [
        *((name, pa.int64()) for name in _NUMBERS),
        *((name, pa.uint64()) for name in _SUMS),
        *_LATER.items(),
    ]
)


def read_entries(run: Folder, names: Iterable[str], faults: Faults) -> npt.NDArray[Any]:
    """Return the rows of the ledger's parts; parts that cannot be read become faults."""
    parts: list[npt.NDArray[Any]] = []
    torn = []
    for name in names:
        try:
            file = pa.BufferReader(run.read(name))
            table = _read(file).cast(_SCHEMA)
            if any(table.column(column).null_count for column in _COLUMNS[:-1]):
                raise ValueError("a column has nulls")
            summed = table.column("step_ids").is_valid().to_numpy()
            for column in ("step_ids", "skipped"):
                filled = table.column(column).fill_null(0)
                table = table.set_column(table.schema.get_field_index(column), column, filled)
        except (OSError, pa.ArrowException, KeyError, ValueError) as error:
            torn.append(f"{name} cannot be read: {first_line(error)}")
            continue
        part = np.empty(table.num_rows, ENTRY)
        for column in (*_COLUMNS, "skipped"):
            part[column] = table.column(column).to_numpy()
        skipping = table.column("skipped_rows").is_valid().to_numpy()
        for row in np.flatnonzero(skipping).tolist():
            part["skipped_rows"][row] = table.column("skipped_rows")[row].as_py()
        part["summed"] = summed
        parts.append(part)
    faults.add(*torn)
    return np.concatenate(parts) if parts else np.empty(0, ENTRY)


def _read(file: pa.BufferReader) -> pa.Table:
    """Return the columns of a part of the ledger; those that it lacks hold nulls."""
    parquet = pq.ParquetFile(file, page_checksum_verification=True)
    lacking = [name for name in _LATER if name not in parquet.schema_arrow.names]
    table = parquet.read(columns=[name for name in _SCHEMA.names if name not in lacking])
    for name in lacking:
        table = table.append_column(name, pa.nulls(table.num_rows, _LATER[name]))
    return table.select(_SCHEMA.names)


def only_due(entries: npt.NDArray[Any], expected: ExpectedOrder, due_to: int, faults: Faults) -> npt.NDArray[Any]:
    """Return the entries of due steps and existing shards; report the others."""
    fits = (entries["step"] >= 0) & (entries["step"] <= due_to)
    fits &= (entries["shard"] >= 0) & (entries["shard"] < expected.shards)
    strange = entries[~fits]
    strange = strange[np.lexsort((strange["step"], strange["shard"]))]
    runs = _Runs(strange["shard"], strange["step"])
    faults.add_many(len(runs), (f"{which} was never due" for which, _, _ in runs))
    return entries[fits]


def find_doubled_and_missing(entries: npt.NDArray[Any], expected: ExpectedOrder, due_to: int, faults: Faults) -> None:
    """Report each shard's steps up to `due_to` that have several entries, or none."""
    keys = entries["shard"] * (due_to + 1) + entries["step"]
    values, counts = np.unique(keys, return_counts=True)
    doubled = values[counts > 1]
    missing = np.setdiff1d(np.arange((due_to + 1) * expected.shards), values, assume_unique=True)
    for found, what in ((doubled, "is in the ledger more than once"), (missing, "is missing from the ledger")):
        runs = _Runs(found // (due_to + 1), found % (due_to + 1))
        faults.add_many(
            len(runs),
            (
                f"{which} {what} ({expected.files_of(shard, first * expected.per_shard, expected.per_shard)})"
                for which, shard, first in runs
            ),
        )


class _Runs:
    """Runs of consecutive steps of a shard, from arrays of shards and steps sorted by shard and step."""

    def __init__(self, shards: Ints, steps: Ints) -> None:
        self._shards, self._steps = shards, steps
        gaps = np.diff(steps)
        # A step that appears twice does not break a run.
        breaks = np.flatnonzero((gaps < 0) | (gaps > 1) | (np.diff(shards) != 0))
        self._ends = np.append(breaks, len(steps) - 1) if len(steps) else np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        """Yield each run's description, its shard and its first step."""
        start = 0
        for end in self._ends.tolist():
            first, last, shard = int(self._steps[start]), int(self._steps[end]), int(self._shards[start])
            which = f"step {first}" if first == last else f"every step from {first} to {last}"
            yield f"{which} of shard {shard}", shard, first
            start = end + 1
