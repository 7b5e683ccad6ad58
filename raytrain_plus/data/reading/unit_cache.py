"""Keep the units of a worker's source in memory, over the `Batches` that follow one another."""

from __future__ import annotations

import threading

import pyarrow as pa

from raytrain_plus.data.reading.transform_block import RowReader

JOIN_S = 5.0
"""Maximum seconds to wait for the thread that read before; a thread stuck in a read is abandoned."""


class UnitCache:
    """The units that a worker has read, if all of them fit into its memory."""

    def __init__(self, rows: RowReader, cache_mb: int) -> None:
        """Keep whole units if all rows fit into `cache_mb` megabytes."""
        self.keeps = rows.fit(cache_mb)
        self._every = frozenset(range(len(rows.source.unit_rows)))
        self.units: dict[int, pa.Table] = {}
        """The units in memory, by number; one thread at a time fills it."""
        self._reading: threading.Thread | None = None

    def begin(self) -> None:
        """Let the calling thread read next, once the one before has ended or after `JOIN_S` seconds.

        Two threads reading at once would read the same units twice.
        """
        before, self._reading = self._reading, threading.current_thread()
        if before is not None:
            before.join(JOIN_S)

    @property
    def lacking(self) -> frozenset[int]:
        """The units that are not in memory."""
        return self._every - set(self.units)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to read."""
        return self.keeps and len(self.units) == len(self._every)
