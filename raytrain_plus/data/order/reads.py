"""Plan a worker's reads, in the order in which its steps need them. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from raytrain_plus.data.order.mixed_order import AnyOrder
from raytrain_plus.data.order.sample_order import RowRange

GROUP_BYTES = 32 << 20
"""Maximum decoded bytes of the small reads that share a task."""
GROUP_READS = 256
"""Maximum reads that share a task: planning a hundred thousand tiny ones ahead would delay the training."""
IN_VAIN = 10
"""Epochs that are searched for units that no shard of this worker has read yet."""


@dataclass(frozen=True, slots=True)
class Read:
    """One shard's consecutive rows of one unit; in a mix, of the shard's rows of that source."""

    number: int
    """Its index in the worker's order of reading."""
    step: int
    """The first step that needs it."""
    shard: int
    row_range: RowRange
    source: int = 0
    """The source of a mix that the unit belongs to."""


def reads(sample_order: AnyOrder, shards: Iterable[int], first_step: int) -> Iterator[Read]:
    """Yield all reads of the hosted shards from `first_step` to the job's end, by the first step that needs them."""
    sources = range(len(sample_order.source_orders))
    merged = heapq.merge(
        *(_shard_reads(sample_order, shard, source, first_step) for shard in sorted(shards) for source in sources),
        key=lambda read: (read.step, read.shard, read.source),
    )
    for number, read in enumerate(merged):
        yield replace(read, number=number)


def _shard_reads(sample_order: AnyOrder, shard: int, source: int, first_step: int) -> Iterator[Read]:
    own = sample_order.source_orders[source]
    start = sample_order.used_before(shard, first_step, source)
    end = sample_order.used_before(shard, sample_order.steps, source)
    epoch = max(0, start * own.shards // own.rows - 1)
    while start < end:
        stop = min(end, own.rows_before(shard, epoch + 1))
        epoch += 1
        if stop <= start:
            continue
        for row_range in sample_order.source_ranges(source, shard, start, stop):
            yield Read(0, sample_order.step_of(shard, start, source), shard, row_range, source)
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


def first_touches(wanted: Iterable[Read], units: Collection[int], sources: int = 1) -> Iterator[Read]:
    """Yield only the first read of each of `units`, for a reader that keeps whole units.

    Ends when every unit was read, or when each of the `sources` has had `IN_VAIN` epochs without a new one: without
    shuffling, a worker's shards never read some units.
    """
    left = set(units)
    touched: dict[int, int] = {}
    spent: set[int] = set()
    for read in wanted:
        epoch = read.row_range.epoch
        if epoch > touched.setdefault(read.source, epoch) + IN_VAIN:
            spent.add(read.source)
        if not left or len(spent) == sources:
            return
        if read.row_range.unit in left:
            left.remove(read.row_range.unit)
            touched[read.source] = epoch
            yield read
