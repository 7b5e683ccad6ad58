"""A worker's batches, ready before the step needs them.

A thread reads, cuts and collates the next steps. Rows come from memory where whole units are kept, from the stream
where it is ahead, and else are read directly: when the stream starts, when it has fallen behind, and when it ended.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import pyarrow as pa

from raytrain_plus.data.ledger import ROW_ID
from raytrain_plus.data.reads import Read, first_touches, grouped, reads
from raytrain_plus.data.sample_order import Line
from raytrain_plus.data.source import read_unit
from raytrain_plus.data.transform_block import Rows, without_ids
from raytrain_plus.errors import RaytrainError, TrainingError, WaitExpired
from raytrain_plus.job.task_loader import trim_traceback, users_frames

PREFETCH_STEPS = 4
"""Steps whose batches are made ahead."""
LOOK_S = 0.02
"""Seconds between two looks at what else there is, while a step's batches are waited for."""
STREAM_S = 5.0
"""How long a stream that runs may keep a read waiting before it is read directly: no step hangs for it."""
JOIN_S = 5.0
"""How long to wait for the thread of the batches that are taken over from; one that is stuck in a read is left."""

Collate = Callable[[pa.Table], Any]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What one forward pass takes."""

    batch: Any
    rows: int
    start: int = 0
    """Where its rows begin in the shard's own sequence."""
    ids: int = 0
    """The sum of its rows' ids, modulo 2^64."""


@dataclass(frozen=True, slots=True)
class StepBatches:
    """One step's microbatches by hosted shard, and how long `get` waited for them."""

    shards: dict[int, list[Microbatch]]
    waited_s: float


def cut(table: pa.Table, rows: int, collate: Collate, at: int = 0) -> list[Microbatch]:
    """A shard's rows, which begin at `at` of its sequence, in microbatches of `rows`; the last one takes what is left.

    A single row that is left over joins the microbatch before it: BatchNorm cannot train on one.
    """
    sizes = cut_sizes(table.num_rows, rows)
    ends = list(itertools.accumulate(sizes))
    starts = [end - size for end, size in zip(ends, sizes, strict=True)]
    ids = table.column(ROW_ID).to_numpy()
    table = without_ids(table)
    return [
        Microbatch(
            _collated(table.slice(start, end - start), collate), end - start, at + start, int(ids[start:end].sum())
        )
        for start, end in zip(starts, ends, strict=True)
    ]


