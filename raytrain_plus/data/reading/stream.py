"""Stream rows through Ray Data: read tasks run ahead of the training, in the order in which a worker needs their rows.

Each worker has one executor. Its tasks run on the worker's own node and without a CPU share: with one they would starve
if the workers hold every CPU. The number of concurrent tasks and the bytes waiting here are bounded.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import ray
from ray.data import DataContext, Datasource, ExecutionResources, ReadTask
from ray.data.block import BlockMetadata
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from raytrain_plus.data.order.reads import Read
from raytrain_plus.data.order.sample_order import RowRange
from raytrain_plus.data.reading.transform_block import RowReader
from raytrain_plus.data.reading.unusable import is_bare
from raytrain_plus.data.values.columns import column_of, copied
from raytrain_plus.errors import DataError, RaytrainError, RunError, TaskError, WaitExpired, first_line
from raytrain_plus.job.task_loader import is_librarys, trim_traceback, users_frames

TASKS_AT_ONCE = 2
"""Maximum concurrent read tasks of one worker."""
HORIZON = 64
"""Read tasks in one Ray Data execution; the next execution starts when all rows of this one have arrived."""
BLOCK_BYTES = 4 << 20
"""Bytes of rows that a read task hands over at once."""
STARTUP_S = 1.0
"""Assumed seconds from an execution's start to its first rows, until one has been measured."""
OBJECT_STORE_BYTES = 256 << 20
"""Maximum bytes that one worker's stream may hold in Ray's object store."""
WAITING_BYTES = 64 << 20
"""Bytes waiting in the worker's memory at which the stream pauses."""

READ_S = 600.0
"""Maximum seconds of a read in a task of its own."""

_NUMBER = "_raytrain_read"


class _Reads(Datasource):
    """Groups of reads as Ray Data tasks, in the given order."""

    def __init__(
        self, pickled_rows: Any, roots: Sequence[str], groups: list[tuple[Read, ...]], whole_units: bool
    ) -> None:
        self._pickled_rows = pickled_rows
        self._roots = tuple(roots)
        self._groups = groups
        self._whole_units = whole_units

    def estimate_inmemory_data_size(self) -> int | None:
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: DataContext | None = None
    ) -> list[ReadTask]:
        return [self._task(group) for group in self._groups]

    def _task(self, group: tuple[Read, ...]) -> ReadTask:
        metadata = BlockMetadata(num_rows=None, size_bytes=None, input_files=None, exec_stats=None)
        arguments = (self._pickled_rows, self._roots, group, self._whole_units)
        return ReadTask(lambda: _read_group(*arguments), metadata)


def _read_group(
    pickled_rows: Any, roots: tuple[str, ...], group: tuple[Read, ...], whole_units: bool
) -> Iterator[pa.Table]:
    # The user's transform is imported from these folders when the rows are unpickled.
    sys.path[:0] = [root for root in roots if root not in sys.path]
    yield from _numbered(cloudpickle.loads(ray.get(pickled_rows)), group, whole_units)


def _numbered(rows: RowReader, group: tuple[Read, ...], whole_units: bool) -> Iterator[pa.Table]:
    """Yield the rows of each read of a group, with its number; reads that fail or have no usable row are left out."""
    for read in group:
        try:
            table = rows.source.read_unit(read.row_range.unit) if whole_units else rows.read(read.row_range)
        except (DataError, TaskError):
            # The reader does not get these rows, reads them itself, meets the same fault and reports it in one
            # sentence. If it were raised here, Ray Data would print its own traceback on the user's screen.
            continue
        if is_bare(table):
            # Nor does it get a read without usable rows: Ray Data wants the same columns in all blocks.
            continue
        yield table.append_column(_NUMBER, column_of(np.full(table.num_rows, read.number, dtype=np.int64)))


def reading_elsewhere(rows: RowReader, roots: Sequence[str], node: str) -> Callable[[RowRange], pa.Table]:
    """Return a function that reads as `rows` do, in a task on that node; raises what a read raises there."""
    sent: list[Any] = []
    task = ray.remote(num_cpus=0, label_selector={"ray.io/node-id": node})(_read_one)

    def read(row_range: RowRange) -> pa.Table:
        if not sent:
            sent.append(ray.put(cloudpickle.dumps(rows)))
        try:
            return ray.get(task.remote(sent[0], tuple(roots), row_range), timeout=READ_S)
        except GetTimeoutError as error:
            raise WaitExpired(f"rows were not read and transformed within {READ_S:g} s") from error
        except RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from None
            raise
        except RayError as error:
            said = f"the process that transforms rows has died: {first_line(error)}"
            raise RunError(f"{said}; if its machine is short of memory, lower data.granule") from error

    return read


