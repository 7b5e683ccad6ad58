"""The sample order of a mix: several sources in fixed proportions, each with epochs of its own. Pure.

A pattern of L places says which source each row comes from; it repeats endlessly. If the weights are proportional to
whole numbers n_i without a common divisor whose sum is at most 10,000, source i has n_i places. Otherwise L = 10,000,
and the places are apportioned by largest remainder, ties to the earlier source. The places j < n_i of source i lie at
(j + 1/2) / n_i, and the pattern is all places in this order, ties by source. So any rows that follow each other in the
pattern have each source's share of L, within 1 + sources x share rows.

Shard k of M reads the pattern from place floor(k L / M) on, and step s takes the places [s b, (s + 1) b) from there,
b = batch_size / shards. Within a step its rows are grouped by source, in the order of the sources, so that reads stay
long. The shard's own sequence is these steps end to end, so a position in it is one integer.

The j-th row of source i in a shard is row j of that shard's own sequence in the plain sample order of source i alone
(`data.order.sample_order`), with M shards and the seed mix(seed, 4, i). So each source has epochs of its own, and uses
each of its rows once in each of them. Units are numbered source by source.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from raytrain_plus.data.order.sample_order import RowRange, SampleOrder, Shuffle, mix

PATTERN = 10_000
"""Maximum places of the pattern."""
_SOURCES = 4


def apportioned(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the places of each source in the pattern. A source with less than 1 / `PATTERN` of it may have none.

    Weights are taken as the decimal numbers that they are written as.

    >>> apportioned([0.75, 0.25]), apportioned([6, 2, 2]), sum(apportioned([1, 3.14159]))
    ((3, 1), (3, 1, 1), 10000)
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(one.denominator for one in exact))
    whole = [int(one * scale) for one in exact]
    divisor, total = math.gcd(*whole), sum(whole)
    if total // divisor <= PATTERN:
        return tuple(one // divisor for one in whole)
    counts = [one * PATTERN // total for one in whole]
    by_remainder = sorted(range(len(whole)), key=lambda source: (-(whole[source] * PATTERN % total), source))
    for source in by_remainder[: PATTERN - sum(counts)]:
        counts[source] += 1
    return tuple(counts)


def pattern_of(counts: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return the source of each place, given the places of each source."""
    source = np.repeat(np.arange(len(counts)), counts)
    # Equal quotients are equal floats, and others differ by far more than their rounding.
    at = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
    return source[np.argsort(at, kind="stable")]


class MixedOrder:
    """The sample order of a mix, one seed and number of shards; it ends after `steps`.

    `source_unit_rows`: for each source, the rows of each of its units.
    """

    def __init__(
        self,
        source_unit_rows: Sequence[Sequence[int]],
        weights: Sequence[float],
        *,
        shards: int,
        batch_size: int,
        seed: int,
        shuffle: Shuffle = "rows",
        steps: int,
    ) -> None:
        self.shards = shards
        self.per_shard = batch_size // shards
        self.steps = steps
        self.counts = apportioned(weights)
        """The places of each source in the pattern."""
        self.source_orders = tuple(
            SampleOrder(
                unit_rows,
                shards=shards,
                batch_size=batch_size,
                seed=mix(seed, _SOURCES, source),
                shuffle=shuffle,
                steps=steps,
            )
            for source, unit_rows in enumerate(source_unit_rows)
        )
        """The order of each source alone, which numbers the source's units from 0."""
        self.rows = sum(order.rows for order in self.source_orders)
        self._first_units = [0, *itertools.accumulate(len(unit_rows) for unit_rows in source_unit_rows)]
        self._lay_out()

    def _lay_out(self) -> None:
        self._length = sum(self.counts)
        pattern = pattern_of(self.counts)
        sources = range(len(self.counts))
        self._places = [np.flatnonzero(pattern == source) for source in sources]
        self._before = [np.concatenate([[0], np.cumsum(pattern == source)]) for source in sources]

    def __getstate__(self) -> dict[str, object]:
        # The tables are larger than all else; each copy builds its own.
        return {name: value for name, value in self.__dict__.items() if name not in ("_places", "_before")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._lay_out()

    def used_before(self, shard: int, step: int, source: int = 0) -> int:
        """Return the rows of a source that the shard uses before `step`."""
        first = self._first_place(shard)
        return self._until(source, first + step * self.per_shard) - self._until(source, first)

    def step_of(self, shard: int, at: int, source: int = 0) -> int:
        """Return the step in which the shard uses row `at` of its own sequence of a source."""
        first = self._first_place(shard)
        turns, place = divmod(self._until(source, first) + at, self.counts[source])
        return (turns * self._length + int(self._places[source][place]) - first) // self.per_shard

    def rows_in_step(self, shard: int, step: int) -> int:
        """Return the rows that the shard contributes to `step`: as many in every step."""
        return self.per_shard

    def row_ranges(self, shard: int, step: int) -> tuple[RowRange, ...]:
        """Return the shard's rows of `step`, in order."""
        return self.row_ranges_between(shard, step * self.per_shard, (step + 1) * self.per_shard)

    def row_ranges_between(self, shard: int, start: int, stop: int) -> tuple[RowRange, ...]:
        """Return the rows [start, stop) of the shard's own sequence; epochs are those of each source."""
        found: list[RowRange] = []
        while start < stop:
            step, low = divmod(start, self.per_shard)
            high = min(stop - step * self.per_shard, self.per_shard)
            # Where in the step the rows of a source begin.
            at = 0
            for source in range(len(self.source_orders)):
                used = self.used_before(shard, step, source)
                rows = self.used_before(shard, step + 1, source) - used
                begin, end = max(low, at), min(high, at + rows)
                if begin < end:
                    found += self.source_ranges(source, shard, used + begin - at, used + end - at)
                at += rows
            start += high - low
        return tuple(found)

    def source_ranges(self, source: int, shard: int, start: int, stop: int) -> tuple[RowRange, ...]:
        """Return the rows [start, stop) of the shard's own sequence of a source, by the numbers of all units."""
        first = self._first_units[source]
        return tuple(
            RowRange(one.epoch, first + one.unit, one.start, one.rows)
            for one in self.source_orders[source].row_ranges_between(shard, start, stop)
        )

    def permutation(self, epoch: int, unit: int) -> npt.NDArray[np.int64] | None:
        """Return the order of the unit's rows in that epoch of its source, as `SampleOrder.permutation`."""
        source = int(np.searchsorted(self._first_units, unit, side="right")) - 1
        return self.source_orders[source].permutation(epoch, unit - self._first_units[source])

    def epochs(self, source: int) -> float:
        """Return how many epochs of a source all steps of all shards use."""
        used = sum(self.used_before(shard, self.steps, source) for shard in range(self.shards))
        return used / self.source_orders[source].rows

    def _first_place(self, shard: int) -> int:
        return shard * self._length // self.shards

    def _until(self, source: int, place: int) -> int:
        """Return the places of a source before `place` of the endless pattern."""
        turns, inside = divmod(place, self._length)
        return turns * self.counts[source] + int(self._before[source][inside])


AnyOrder = SampleOrder | MixedOrder
"""The sample order of a job."""
