"""The ledger's files: Parquet parts in a run's folder, written in the background as steps commit.

A part holds a thousand steps, or fewer where a step has very many shards. The newest one is written anew, whole, as it
grows: what lies in the folder is at any moment complete up to some step. A part's name carries the generation and the
step that it begins with, so that no two controllers of a run ever write the same one.

A thousand steps of one generation take at most 64 KiB up to 900 shards, whatever the rows: nearly all of it for the
sums of the ids. With more shards it is 85 bytes for each, less than 1 % of the data where a row has 9 bytes. Weights
that are not the number of rows add to each note up to 2 bytes where they are tokens, up to 7.2 where they are any
numbers: less than 1 % of the data where a shard's part of a step has 800 bytes, or 1,300.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_plus.data.columns import column_of
from raytrain_plus.data.ledger import NOTE, kept_bits, step_sum
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import Outages
from raytrain_plus.storage.periodic import Repeated

FOLDER = "ledger"
SCHEMA = pa.schema(
    [
        pa.field("generation", pa.int64()),
        pa.field("step", pa.int64()),
        pa.field("shard", pa.int64()),
        pa.field("start", pa.int64()),
        pa.field("rows", pa.int64()),
        pa.field("weight", pa.float64()),
        pa.field("ids", pa.uint64()),
        pa.field("step_ids", pa.uint64()),
    ]
)
"""One row for each shard of each committed step, a part's sorted by shard and step; see `data.ledger`."""

PERIOD_S = 2.0
"""Seconds between two writings, at least."""
REST = 50.0
"""How many times as long as a writing took lies before the next one, at least."""
PART_STEPS = 1000
PART_NOTES = 1_000_000
"""A part ends with so many steps or notes, whichever comes first."""
_ENCODINGS = dict.fromkeys(SCHEMA.names, "DELTA_BINARY_PACKED") | {"weight": "BYTE_STREAM_SPLIT"}


class Parts:
    """The ledger of a run while it is written."""

    def __init__(self, run: Folder, before: Callable[[], None] = lambda: None, outages: Outages | None = None) -> None:
        """`before` is called before each writing, by who writes; where it raises, nothing is written. `outages` hears
        whether the storage takes the ledger."""
        self._outages = outages or Outages()
        self._run_folder = run
        self._before = before
        self._entering = threading.Lock()
        self._pending: list[tuple[int, int, bytes]] = []
        self._part: list[tuple[int, int, bytes]] = []
        self._busy = threading.Lock()
        self._failed: Exception | None = None
        self._repeated = Repeated(self._flush_or_later, PERIOD_S, REST, "ledger")
        self._repeated.start()

    def add(self, generation: int, step: int, notes: bytes) -> None:
        """Enters a committed step. What a full disk does not take is kept, and written later."""
        with self._entering:
            if self._failed is not None:
                raise self._failed
            self._pending.append((generation, step, notes))

    def flush(self) -> None:
        """Returns when all that was entered is on disk. Raises `OSError` where it cannot be written."""
        with self._busy:
            while True:
                with self._entering:
                    pending = self._pending[:PART_STEPS]
                if not pending:
                    return
                room = _steps_of_a_part(pending[0][2]) - len(self._part)
                if room <= 0:
                    self._part = []
                    continue
                grown = [*self._part, *pending[:room]]
                self._before()
                self._write(grown)
                self._part = grown
                with self._entering:
                    # Not before it is on disk: what failed is tried again with what came since.
                    del self._pending[: len(pending[:room])]

    def close(self) -> None:
        """Writes what is left. Raises `OSError` where that is not possible."""
        self._repeated.stop()
        self.flush()

    def abandon(self) -> None:
        """Forgets what is not written yet."""
        self._repeated.stop()
        with self._busy, self._entering:
            self._pending.clear()

    def _flush_or_later(self) -> bool:
        try:
            # What fails is reported, and tried again.
            with contextlib.suppress(OSError):
                self.flush()
        except Exception as error:
            with self._entering:
                self._failed = error
            return False
        return True

    def _write(self, part: list[tuple[int, int, bytes]]) -> None:
        generation, step, _ = part[0]
        sink = pa.BufferOutputStream()
        pq.write_table(
            table_of(part),
            sink,
            compression="zstd",
            use_dictionary=False,
            column_encoding=_ENCODINGS,
            write_page_checksum=True,
        )
        data = sink.getvalue()
        size = data.size
        with self._outages.watching("ledger", self._run_folder, lambda: size):
            self._run_folder.write(f"{FOLDER}/{generation:08d}-{step:012d}.parquet", [data])
        # Arrow keeps what a writing took for the next one, more of it each time: 15 MB after 4,000 steps.
        del data, sink
        pa.default_memory_pool().release_unused()


def table_of(entries: list[tuple[int, int, bytes]]) -> pa.Table:
    """(generation, step, the `NOTE`s of its shards) as rows of the ledger."""
    notes = np.stack([np.frombuffer(notes, NOTE) for _, _, notes in entries])
    steps, shards = notes.shape
    # By shard, then step: so that nearly all columns are runs of equal values, or of equal differences.
    by_shard = np.ascontiguousarray(notes.T).reshape(-1)
    columns = {
        "generation": np.tile([generation for generation, _, _ in entries], shards),
        "step": np.tile([step for _, step, _ in entries], shards),
        "shard": np.repeat(np.arange(shards), steps),
        **{name: np.ascontiguousarray(by_shard[name]) for name in ("start", "rows", "weight")},
        "ids": by_shard["ids"] & np.uint64(2 ** kept_bits(shards) - 1),
    }
    of_steps = pa.concat_arrays([column_of(step_sum(notes["ids"])), pa.nulls(len(by_shard) - steps, pa.uint64())])
    return pa.Table.from_arrays([*(column_of(columns[name]) for name in SCHEMA.names[:-1]), of_steps], schema=SCHEMA)


def _steps_of_a_part(notes: bytes) -> int:
    return max(1, min(PART_STEPS, PART_NOTES * NOTE.itemsize // max(1, len(notes))))