def _read_one(pickled_rows: bytes, roots: tuple[str, ...], row_range: RowRange) -> pa.Table:
    sys.path[:0] = [root for root in roots if root not in sys.path]
    rows: RowReader = cloudpickle.loads(pickled_rows)
    try:
        return rows.read(row_range)
    except RaytrainError:
        raise
    except Exception as error:
        if all(is_librarys(frame.filename) for frame in users_frames(error)):
            raise
        # Where it was raised is known in this process alone.
        what = f"data.transform raised {type(error).__name__}: {first_line(error)}"
        raise TaskError(what, where=rows.source.name(row_range.unit), user_traceback=trim_traceback(error)) from None


class Stream:
    """Run reads ahead of the training; their rows wait here until the reader calls `take`."""

    def __init__(
        self,
        rows: RowReader,
        groups: Iterable[tuple[Read, ...]],
        *,
        whole_units: bool,
        expected_rows: Callable[[Read], int],
        node: str,
        roots: Sequence[str],
        first: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare the stream. `first` is called on the stream's thread before Ray Data is used."""
        self._rows = rows
        self._sent: Any = None
        self._roots = roots
        self._groups = iter(groups)
        self._startup_s = STARTUP_S
        self._warm = False
        """Whether an execution has delivered rows: the first one takes longer to start than others."""
        self._whole_units = whole_units
        self._expected_rows = expected_rows
        self._node = node
        self._first = first
        self._news = threading.Condition()
        self._arrived: dict[int, pa.Table] = {}
        self._waiting_bytes = 0
        self._began = 0.0
        self._began_at = 0
        self._consumed_to = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self.delivered = -1
        """The highest number of a read that has arrived, or will not because an execution began after it."""
        self.ended = False
        """Whether no more reads will arrive: all were delivered, or an error ended the stream."""

    def start(self) -> None:
        """Start the stream's thread."""
        # Ray Data logs each execution; a run has many, and its own progress view.
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        self._began = time.monotonic()
        self._thread.start()

    def take(self, number: int, timeout_s: float) -> pa.Table | None:
        """Return the rows of read `number`, waiting while they may still arrive; None if they will not, or too late."""
        with self._news:
            self._reader_is_at(number)
            self._news.wait_for(lambda: self.delivered >= number or self.ended or self._closing, timeout_s)
            table = self._arrived.pop(number, None)
            if table is not None:
                self._waiting_bytes -= table.nbytes
                self._news.notify_all()
            return table

    def pass_by(self, number: int) -> None:
        """Record that the reader reads `number` itself: arriving reads up to it are dropped."""
        with self._news:
            self._reader_is_at(number + 1)

    def take_units(self) -> dict[int, pa.Table]:
        """Return the whole units that have arrived since the last call, by number."""
        with self._news:
            arrived, self._arrived = self._arrived, {}
            return arrived

    def close(self) -> None:
        """Release callers waiting in `take` at once; the stream and its tasks end when the next rows arrive."""
        with self._news:
            self._closing = True
            self._news.notify_all()

    def _run(self) -> None:
        try:
            self._first()
            while not self._closing:
                ahead = itertools.dropwhile(lambda group: group[-1].number < self._aim(), self._groups)
                groups = list(itertools.islice(ahead, HORIZON))
                if not groups:
                    return
                self._begin_at(groups[0][0].number)
                self._execute(groups)
        except Exception:
            if not self._closing:
                # The reader continues with direct reads, which meet the same fault if the data has one.
                logging.getLogger(__name__).warning("the data stream ended early; reading directly", exc_info=True)
        finally:
            with self._news:
                self.ended = True
                self._news.notify_all()

    def _aim(self) -> int:
        """Return the read that the reader will need when a new execution delivers its first; earlier ones are late."""
        if self._whole_units or self._consumed_to == 0:
            return 0
        rate = (self._consumed_to - self._began_at) / max(time.monotonic() - self._began, 0.001)
        return self._consumed_to + round(rate * self._startup_s)

    def _begin_at(self, number: int) -> None:
        """Let an execution begin with read `number`: no caller waits for those before it, which it skips."""
        with self._news:
            if self.delivered >= 0:
                self.delivered = max(self.delivered, number - 1)
                self._news.notify_all()

    def _execute(self, groups: list[tuple[Read, ...]]) -> None:
        if self._sent is None:
            # Its tasks are no processes that train.
            self._sent = ray.put(cloudpickle.dumps(replace(self._rows, elsewhere=None)))
        wanted = {read.number: read for group in groups for read in group}
        dataset = ray.data.read_datasource(
            _Reads(self._sent, self._roots, groups, self._whole_units),
            concurrency=min(TASKS_AT_ONCE, len(groups)),
            override_num_blocks=len(groups),
            num_cpus=0,
            label_selector={"ray.io/node-id": self._node},
        )
        # Use the dataset's own context: the current one belongs to the process, in which another stream may be ending.
        context = dataset.context
        context.enable_progress_bars = False
        context.print_on_execution_start = False
        context.execution_options.preserve_order = True
        # So that rows arrive soon, also if it takes a second to decode as many images.
        context.target_max_block_size = BLOCK_BYTES
        # It would measure the memory of each task every second, and nobody reads it.
        context.memory_usage_poll_interval_s = None
        context.execution_options.resource_limits = ExecutionResources.for_limits(
            object_store_memory=OBJECT_STORE_BYTES
        )
        batches: Any = dataset.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1)
        partial: dict[int, list[pa.Table]] = {}
        started = time.monotonic()
        for number, batch in enumerate(batches):
            if self._closing:
                return
            if number == 0:
                warm, self._warm = self._warm, True
                if warm:
                    self._startup_s = time.monotonic() - started
                elif self._is_passed(groups):
                    # Ray Data needs many seconds to load. To catch up from here would keep the reader waiting.
                    self._groups = itertools.chain(groups, self._groups)
                    return
            for read, table in _split(batch):
                partial.setdefault(read, []).append(table)
                have = sum(part.num_rows for part in partial[read])
                if have == self._expected_rows(wanted[read]) and not self._put(
                    wanted[read], pa.concat_tables(partial.pop(read))
                ):
                    return

    def _is_passed(self, groups: Sequence[tuple[Read, ...]]) -> bool:
        """Return whether the reader has passed all that the first tasks of an execution work on."""
        return self._consumed_to > groups[:TASKS_AT_ONCE][-1][-1].number

    def _put(self, read: Read, table: pa.Table) -> bool:
        """Keep the rows of a read once there is room; return False if the stream is closing."""
        if self._whole_units:
            # The unit is kept for long, so copy it: a view would occupy Ray's object store.
            table = copied(table)
        with self._news:
            # Whole units need no limit here: the reader's cache bounds them, and it takes them at any time.
            if not self._whole_units:
                self._news.wait_for(
                    lambda: self._closing or self._waiting_bytes < WAITING_BYTES or self._consumed_to >= read.number
                )
            if self._closing:
                return False
            self.delivered = max(self.delivered, read.number)
            self._arrived[read.row_range.unit if self._whole_units else read.number] = table
            if not self._whole_units:
                self._waiting_bytes += table.nbytes
                self._drop_passed()
            self._news.notify_all()
            return True

    def _reader_is_at(self, number: int) -> None:
        """Record that the reader has passed the reads before `number`."""
        if self._consumed_to == 0:
            self._began_at = number
        self._consumed_to = max(self._consumed_to, number)
        self._drop_passed()
        self._news.notify_all()

    def _drop_passed(self) -> None:
        """Drop the reads that the reader has passed by reading directly."""
        for number in [number for number in self._arrived if number < self._consumed_to]:
            self._waiting_bytes -= self._arrived.pop(number).nbytes


def _split(batch: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    """Yield a block's rows by read: (number, rows)."""
    numbers = batch.column(_NUMBER).to_numpy()
    rows = batch.drop_columns([_NUMBER])
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist()] if len(numbers) else []
    for start, end in zip(starts, [*starts[1:], len(numbers)], strict=False):
        yield int(numbers[start]), rows.slice(start, end - start)
