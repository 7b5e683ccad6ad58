"""The sample order: the endless sequence of the rows of epoch 0, 1, 2, ..., divided over shards and steps. Pure.

An epoch permutes the units (row groups) by (seed, epoch), lays their rows end to end, and divides them into one span
per shard; spans differ by at most one row. A shard's own sequence is its span of epoch 0, then of epoch 1, and so on.
Step s takes the rows [s b, (s + 1) b) of each shard's sequence, b = batch_size / shards. So no row is dropped, padded
or repeated, every step has the same size, and a position in the data is one integer.

With N rows and M shards, epoch e's N mod M extra rows go to the shards (e N + i) mod M, i < N mod M. Therefore shard k
has had ceil((e N - k) / M) rows before epoch e.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Shuffle = Literal["none", "units", "rows"]

_UNITS, _ROWS = 1, 2
_EPOCHS_KEPT = 4
_MASK = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class RowRange:
    """Consecutive rows of one unit, counted in the unit's row order of that epoch."""

    epoch: int
    unit: int
    start: int
    rows: int


def mix(*parts: int) -> int:
    """Return a 64-bit hash of integers, in order: h = splitmix64(h + part), starting with h = 0.

    splitmix64 is the finaliser of Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014.
    """
    state = 0
    for part in parts:
        # In Python's integers: an array of one number takes twenty times as long.
        z = (state + part + 0x9E3779B97F4A7C15) & _MASK
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
        state = z ^ (z >> 31)
    return state


def order(key: int, length: int) -> npt.NDArray[np.int64]:
    """Return a permutation of range(length): the indices i sorted by splitmix64(key + i), ties by i."""
    values = splitmix64(np.arange(length, dtype=np.uint64) + np.uint64(key))
    return np.argsort(values, kind="stable").astype(np.int64)


def splitmix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return each value mixed by splitmix64, in arithmetic modulo 2^64."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


