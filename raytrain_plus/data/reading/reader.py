"""Prepare a worker's batches before the steps need them.

A thread reads, divides and collates the rows of the next steps. Rows come from memory if whole units are kept, or from
the stream. Otherwise they are read directly: while the stream starts, if it does not answer, or once it has ended. For
units that are kept and lie on a disk of this node no stream starts, unless the steps wait for them.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import pyarrow as pa

from raytrain_plus.data.order.mixed_order import AnyOrder
from raytrain_plus.data.order.reads import Read, first_touches, grouped, reads
from raytrain_plus.data.order.sample_order import SampleOrder
from raytrain_plus.data.reading.microbatches import (
    Collate,
    Microbatch,
    SkippedRow,
    StepBatches,
    collates_rows,
    cut,
    cut_sizes,
    microbatch_rows,
    microbatches_of,
)
from raytrain_plus.data.reading.shard_rows import ShardRows
from raytrain_plus.data.reading.transform_block import RowReader
from raytrain_plus.data.reading.unit_cache import UnitCache
from raytrain_plus.data.reading.unusable import faults_of, joined
from raytrain_plus.data.sources.parquet_source import on_a_disk
from raytrain_plus.data.sources.row_names import file_and_row
from raytrain_plus.errors import TrainingError, WaitExpired

PREFETCH_STEPS = 4
"""Steps whose batches are prepared ahead."""
AT_ONCE = 8
"""The most steps whose rows are collated at once, if `collate` is the default, and no more than this many bytes."""
AT_ONCE_BYTES = 1 << 20
LOOK_S = 0.02
"""Seconds between two calls of `check` while `get` waits for a step's batches."""
STREAM_S = 5.0
"""Maximum seconds that a read waits for a running stream before it is read directly, so that no step hangs on it."""
LAG_S = 1.0
"""Seconds of steps after which it is known whether they wait for rows."""
WAITED = 0.1
"""The share of their time that steps wait for rows from which on a stream is worth its start."""
NEVER = -2
"""Less than any number of a read that a stream may have delivered."""


def from_stream(number: int, *, delivered: int, ended: bool, silent_at: int) -> bool:
    """Return whether to wait for read `number` from a stream that has delivered all reads up to `delivered`.

    False before its first delivery: reading directly is faster than starting Ray Data. From then on, to read directly
    what it works on would do the same work twice, and the reader would stay ahead of it. A stream that kept a read
    waiting for `STREAM_S` when it had delivered those up to `silent_at` is trusted again when it delivers more.
    """
    if ended or delivered >= number:
        return delivered >= number
    return delivered >= 0 and delivered != silent_at


def lags(waited_s: float, passed_s: float) -> bool:
    """Return whether steps waited for rows long enough for a stream to be worth its start."""
    return passed_s >= LAG_S and waited_s > WAITED * passed_s


def _pinned(microbatches: Sequence[Microbatch], pin: Callable[[Any], Any]) -> list[Microbatch]:
    return [replace(one, batch=pin(one.batch)) if one.rows else one for one in microbatches]


