"""Keep the records that no controller has confirmed as durable, so that none is lost with a controller.

They are kept in chunks, each of which is sent in one report, and is forgotten as a whole.
"""

from __future__ import annotations

import logging
import pickle
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from raytrain_plus.training.exchange.step_records import Evaluated, Record, StepRecord

log = logging.getLogger(__name__)

MOST = 10_000
"""Maximum number of records in memory; older ones are in a temporary file."""
CHUNK = 1_000
"""Maximum number of records of a chunk."""


@dataclass(slots=True)
class _Chunk:
    """Some records of one generation, in order."""

    number: int
    """The generation's number in events."""
    records: list[Record]
    """Empty if they are in the file."""
    place: tuple[int, int] | None = None
    """Where they begin in the file, and their number of bytes."""
    sent: bool = False
    last: int = -2
    """The highest step of its records that are to be confirmed."""

    def durable(self, step: int) -> bool:
        """Return whether nothing is left to confirm if that step is durable."""
        return self.sent and self.last <= step


class Unconfirmed:
    """The records of one worker, of all its generations."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunks: list[_Chunk] = []
        self._held = 0
        """The number of records in memory."""
        self._file: IO[bytes] | None = None

    def add(self, number: int, records: Sequence[Record]) -> None:
        """Keep records of the generation with that number, which are not sent yet."""
        with self._lock:
            for record in records:
                last = self._chunks[-1] if self._chunks else None
                if last is None or last.number != number or last.sent or last.place or len(last.records) >= CHUNK:
                    last = _Chunk(number, [])
                    self._chunks.append(last)
                last.records.append(record)
                if isinstance(record, StepRecord):
                    last.last = max(last.last, record.step)
                elif isinstance(record, Evaluated):
                    # It is told after its step: only when a later one is durable, it is, too.
                    last.last = max(last.last, record.step + 1)
            self._held += len(records)
            for chunk in self._chunks:
                if self._held <= MOST:
                    return
                try:
                    self._move_to_file(chunk)
                except OSError as error:
                    # It stays in memory.
                    log.warning("records cannot be kept in a file: %s", error)
                    return

    def next(self, number: int) -> list[Record]:
        """Return the oldest records of that generation that are not sent, and count them as sent."""
        with self._lock:
            for chunk in self._chunks:
                if chunk.number == number and not chunk.sent:
                    chunk.sent = True
                    return self._read(chunk)
            return []

    def confirm(self, step: int) -> None:
        """Forget records that were sent: those of steps up to `step`, and what is on no step."""
        with self._lock:
            for chunk in self._chunks:
                if chunk.durable(step):
                    self._held -= len(chunk.records)
            self._chunks = [chunk for chunk in self._chunks if not chunk.durable(step)]
            if self._file is not None and not any(chunk.place for chunk in self._chunks):
                self._file.close()
                self._file = None

    def all(self) -> list[tuple[int, Record]]:
        """Return all records, each with its generation's number; of those sent, the ones to be confirmed."""
        with self._lock:
            return [
                (chunk.number, record)
                for chunk in self._chunks
                for record in self._read(chunk)
                if not chunk.sent or isinstance(record, (StepRecord, Evaluated))
            ]

    def _move_to_file(self, chunk: _Chunk) -> None:
        if chunk.place is not None:
            return
        if self._file is None:
            # Open for as long as a record in it is not confirmed.
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        start = self._file.seek(0, 2)
        size = self._file.write(pickle.dumps(chunk.records))
        self._file.flush()
        chunk.place = start, size
        self._held -= len(chunk.records)
        chunk.records = []

    def _read(self, chunk: _Chunk) -> list[Record]:
        if chunk.place is None or self._file is None:
            return list(chunk.records)
        start, size = chunk.place
        self._file.seek(start)
        found: list[Record] = pickle.loads(self._file.read(size))
        return found
