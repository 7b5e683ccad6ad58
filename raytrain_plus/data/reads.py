"""What a worker reads, in the order in which it needs it. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from raytrain_plus.data.sample_order import Line, Piece

GROUP_BYTES = 32 << 20
"""Small reads share a task up to so many decoded bytes."""
GROUP_READS = 256
"""The same in reads: to find a hundred thousand tiny ones ahead would hold the training up."""
IN_VAIN = 10
"""Epochs that are looked through for units that no shard of this worker has come by."""


@dataclass(frozen=True, slots=True)
class Read:
    """One shard's consecutive rows of one unit."""

    number: int
    """Its place in the worker's order of reading."""
    step: int
    """The first step that needs it."""
    shard: int
    piece: Piece


def reads(line: Line, shards: Iterable[int], first_step: int) -> Iterator[Read]:
    """All reads of the hosted shards from `first_step` to the job's end, by the first step that needs them."""
    merged = heapq.merge(
        *(_shard_reads(line, shard, first_step) for shard in sorted(shards)), key=lambda read: (read.step, read.shard)
    )
    for number, read in enumerate(merged):
        yield replace(read, number=number)


def _shard_reads(line: Line, shard: int, first_step: int) -> Iterator[Read]:
    last = line.steps - 1
    start = first_step * line.per_shard
    end = last * line.per_shard + line.rows_in_step(shard, last)
    epoch = 0
    while start < end:
        stop = min(end, line.rows_before(shard, epoch + 1))
        epoch += 1
        if stop <= start:
            continue
        for piece in line.pieces_between(shard, start, stop):
            yield Read(0, min(start // line.per_shard, last), shard, piece)
            start += piece.rows


def grouped(wanted: Iterable[Read], bytes_of: Callable[[Read], float]) -> Iterator[tuple[Read, ...]]:
    """Consecutive reads, gathered up to `GROUP_BYTES` and `GROUP_READS` a group; a larger one stands alone."""
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
    """Of each of `units` the first read alone, for a reader that keeps whole units.

    Ends when all were touched, or when `IN_VAIN` epochs touched none: the shards of an unshuffled job come by some
    units never.
    """
    left = set(units)
    touched = None
    for read in wanted:
        if touched is None:
            touched = read.piece.epoch
        if not left or read.piece.epoch > touched + IN_VAIN:
            return
        if read.piece.unit in left:
            left.remove(read.piece.unit)
            touched = read.piece.epoch
            yield read