def cut_sizes(total: int, rows: int) -> list[int]:
    """The rows of each microbatch of `rows`, out of `total`: see `cut`.

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


def microbatch_rows(line: Line, microbatches: int) -> int:
    """The rows of a microbatch, where a shard's part of a step is divided into so many."""
    return max(1, line.per_shard // microbatches)


def first_microbatch(rows: Rows, microbatches: int, collate: Collate) -> Microbatch:
    """The first that shard 0 gives to step 0."""
    table = pa.concat_tables([rows.read(piece) for piece in rows.line.pieces(0, 0)])
    return cut(table, microbatch_rows(rows.line, microbatches), collate)[0]


def _collated(table: pa.Table, collate: Collate) -> Any:
    try:
        return collate(table)
    except RaytrainError:
        raise
    except TypeError as error:
        # The default's own words say it all.
        trace = trim_traceback(error) if users_frames(error) else ""
        raise TrainingError(f"the rows cannot be made a batch: {error}", trace) from None


def from_stream(number: int, delivered: int, ended: bool) -> bool:
    """Whether read `number` is to be awaited from a stream that has delivered all up to `delivered`.

    Not before its first delivery, nor while it is behind: then reading directly is faster, and the stream, which drops
    what was passed, catches up. It has when the next read it owes is the one that is wanted.
    """
    if ended:
        return delivered >= number
    return delivered >= 0 and number - 1 <= delivered


class Batches:
    """The batches of the hosted shards from `first_step` on. Open it with `with`."""

    def __init__(
        self,
        rows: Rows,
        *,
        shards: Sequence[int],
        first_step: int,
        microbatches: int,
        collate: Collate,
        cache_mb: int,
        make_stream: Callable[..., Any] | None,
        before: Batches | None = None,
    ) -> None:
        """`make_stream(rows, groups, whole_units=, expected_rows=)` gives a stream; None reads everything directly.

        `before` is what this takes over from, closed: the units that it keeps in memory, once its thread has ended.
        """
        self._rows = rows
        self._line: Line = rows.line
        self._shards = tuple(sorted(shards))
        self._first_step = first_step
        self._microbatch_rows = microbatch_rows(self._line, microbatches)
        self._collate = collate
        self._keep_units = rows.transform is None and sum(rows.index.unit_bytes) + 8 * rows.index.rows <= cache_mb << 20
        self._units: dict[int, pa.Table] = {} if before is None else before._units
        self._before = before
        self._make_stream = make_stream
        self._stream: Any = None
        self._ready: queue.SimpleQueue[dict[int, list[Microbatch]] | BaseException] = queue.SimpleQueue()
        self._room = threading.Semaphore(PREFETCH_STEPS)
        self._taken = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._next_read = 0
        self.streamed_reads = 0
        """Reads that came through the stream."""
        self.direct_reads = 0
        """Reads that this worker made itself."""

    def __enter__(self) -> Batches:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Nobody waits for the thread here: a group that changes goes on at once. Who takes over waits for it.
        self._closing.set()
        # Its thread may wait for room.
        self._room.release()
        self._close_stream()

    def get(self, step: int, timeout_s: float, check: Callable[[], None] = lambda: None) -> StepBatches:
        """The batches of the next step; `check` is called while it waits, and may raise.

        Raises what reading or collating raised, `WaitExpired` after `timeout_s`.
        """
        start = time.monotonic()
        self.more()
        while True:
            try:
                made = self._ready.get(timeout=LOOK_S)
                break
            except queue.Empty as error:
                check()
                if time.monotonic() - start > timeout_s:
                    raise WaitExpired(f"the data of step {step} did not come within {timeout_s:g} s") from error
        if isinstance(made, BaseException):
            raise made
        self._taken += 1
        return StepBatches(made, time.monotonic() - start)

    def more(self) -> None:
        """Lets the thread make batches in the place of those that were taken.

        To be called when the training thread has nothing to compute: both hold the interpreter's lock in turn.
        """
        while self._taken:
            self._taken -= 1
            self._room.release()

    def _run(self) -> None:
        try:
            if self._before is not None:
                # Two that read at once would read the same units twice.
                self._before._thread.join(JOIN_S)
                self._before = None
            sources = {shard: _ShardRows(self._line, shard, self._first_step) for shard in self._shards}
            upcoming = reads(self._line, self._shards, self._first_step)
            for step in range(self._first_step, self._line.steps):
                if step == self._first_step + PREFETCH_STEPS + 2:
                    # The first step has its batch: loading and starting Ray Data, a second's work, must not delay it.
                    self._start_stream()
                while any(source.lacks(step) for source in sources.values()):
                    if self._closing.is_set():
                        return
                    read = next(upcoming)
                    self._next_read = read.number + 1
                    sources[read.shard].add(self._read(read))
                made = {}
                for shard, source in sources.items():
                    if self._closing.is_set():
                        return
                    at = source.at
                    made[shard] = cut(source.take(step), self._microbatch_rows, self._collate, at)
                if not self._offer(made):
                    return
        except BaseException as error:
            self._offer(error)
        finally:
            # Once more: it may have been started after the reader was closed.
            self._close_stream()

    def _offer(self, made: dict[int, list[Microbatch]] | BaseException) -> bool:
        self._room.acquire()
        if self._closing.is_set():
            return False
        self._ready.put(made)
        return True

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _start_stream(self) -> None:
        if self._make_stream is None or self._has_every_unit() or self._closing.is_set():
            return
        index = self._rows.index
        upcoming = reads(self._line, self._shards, self._first_step)
        wanted: Iterator[Read] = itertools.islice(upcoming, self._next_read, None)
        if self._keep_units:
            wanted = first_touches(wanted, frozenset(range(len(index.unit_rows))) - self._units.keys())
        stream = self._make_stream(
            self._rows,
            grouped(wanted, self._bytes_of),
            whole_units=self._keep_units,
            expected_rows=(lambda read: index.unit_rows[read.piece.unit])
            if self._keep_units
            else (lambda read: read.piece.rows),
        )
        stream.start()
        self._stream = stream

    def _read(self, read: Read) -> pa.Table:
        if self._keep_units:
            return self._rows.cut(self._unit(read), read.piece)
        stream = self._stream
        if stream is not None and from_stream(read.number, stream.delivered, stream.ended):
            table = stream.take(read.number, STREAM_S)
            if table is not None:
                self.streamed_reads += 1
                return table
        elif stream is not None:
            stream.pass_by(read.number)
        self.direct_reads += 1
        return self._rows.read(read.piece)

    def _unit(self, read: Read) -> pa.Table:
        unit = read.piece.unit
        stream = self._stream
        if unit not in self._units and stream is not None:
            for arrived, table in stream.take_units().items():
                self.streamed_reads += arrived not in self._units
                self._units.setdefault(arrived, table)
        if unit not in self._units:
            self.direct_reads += 1
            self._units[unit] = read_unit(self._rows.index, unit)
        if stream is not None and self._has_every_unit():
            self._close_stream()
        return self._units[unit]

    def _has_every_unit(self) -> bool:
        return self._keep_units and len(self._units) == len(self._rows.index.unit_rows)

    def _bytes_of(self, read: Read) -> float:
        index, piece = self._rows.index, read.piece
        share = 1.0 if self._keep_units else piece.rows / index.unit_rows[piece.unit]
        return index.unit_bytes[piece.unit] * share


class _ShardRows:
    """One shard's rows that are at hand but not yet used."""

    def __init__(self, line: Line, shard: int, first_step: int) -> None:
        self._line = line
        self._shard = shard
        self.at = first_step * line.per_shard
        """Where the next row lies in the shard's own sequence."""
        self._tables: list[pa.Table] = []
        self._have = 0

    def lacks(self, step: int) -> bool:
        return self._have < self._line.rows_in_step(self._shard, step)

    def add(self, table: pa.Table) -> None:
        self._tables.append(table)
        self._have += table.num_rows

    def take(self, step: int) -> pa.Table:
        wanted = self._line.rows_in_step(self._shard, step)
        self._have -= wanted
        self.at += wanted
        parts = []
        while wanted:
            table = self._tables.pop(0)
            parts.append(table.slice(0, wanted))
            if table.num_rows > wanted:
                self._tables.insert(0, table.slice(wanted))
            wanted -= min(wanted, table.num_rows)
        return parts[0] if len(parts) == 1 else pa.concat_tables(parts)


class Counts:
    """Stands for `Batches` where a worker reads no data, since its stage needs none: it knows what others read."""

    def __init__(self, line: Line, shards: Sequence[int], microbatches: int) -> None:
        self._line = line
        self._shards = tuple(sorted(shards))
        self._microbatch_rows = microbatch_rows(line, microbatches)

    def get(self, step: int, timeout_s: float, check: Callable[[], None] = lambda: None) -> StepBatches:
        """How many rows each microbatch of the step has."""
        made = {
            shard: _counted(cut_sizes(self._line.rows_in_step(shard, step), self._microbatch_rows))
            for shard in self._shards
        }
        return StepBatches(made, 0.0)

    def more(self) -> None:
        """There is nothing to make."""


def held_out_counts(line: Line, shard: int, rows: int) -> Iterator[Microbatch]:
    """How many rows each microbatch of a shard's `held_out` rows has."""
    whole, left = divmod(line.span(shard, 0)[1], rows)
    yield from _counted([rows] * whole + [left] * (left > 0))


def _counted(sizes: Sequence[int]) -> list[Microbatch]:
    return [Microbatch(batch=None, rows=size) for size in sizes]


def held_out(rows: Rows, shard: int, microbatch_rows: int, collate: Collate) -> Iterator[Microbatch]:
    """One shard's span of a held-out dataset, in microbatches (see `cut`), read directly, unit by unit."""
    _, length = rows.line.span(shard, 0)
    if not length:
        return
    pending: list[pa.Table] = []
    have = 0
    for piece in rows.line.pieces_between(shard, 0, length):
        table = rows.read(piece)
        pending.append(table)
        have += table.num_rows
        if have >= microbatch_rows:
            whole = pa.concat_tables(pending)
            full = have - have % microbatch_rows
            yield from cut(whole.slice(0, full), microbatch_rows, collate)
            pending, have = [whole.slice(full)], have - full
    if have:
        yield from cut(pa.concat_tables(pending), microbatch_rows, collate)