class Batches:
    """The batches of the hosted shards, from `first_step` on. Open it with `with`."""

    def __init__(
        self,
        rows: RowReader,
        *,
        shards: Sequence[int],
        first_step: int,
        microbatches: int,
        collate: Collate,
        cache: UnitCache,
        make_stream: Callable[..., Any] | None,
        pin: Callable[[Any], Any] | None = None,
    ) -> None:
        """Prepare to read.

        `make_stream(rows, groups, whole_units=, expected_rows=)` returns a stream; None reads everything directly.
        `cache` is that of the closed `Batches` that this replaces, if there is one.
        `pin` puts each batch where a GPU can fetch it, on this thread.
        """
        self._rows = rows
        self._sample_order: AnyOrder = rows.sample_order
        self._shards = tuple(sorted(shards))
        self._first_step = first_step
        self._microbatch_rows = microbatch_rows(self._sample_order, microbatches)
        self._collate = collate
        self._cache = cache
        self._pin = pin
        self._make_stream = make_stream
        self._stream: Any = None
        self._ready: queue.SimpleQueue[dict[int, list[Microbatch]] | BaseException] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._prepared = 0
        """The steps whose batches are ready, and those that were taken since the thread was last told."""
        self._taken = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._next_read = 0
        self._near = rows.source.in_memory or (cache.keeps and on_a_disk(rows.source))
        """Whether rows are in memory, or units are read once each, from a disk."""
        self._waited_s = 0.0
        """Seconds that steps waited for rows, without the first ones, and when these had ended."""
        self._since: float | None = None
        self._silent_at = NEVER
        """The last read that the stream had delivered when the reader waited for it in vain."""
        self._named: set[tuple[str, str]] = set()
        """The files and causes of skipped rows that `get` has returned."""
        self.failed: tuple[int, int] | None = None
        """The step and shard whose rows could not be collated."""
        self.streamed_reads = 0
        """The number of reads that came through the stream."""
        self.direct_reads = 0
        """The number of reads that this worker made itself."""

    def __enter__(self) -> Batches:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A changing group must continue at once, so this does not wait for the thread; the next one does, in
        # `UnitCache.begin`.
        self._closing.set()
        # The thread may be waiting for room.
        with self._changed:
            self._changed.notify()
        self._close_stream()

    def get(self, step: int, timeout_s: float, check: Callable[[], None] = lambda: None) -> StepBatches:
        """Return the batches of the next step. `check` is called repeatedly while this waits, and may raise.

        Raises the error that reading or collating raised, and `WaitExpired` after `timeout_s` seconds.
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
                    raise WaitExpired(f"the data of step {step} did not arrive within {timeout_s:g} s") from error
        if isinstance(made, BaseException):
            raise made
        self._taken += 1
        now = time.monotonic()
        if step >= self._first_step + PREFETCH_STEPS:
            self._waited_s += now - start if self._since is not None else 0.0
            self._since = self._since or now
        return StepBatches(made, now - start, self._skipped(made))

    def _skipped(self, made: Mapping[int, Sequence[Microbatch]]) -> tuple[SkippedRow, ...]:
        """Return the skipped rows of a step whose file and cause are new."""
        found = []
        for shard, microbatches in made.items():
            for position, why in (one for microbatch in microbatches for one in microbatch.skipped.items()):
                file, row = file_and_row(self._rows.source, self._sample_order, shard, position)
                if (file, why) not in self._named:
                    self._named.add((file, why))
                    found.append(SkippedRow(file, row, why))
        return tuple(found)

    def more(self) -> None:
        """Let the thread prepare batches to replace those that were taken.

        Call it when the training thread has nothing to compute: the two threads compete for the interpreter's lock.
        """
        if not self._taken:
            return
        with self._changed:
            self._prepared -= self._taken
            self._taken = 0
            if self._has_room:
                self._changed.notify()

    @property
    def _has_room(self) -> bool:
        """Whether the thread is to hand over more. It may hand over several steps at once, so that it wakes less."""
        return self._prepared < PREFETCH_STEPS

    def _run(self) -> None:
        try:
            self._cache.begin()
            stream_starts = False
            sources = {shard: ShardRows(self._sample_order, shard, self._first_step) for shard in self._shards}
            upcoming = reads(self._sample_order, self._shards, self._first_step)
            step, many = self._first_step, 1
            while step < self._sample_order.steps:
                if step >= self._first_step + PREFETCH_STEPS + 2 and not stream_starts and self._wants_stream():
                    # Loading and starting Ray Data takes a second, which must delay neither the first steps' batches
                    # nor the `Batches` that replaces this one.
                    threading.Thread(target=self._start_stream, name="start of the stream", daemon=True).start()
                    stream_starts = True
                steps = range(step, min(step + many, self._sample_order.steps))
                while any(source.lacks(steps) for source in sources.values()):
                    if self._closing.is_set():
                        return
                    read = next(upcoming)
                    self._next_read = read.number + 1
                    sources[read.shard].add(self._read(read), read.source)
                made: dict[int, dict[int, list[Microbatch]]] = {one: {} for one in steps}
                for shard, source in sources.items():
                    if self._closing.is_set():
                        return
                    for one, microbatches in self._made(shard, source, steps).items():
                        made[one][shard] = microbatches if self._pin is None else _pinned(microbatches, self._pin)
                if not self._offer(*(made[one] for one in steps)):
                    return
                step = steps.stop
                if step >= self._first_step + PREFETCH_STEPS:
                    many = self._many(next(iter(sources.values())))
        except BaseException as error:
            self._offer(error)
        finally:
            self._close_stream()

    def _made(self, shard: int, source: ShardRows, steps: range) -> dict[int, list[Microbatch]]:
        """Return the shard's microbatches of each of these steps."""
        at, table = source.at, source.take(steps)
        sizes = {step: cut_sizes(self._sample_order.rows_in_step(shard, step), self._microbatch_rows) for step in steps}
        if len(steps) > 1 and not faults_of(table):
            with contextlib.suppress(TrainingError):
                made = iter(microbatches_of(table, [size for own in sizes.values() for size in own], self._collate, at))
                return {step: list(itertools.islice(made, len(own))) for step, own in sizes.items()}
        # Also if some of them cannot be collated, to know which.
        found, begin = {}, 0
        for step, own in sizes.items():
            self.failed = (step, shard)
            found[step] = microbatches_of(table.slice(begin, sum(own)), own, self._collate, at + begin)
            self.failed = None
            begin += sum(own)
        return found

    def _many(self, source: ShardRows) -> int:
        """Return how many steps to collate at once: several small ones take hardly longer than one."""
        if not collates_rows(self._collate):
            return 1
        each = self._sample_order.per_shard * source.row_bytes
        return max(1, min(AT_ONCE, int(AT_ONCE_BYTES / each) if each else AT_ONCE))

    def _offer(self, *made: dict[int, list[Microbatch]] | BaseException) -> bool:
        """Hand over the batches of some steps once there is room; return False if this is closed before."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_room or self._closing.is_set())
            self._prepared += len(made)
        if self._closing.is_set():
            return False
        for one in made:
            self._ready.put(one)
        return True

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _wants_stream(self) -> bool:
        if self._make_stream is None:
            return False
        since = self._since
        return not self._near or (since is not None and lags(self._waited_s, time.monotonic() - since))

    def _start_stream(self) -> None:
        try:
            self._stream = self._started_stream()
        except BaseException as error:
            self._ready.put(error)
        if self._closing.is_set():
            # Nobody closed what was not started yet.
            self._close_stream()

    def _started_stream(self) -> Any:
        """Return the stream, started; None if there is nothing left to stream."""
        if self._make_stream is None or self._cache.complete or self._closing.is_set():
            return None
        source = self._rows.source
        upcoming = reads(self._sample_order, self._shards, self._first_step)
        wanted: Iterator[Read] = itertools.islice(upcoming, self._next_read, None)
        if self._cache.keeps:
            wanted = first_touches(wanted, self._cache.lacking, len(self._sample_order.source_orders))
        stream = self._make_stream(
            self._rows,
            grouped(wanted, self._bytes_of),
            whole_units=self._cache.keeps,
            expected_rows=(lambda read: source.unit_rows[read.row_range.unit])
            if self._cache.keeps
            else (lambda read: read.row_range.rows),
        )
        stream.start()
        return stream

    def _read(self, read: Read) -> pa.Table:
        if self._cache.keeps:
            return self._rows.cut(self._unit(read), read.row_range)
        stream = self._stream
        if stream is not None and from_stream(
            read.number, delivered=stream.delivered, ended=stream.ended, silent_at=self._silent_at
        ):
            table = stream.take(read.number, STREAM_S)
            if table is not None:
                self.streamed_reads += 1
                return table
            if stream.delivered < read.number:
                self._silent_at = stream.delivered
        elif stream is not None:
            stream.pass_by(read.number)
        self.direct_reads += 1
        return self._rows.read(read.row_range)

    def _unit(self, read: Read) -> pa.Table:
        unit = read.row_range.unit
        stream = self._stream
        units = self._cache.units
        if unit not in units and stream is not None:
            for arrived, table in stream.take_units().items():
                self.streamed_reads += arrived not in units
                units.setdefault(arrived, table)
        if unit not in units:
            self.direct_reads += 1
            units[unit] = self._rows.source.read_unit(unit)
        if stream is not None and self._cache.complete:
            self._close_stream()
        return units[unit]

    def _bytes_of(self, read: Read) -> float:
        source, row_range = self._rows.source, read.row_range
        share = 1.0 if self._cache.keeps else row_range.rows / source.unit_rows[row_range.unit]
        return source.unit_bytes[row_range.unit] * share


class Counts:
    """Replace `Batches` in a worker whose stage needs no data: it knows how many rows the other workers read."""

    def __init__(self, sample_order: AnyOrder, shards: Sequence[int], microbatches: int) -> None:
        self._sample_order = sample_order
        self._shards = tuple(sorted(shards))
        self._microbatch_rows = microbatch_rows(sample_order, microbatches)

    def get(self, step: int, timeout_s: float, check: Callable[[], None] = lambda: None) -> StepBatches:
        """Return the step's microbatches with their number of rows and without data."""
        made = {
            shard: _counted(cut_sizes(self._sample_order.rows_in_step(shard, step), self._microbatch_rows))
            for shard in self._shards
        }
        return StepBatches(made, 0.0)

    def more(self) -> None:
        """Do nothing: there is nothing to prepare."""


