"""Write the ledger's files: Parquet parts in a run's folder, written in the background as steps commit.

A part holds a thousand steps, or fewer if a step has very many shards. The newest part is rewritten as a whole while it
grows, so that the folder is at any moment complete up to some step. A part's name contains the generation and the step
that it begins with, so that two controllers of a run never write the same part.

A thousand steps of one generation take at most 64 KiB for up to 900 shards, independent of the rows; nearly all of it
holds the sums of the ids. With more shards it is 85 bytes per shard, less than 1 % of the data if a row has 9 bytes.
Weights that differ from the number of rows add to each note up to 2 bytes if they are token counts, and up to 7.2 bytes
if they are arbitrary numbers. That is less than 1 % of the data if a shard's part of a step has 800 bytes, or 1,300.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_plus.data.ledger.ledger import NOTE, SKIPPED, kept_bits, step_sum
from raytrain_plus.data.values.columns import column_of
from raytrain_plus.errors import InputError, first_line
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import Outages
from raytrain_plus.storage.periodic import PeriodicCall

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
"""One row for each shard of each committed step, sorted by shard and step within a part; see `data.ledger.ledger`."""
SKIPPED_ROWS = pa.list_(pa.field("element", pa.int64()))
"""The type of the column `skipped_rows`. Only parts with a skipped row have it, and `skipped`: they would take 5 KB of
a thousand steps of 900 shards."""

PERIOD_S = 2.0
"""Minimum seconds between two writes."""
REST = 50.0
"""Minimum pause before the next write, as a multiple of the duration of the last one."""
PART_STEPS = 1000
PART_NOTES = 1_000_000
"""A part ends after `PART_STEPS` steps or `PART_NOTES` notes, whichever comes first."""
Entry = tuple[int, int, bytes, bytes]
"""A step: its generation, its number, the `NOTE`s of its shards, and the `SKIPPED` rows, in any order."""
_ENCODINGS = dict.fromkeys(SCHEMA.names, "DELTA_BINARY_PACKED") | {"weight": "BYTE_STREAM_SPLIT"}


class LedgerFiles:
    """The writer of a run's ledger."""

    def __init__(self, run: Folder, before: Callable[[], None] = lambda: None, outages: Outages | None = None) -> None:
        """Start the background writer.

        `before` is called before each write, on the writing thread; if it raises, nothing is written. `outages` records
        whether the storage accepts the ledger.
        """
        self._outages = outages or Outages()
        self._run_folder = run
        self._before = before
        self._entering = threading.Lock()
        self._pending: list[Entry] = []
        self._part: list[Entry] = []
        self._busy = threading.Lock()
        self._failed: Exception | None = None
        self.kept: tuple[int, int] | None = None
        """The generation and number of the newest step that is written, if there is one. Read by any thread."""
        self._periodic = PeriodicCall(self._flush_or_later, PERIOD_S, REST, "ledger")
        self._periodic.start()

    def add(self, generation: int, step: int, notes: bytes, skipped: bytes = b"") -> None:
        """Add a committed step: see `Entry`. Entries that a full disk does not accept are kept and written later.

        Raises the error that stopped the background writer, if any.
        """
        with self._entering:
            if self._failed is not None:
                raise self._failed
            self._pending.append((generation, step, notes, skipped))

    def flush(self) -> None:
        """Write all entries and return when they are on disk. Raises `OSError` if they cannot be written."""
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
                self._part, self.kept = grown, grown[-1][:2]
                with self._entering:
                    # Only once it is on disk: a failed write is retried together with newer entries.
                    del self._pending[: len(pending[:room])]

    def close(self) -> None:
        """Stop the background writer and write the remaining entries. Raises `OSError` if that is not possible."""
        self._periodic.stop()
        self.flush()

    def abandon(self) -> None:
        """Stop the background writer and discard the entries that are not written yet."""
        try:
            self._periodic.stop()
        except TimeoutError:
            # Who discards them need not wait for the one that is being written.
            return
        with self._busy, self._entering:
            self._pending.clear()

    def _flush_or_later(self) -> bool:
        try:
            # `outages` reports the failure; the next period retries.
            with contextlib.suppress(OSError):
                self.flush()
        except Exception as error:
            with self._entering:
                self._failed = error
            return False
        return True

    def _write(self, part: list[Entry]) -> None:
        generation, step, *_ = part[0]
        sink = pa.BufferOutputStream()
        pq.write_table(
            ledger_table(part),
            sink,
            compression="zstd",
            use_dictionary=False,
            column_encoding=_ENCODINGS,
            write_page_checksum=True,
        )
        data = sink.getvalue()
        size = data.size
        with self._outages.watching("ledger", self._run_folder, lambda: size):
            self._run_folder.write(part_name(generation, step), [data])
        # Arrow keeps the memory of a write for the next one, more of it each time: 15 MB after 4,000 steps.
        del data, sink
        pa.default_memory_pool().release_unused()


