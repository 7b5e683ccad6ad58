"""What a worker reads, in the order in which it needs it. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from raytrain_plus.data.line import Line, Piece

GROUP_BYTES = 32 << 20
"""Small reads share a task up to so many decoded bytes."""


@dataclass(frozen=True, slots=True)
class Read:
    """One shard's consecutive rows of one unit."""

    number: int
    """Its place in the worker's order of reading."""
    step: int
    """The first step that needs it."""
    shard: int
    start: int
    """Its first row in the shard's own sequence."""
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
            yield Read(0, min(start // line.per_shard, last), shard, start, piece)
            start += piece.rows


def grouped(wanted: Iterable[Read], unit_bytes: Sequence[int], unit_rows: Sequence[int]) -> Iterator[tuple[Read, ...]]:
    """Consecutive reads, gathered up to `GROUP_BYTES` a group; a larger one stands alone."""
    group: list[Read] = []
    filled = 0.0
    for read in wanted:
        nbytes = unit_bytes[read.piece.unit] * read.piece.rows / max(1, unit_rows[read.piece.unit])
        if group and filled + nbytes > GROUP_BYTES:
            yield tuple(group)
            group, filled = [], 0.0
        group.append(read)
        filled += nbytes
    if group:
        yield tuple(group)


def first_touches(wanted: Iterable[Read], units: Collection[int]) -> Iterator[Read]:
    """Of each of `units` the first read alone, for a reader that keeps whole units; ends when all were touched."""
    left = set(units)
    for read in wanted:
        if not left:
            return
        if read.piece.unit in left:
            left.remove(read.piece.unit)
            yield read