def held_out_counts(sample_order: SampleOrder, shard: int, rows: int) -> Iterator[Microbatch]:
    """Yield the microbatches of `held_out` with their number of rows and without data."""
    whole, left = divmod(sample_order.used_before(shard, sample_order.steps), rows)
    yield from _counted([rows] * whole + [left] * (left > 0))


def _counted(sizes: Sequence[int]) -> list[Microbatch]:
    return [Microbatch(batch=None, rows=size) for size in sizes]


def held_out(rows: RowReader, shard: int, microbatch_rows: int, collate: Collate) -> Iterator[Microbatch]:
    """Yield one shard's rows of a held-out dataset in microbatches (see `cut`), read directly, unit by unit."""
    [sample_order] = rows.sample_order.source_orders
    length = sample_order.used_before(shard, sample_order.steps)
    if not length:
        return
    pending: list[pa.Table] = []
    have = 0
    for row_range in sample_order.row_ranges_between(shard, 0, length):
        table = rows.read(row_range)
        pending.append(table)
        have += table.num_rows
        if have >= microbatch_rows:
            whole = joined(pending)
            full = have - have % microbatch_rows
            yield from cut(whole.slice(0, full), microbatch_rows, collate)
            pending, have = [whole.slice(full)], have - full
    if have:
        yield from cut(joined(pending), microbatch_rows, collate)
