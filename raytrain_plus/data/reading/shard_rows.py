"""Hold the rows of one shard between their reading and their use."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from raytrain_plus.data.order.mixed_order import AnyOrder
from raytrain_plus.data.reading.unusable import joined


class ShardRows:
    """One shard's rows that have been read but not yet used; those of each source of a mix in a queue of their own."""

    def __init__(self, sample_order: AnyOrder, shard: int, first_step: int) -> None:
        self._sample_order = sample_order
        self._shard = shard
        self.at = first_step * sample_order.per_shard
        """The position of the next row in the shard's own sequence."""
        self.row_bytes = 0.0
        """Bytes of a row, of those that came last."""
        self._sources = range(len(sample_order.source_orders))
        self._tables: list[list[pa.Table]] = [[] for _ in self._sources]
        self._have = [0 for _ in self._sources]

    def lacks(self, steps: range) -> bool:
        """Return whether rows of these steps, which are the next ones, have yet to be read."""
        return any(self._have[source] < self._rows_in(steps, source) for source in self._sources)

    def _rows_in(self, steps: range, source: int) -> int:
        used_before = self._sample_order.used_before
        return used_before(self._shard, steps.stop, source) - used_before(self._shard, steps.start, source)

    def add(self, table: pa.Table, source: int) -> None:
        """Add the next rows of a source."""
        self.row_bytes = table.nbytes / max(1, table.num_rows)
        self._tables[source].append(table)
        self._have[source] += table.num_rows

    def take(self, steps: range) -> pa.Table:
        """Return the rows of these steps, which are the next ones, in the order of use."""
        parts: list[pa.Table] = []
        # Rows are grouped by source within a step only.
        for group in (steps,) if len(self._sources) == 1 else (range(step, step + 1) for step in steps):
            for source in self._sources:
                parts += self._taken(source, self._rows_in(group, source))
        self.at += sum(part.num_rows for part in parts)
        return parts[0] if len(parts) == 1 else joined(parts)

    def _taken(self, source: int, wanted: int) -> Iterator[pa.Table]:
        """Yield the next `wanted` rows of a source."""
        self._have[source] -= wanted
        tables = self._tables[source]
        while wanted:
            table = tables.pop(0)
            yield table.slice(0, wanted)
            if table.num_rows > wanted:
                tables.insert(0, table.slice(wanted))
            wanted -= min(wanted, table.num_rows)
