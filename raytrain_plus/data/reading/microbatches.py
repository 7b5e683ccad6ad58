"""Divide a shard's rows into microbatches, and collate each: what a step gets, without the rows that are left out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from raytrain_plus.data.ledger.ledger import ROW_ID
from raytrain_plus.data.order.mixed_order import AnyOrder
from raytrain_plus.data.reading.transform_block import without_ids
from raytrain_plus.data.reading.unusable import faults_of, usable
from raytrain_plus.data.values.columns import selectable
from raytrain_plus.errors import RaytrainError, TrainingError
from raytrain_plus.job.task_loader import trim_traceback, users_frames
from raytrain_plus.task import Task

Collate = Callable[[pa.Table], Any]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The input of one forward pass; of none if it has no rows, because all of them are skipped."""

    batch: Any
    rows: int
    start: int = 0
    """The position of its first row in the shard's own sequence."""
    ids: int = 0
    """The sum of its rows' ids, modulo 2^64."""
    skipped: Mapping[int, str] = field(default_factory=dict)
    """The position in the shard's own sequence of each row that was left out here -> why it cannot be used."""


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row that is left out because it cannot be used: `data.on_error: skip`."""

    file: str
    row: str
    """Its name, for people."""
    why: str


@dataclass(frozen=True, slots=True)
class StepBatches:
    """One step's microbatches by hosted shard, and the seconds that `Batches.get` waited for them."""

    shards: dict[int, list[Microbatch]]
    waited_s: float
    skipped: tuple[SkippedRow, ...] = ()
    """The first skipped row of each file and cause, if no earlier step has one."""


def cut(table: pa.Table, rows: int, collate: Collate, at: int = 0) -> list[Microbatch]:
    """Divide a shard's rows, which begin at position `at` of its sequence, into collated microbatches of `rows`.

    The last microbatch takes the remaining rows. A single remaining row joins the microbatch before it: BatchNorm
    cannot train on one. Raises `TrainingError` if the rows cannot be collated.
    """
    return microbatches_of(table, cut_sizes(table.num_rows, rows), collate, at)


def microbatches_of(table: pa.Table, sizes: Sequence[int], collate: Collate, at: int) -> list[Microbatch]:
    """Return a shard's rows, which begin at position `at` of its sequence, in microbatches of these sizes.

    Rows that cannot be used are left out. Raises `TrainingError` if the rows cannot be collated.
    """
    faults = faults_of(table)
    if faults:
        return _without(faults, table, sizes, collate, at)
    ends = list(itertools.accumulate(sizes))
    starts = [end - size for end, size in zip(ends, sizes, strict=True)]
    ids = table.column(ROW_ID).to_numpy()
    table = without_ids(table)
    batches = _at_once(table, sizes, collate)
    if batches is None:
        batches = [_collated(table.slice(start, size), collate) for start, size in zip(starts, sizes, strict=True)]
    return [
        Microbatch(batch, end - start, at + start, int(ids[start:end].sum()))
        for batch, start, end in zip(batches, starts, ends, strict=True)
    ]


def _without(
    faults: Mapping[int, str], table: pa.Table, sizes: Sequence[int], collate: Collate, at: int
) -> list[Microbatch]:
    """Return microbatches of these sizes, all of one step, without the rows that cannot be used."""
    ends = list(itertools.accumulate(sizes))
    parts = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    kept = kept_sizes([sum(row not in faults for row in part) for part in parts], sizes)
    rows = usable(table)
    made = iter(microbatches_of(rows, [size for size in kept if size], collate, at) if rows.num_rows else ())
    found = (next(made) if size else Microbatch(None, 0) for size in kept)
    return [
        replace(one, start=at + part.start, skipped={at + row: faults[row] for row in part if row in faults})
        for one, part in zip(found, parts, strict=True)
    ]


def kept_sizes(left: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the sizes of microbatches that were to have `sizes` and have rows `left`.

    A single row that is left joins the microbatch before it, or else the next one: BatchNorm cannot train on one.

    >>> kept_sizes([1, 3, 1, 0, 1], [3, 3, 3, 3, 1]), kept_sizes([0, 1], [2, 2])
    ([0, 5, 0, 0, 1], [0, 1])
    """
    kept = list(left)
    for at, size in enumerate(sizes):
        others = [*range(at - 1, -1, -1), *range(at + 1, len(kept))]
        taker = next((other for other in others if kept[other]), None)
        if kept[at] == 1 < size and taker is not None:
            kept[at], kept[taker] = 0, kept[taker] + 1
    return kept


def _at_once(table: pa.Table, sizes: Sequence[int], collate: Collate) -> list[Any] | None:
    """Return batches of these sizes, collated together; None if they must be collated one by one."""
    if len(sizes) < 2 or not collates_rows(collate):
        return None
    try:
        whole = collate(table)
    except TypeError:
        # Perhaps only some of them cannot be collated, or lists have equal lengths only within a batch.
        return None
    if not isinstance(whole, (dict, tuple)):
        return list(whole.split(list(sizes)))
    if not whole:
        return None
    columns = whole if isinstance(whole, tuple) else whole.values()
    parts = zip(*(column.split(list(sizes)) for column in columns), strict=True)
    return list(parts) if isinstance(whole, tuple) else [dict(zip(whole, part, strict=True)) for part in parts]


def collates_rows(collate: Collate) -> bool:
    """Return whether `collate` is the default, which makes the same of each row whatever rows are beside it."""
    return getattr(collate, "__func__", None) is Task.collate


def cut_sizes(total: int, rows: int) -> list[int]:
    """Return the sizes of the microbatches of `rows` that `total` rows make: see `cut`.

    >>> cut_sizes(8, 3), cut_sizes(7, 3), cut_sizes(0, 3)
    ([3, 3, 2], [3, 4], [])
    """
    whole, left = divmod(total, rows)
    sizes = [rows] * whole
    if left == 1 and rows > 1 and sizes:
        sizes[-1] += 1
    elif left:
        sizes.append(left)
    return sizes


def microbatch_rows(sample_order: AnyOrder, microbatches: int) -> int:
    """Return the rows of a microbatch if a shard's part of a step is divided into `microbatches`."""
    return max(1, sample_order.per_shard // microbatches)


def _collated(table: pa.Table, collate: Collate) -> Any:
    try:
        return collate(table if collates_rows(collate) else selectable(table))
    except RaytrainError:
        raise
    except TypeError as error:
        # The message of the default `collate` suffices without a traceback.
        trace = trim_traceback(error) if users_frames(error) else ""
        raise TrainingError(f"cannot collate the rows into a batch: {error}", trace) from None
