"""Plan a worker's reads, in the order in which its steps need them. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from raytrain_plus.data.sample_order import RowRange, SampleOrder

GROUP_BYTES = 32 << 20
"""Maximum decoded bytes of the small reads that share a task."""
GROUP_READS = 256
"""Maximum reads that share a task: planning a hundred thousand tiny ones ahead would delay the training."""
IN_VAIN = 10
"""Epochs that are searched for units that no shard of this worker has read yet."""


@dataclass(frozen=True, slots=True)
class Read:
    """One shard's consecutive rows of one unit."""

    number: int
    """Its index in the worker's order of reading."""
    step: int
    """The first step that needs it."""
    shard: int
    row_range: RowRange


def reads(sample_order: SampleOrder, shards: Iterable[int], first_step: int) -> Iterator[Read]:
    """Yield all reads of the hosted shards from `first_step` to the job's end, by the first step that needs them."""
    merged = heapq.merge(
        *(_shard_reads(sample_order, shard, first_step) for shard in sorted(shards)),
        key=lambda read: (read.step, read.shard),
    )
    for number, read in enumerate(merged):
        yield replace(read, number=number)


def _shard_reads(sample_order: SampleOrder, shard: int, first_step: int) -> Iterator[Read]:
    last = sample_order.steps - 1
    start = first_step * sample_order.per_shard
    end = last * sample_order.per_shard + sample_order.rows_in_step(shard, last)
    epoch = 0
    while start < end:
        stop = min(end, sample_order.rows_before(shard, epoch + 1))
        epoch += 1
        if stop <= start:
            continue
        for row_range in sample_order.row_ranges_between(shard, start, stop):
            yield Read(0, min(start // sample_order.per_shard, last), shard, row_range)
            start += row_range.rows


def grouped(wanted: Iterable[Read], bytes_of: Callable[[Read], float]) -> Iterator[tuple[Read, ...]]:
    """Yield groups of consecutive reads, each of at most `GROUP_BYTES` and `GROUP_READS`; a larger read is alone."""
    group: list[Read] = []
    filled = 0.0
    for read in wanted:
        nbytes = bytes_of(read)
        if group and (filled + nbytes > GROUP_BYTES or len(group) == GROUP_READS):
            yield tuple(group)
            group, filled = [], 0.0
        group.append(read)
        filled += nbytes
    if group:
        yield tuple(group)


def first_touches(wanted: Iterable[Read], units: Collection[int]) -> Iterator[Read]:
    """Yield only the first read of each of `units`, for a reader that keeps whole units.

    Ends when every unit was read, or after `IN_VAIN` epochs without a new one: without shuffling, a worker's shards
    never read some units.
    """
    left = set(units)
    touched = None
    for read in wanted:
        if touched is None:
            touched = read.row_range.epoch
        if not left or read.row_range.epoch > touched + IN_VAIN:
            return
        if read.row_range.unit in left:
            left.remove(read.row_range.unit)
            touched = read.row_range.epoch
            yield read