def part_name(generation: int, step: int) -> str:
    """Return the name of the part that begins with this step of this generation."""
    return f"{FOLDER}/{generation:08d}-{step:012d}.parquet"


def entries_of_part(run: Folder, name: str) -> list[tuple[int, int]]:
    """Return the generation and the step of each entry of a part.

    Raises `OSError` if it cannot be read, and `InputError` if it is damaged.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(run.read(name)), page_checksum_verification=True)
        table = file.read(columns=["generation", "step", "shard"])
        generation, step, shard = (column.to_numpy() for column in table.columns)
    except (pa.ArrowException, KeyError, ValueError) as error:
        raise InputError(
            f"the file is damaged: {first_line(error)}",
            where=f"{run.where}/{name}",
            remedy="restore it from a copy, or start over with --fresh, which keeps this run's folder",
        ) from error
    first = shard == 0
    return list(zip(generation[first].tolist(), step[first].tolist(), strict=True))


def ledger_table(entries: list[Entry]) -> pa.Table:
    """Return entries as rows of the ledger."""
    notes = np.stack([np.frombuffer(notes, NOTE) for _, _, notes, _ in entries])
    steps, shards = notes.shape
    # Sorted by shard, then step, nearly all columns are runs of equal values or of equal differences.
    by_shard = np.ascontiguousarray(notes.T).reshape(-1)
    columns = {
        "generation": np.tile([generation for generation, *_ in entries], shards),
        "step": np.tile([step for _, step, *_ in entries], shards),
        "shard": np.repeat(np.arange(shards), steps),
        **{name: np.ascontiguousarray(by_shard[name]) for name in ("start", "rows", "weight")},
        "ids": by_shard["ids"] & np.uint64(2 ** kept_bits(shards) - 1),
    }
    of_steps = pa.concat_arrays([column_of(step_sum(notes["ids"])), pa.nulls(len(by_shard) - steps, pa.uint64())])
    whole = [column_of(columns[name]) for name in SCHEMA.names if name in columns]
    table = pa.Table.from_arrays([*whole, of_steps], schema=SCHEMA)
    if not by_shard["skipped"].any():
        return table
    table = table.append_column("skipped", column_of(np.ascontiguousarray(by_shard["skipped"])))
    return table.append_column("skipped_rows", _skipped_rows([skipped for *_, skipped in entries], shards))


def _skipped_rows(of_steps: list[bytes], shards: int) -> pa.Array:
    """Return the column `skipped_rows`, given the `SKIPPED` rows of each step."""
    found = [np.frombuffer(skipped, SKIPPED) for skipped in of_steps]
    rows = np.concatenate(found)
    notes = rows["shard"] * len(of_steps) + np.repeat(np.arange(len(of_steps)), [len(one) for one in found])
    counts = np.bincount(notes, minlength=len(of_steps) * shards)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    values = column_of(rows["offset"][np.lexsort((rows["offset"], notes))])
    # `pa.array` would load pandas: see `column_of`.
    buffers = [pa.py_buffer(np.packbits(counts > 0, bitorder="little")), pa.py_buffer(offsets)]
    return pa.Array.from_buffers(SKIPPED_ROWS, len(counts), buffers, children=[values])


def _steps_of_a_part(notes: bytes) -> int:
    return max(1, min(PART_STEPS, PART_NOTES * NOTE.itemsize // max(1, len(notes))))