class SampleOrder:
    """The sample order of one dataset, seed and number of shards.

    It ends after `steps` or `epochs`; exactly one of them is given. `unit_rows`: the rows of each unit.
    """

    def __init__(
        self,
        unit_rows: Sequence[int],
        *,
        shards: int,
        batch_size: int,
        seed: int,
        shuffle: Shuffle = "rows",
        steps: int | None = None,
        epochs: int | None = None,
    ) -> None:
        self._unit_rows = np.asarray(unit_rows, dtype=np.int64)
        self.rows = int(self._unit_rows.sum())
        self.shards = shards
        self.per_shard = batch_size // shards
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self.steps = steps_of_epochs(self.rows, shards, self.per_shard, epochs) if steps is None else steps
        self._tables: OrderedDict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = OrderedDict()

    def __getstate__(self) -> dict[str, object]:
        # Another thread may be filling the tables while this is pickled; each copy builds its own.
        return {**self.__dict__, "_tables": OrderedDict()}

    def rows_before(self, shard: int, epoch: int) -> int:
        """Return the number of rows of the shard before `epoch`."""
        return max(0, -((shard - epoch * self.rows) // self.shards))

    def span(self, shard: int, epoch: int) -> tuple[int, int]:
        """Return the shard's span of the epoch's rows: (offset, length)."""
        base, extra = divmod(self.rows, self.shards)
        first = (epoch * self.rows) % self.shards
        # The number of earlier shards that have an extra row in this epoch.
        ahead = sum(1 for i in range(extra) if (first + i) % self.shards < shard)
        mine = (shard - first) % self.shards < extra
        return shard * base + ahead, base + mine

    def rows_in_step(self, shard: int, step: int) -> int:
        """Return the rows that the shard contributes to `step`.

        This is `per_shard`, except in the last step of a job that counts epochs.
        """
        if self._epochs is None or step + 1 < self.steps:
            return self.per_shard
        return self.rows_before(shard, self._epochs) - step * self.per_shard

    @property
    def source_orders(self) -> tuple[SampleOrder, ...]:
        """The orders that this one is mixed of: itself alone; see `data.order.mixed_order`."""
        return (self,)

    def used_before(self, shard: int, step: int, source: int = 0) -> int:
        """Return the rows that the shard uses before `step`."""
        last = min(step, self.steps) - 1
        return 0 if last < 0 else last * self.per_shard + self.rows_in_step(shard, last)

    def step_of(self, shard: int, at: int, source: int = 0) -> int:
        """Return the step in which the shard uses row `at` of its own sequence."""
        return min(at // self.per_shard, self.steps - 1)

    def source_ranges(self, source: int, shard: int, start: int, stop: int) -> tuple[RowRange, ...]:
        """Return the rows [start, stop) of the shard's own sequence."""
        return self.row_ranges_between(shard, start, stop)

    def row_ranges(self, shard: int, step: int) -> tuple[RowRange, ...]:
        """Return the shard's rows of `step`, in order."""
        start = step * self.per_shard
        return self.row_ranges_between(shard, start, start + self.rows_in_step(shard, step))

    def row_ranges_between(self, shard: int, start: int, stop: int) -> tuple[RowRange, ...]:
        """Return the rows [start, stop) of the shard's own sequence."""
        found: list[RowRange] = []
        epoch = start * self.shards // self.rows
        while self.rows_before(shard, epoch) > start:
            epoch -= 1
        while start < stop:
            end = self.rows_before(shard, epoch + 1)
            if start >= end:
                epoch += 1
                continue
            offset, _ = self.span(shard, epoch)
            at = offset + start - self.rows_before(shard, epoch)
            count = min(stop, end) - start
            found.extend(self._of_epoch(epoch, at, count))
            start += count
        return tuple(found)

    def permutation(self, epoch: int, unit: int) -> npt.NDArray[np.int64] | None:
        """Return the order of the unit's rows in that epoch, as indices into the file's order; None if unshuffled."""
        if self._shuffle != "rows":
            return None
        return order(mix(self._seed, _ROWS, epoch, unit), int(self._unit_rows[unit]))

    def unit_order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the units in the epoch's order."""
        return self._table(epoch)[0]

    def _table(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return (units in order, rows before each and in total); the tables of a few epochs are cached."""
        table = self._tables.get(epoch)
        if table is None:
            count = len(self._unit_rows)
            units = np.arange(count) if self._shuffle == "none" else order(mix(self._seed, _UNITS, epoch), count)
            starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(self._unit_rows[units])])
            table = (units, starts)
            self._tables[epoch] = table
            while len(self._tables) > _EPOCHS_KEPT:
                self._tables.popitem(last=False)
        return table

    def _of_epoch(self, epoch: int, at: int, count: int) -> list[RowRange]:
        """Return `count` rows of an epoch, from position `at` of it on."""
        units, starts = self._table(epoch)
        index = int(np.searchsorted(starts, at, side="right")) - 1
        found = []
        while count:
            inside = at - int(starts[index])
            rows = min(count, int(starts[index + 1]) - at)
            if rows:
                found.append(RowRange(epoch, int(units[index]), inside, rows))
            at += rows
            count -= rows
            index += 1
        return found


def steps_of_epochs(rows: int, shards: int, per_shard: int, epochs: int | None) -> int:
    """Return the number of steps that use every row of `epochs` epochs once.

    The rows left over after the last full step form a short step. If some shard would contribute fewer than two rows to
    it (BatchNorm needs two), they join the last full step instead.
    """
    if epochs is None:
        raise ValueError("a sample order ends after `steps` or after `epochs`: give exactly one")
    each, over = divmod(epochs * rows, shards)
    full, left = divmod(each, per_shard)
    if (left == 0 and over == 0) or (left < 2 and full):
        return full
    return full + 1


def read_factor(sample_order: SampleOrder, units: int) -> float:
    """Return how often a unit is read in epoch 0, on average; 1 if no unit is shared by several spans."""
    reads = 0
    for shard in range(sample_order.shards):
        _, length = sample_order.span(shard, 0)
        reads += len(sample_order.row_ranges_between(shard, 0, length)) if length else 0
    return reads / max(1, units)
