"""Compute which rows each shard of a run on a mix of sources was due to use at each step, for the audit.

Everything follows from the documented formulas (the docstrings of `data.order.mixed_order` and `data.ledger.ledger`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from raytrain_plus.audit.audit_order import ExpectedOrder, Ints, Skips, Words, chain

LONGEST = 10_000
"""Places of the pattern if the weights are no ratio of small whole numbers."""


class ExpectedMix(ExpectedOrder):
    """The expected sample order of a mix: each source has an expected order of its own.

    A position in a shard's own sequence is first turned into the rows that the shard has had of each source.
    """

    def __init__(self, job: Mapping[str, Any], then: Mapping[str, Any]) -> None:
        super().__init__(job, then)
        places = _places([source["weight"] for source in job["data"]["mix"]])
        self._length = sum(places)
        pattern = np.array(_pattern(places))
        self._counted = [np.append(0, np.cumsum(pattern == source)) for source in range(len(places))]
        self._sources = [
            ExpectedOrder({**job, "seed": int(chain(int(job["seed"]), 4, source))}, {"files": files})
            for source, files in enumerate(files_by_source(then, len(places)))
        ]
        for source, order in enumerate(self._sources):
            order.source = source

    def ids_between(self, shards: Ints, starts: Ints, stops: Ints) -> Words:
        """Return for each entry the sum of the ids of the rows [start, stop) of its shard's own sequence."""
        expected = np.zeros(len(starts), np.uint64)
        for source, order in enumerate(self._sources):
            low, high = (self._had(source, shards, positions) for positions in (starts, stops))
            expected += order.ids_between(shards, low, high)
        return expected

    def by_source(
        self, entries: npt.NDArray[Any], due_to: int
    ) -> Iterator[tuple[ExpectedOrder, npt.NDArray[Any], Skips, Ints]]:
        """See `ExpectedOrder.by_source`."""
        [(_, entries, skips, due)] = super().by_source(entries, due_to)
        for source, order in enumerate(self._sources):
            own = entries.copy()
            own["start"] = self._had(source, entries["shard"], entries["start"])
            own["rows"] = self._had(source, entries["shard"], entries["start"] + entries["rows"]) - own["start"]
            skipped = skips.copy()
            skipped["position"] = self._had(source, skips["shard"], skips["position"])
            mine = self._had(source, skips["shard"], skips["position"] + 1) > skipped["position"]
            yield order, own, skipped[mine], self._had(source, np.arange(self.shards), due)

    def files_of(self, shard: int, start: int, rows: int) -> str:
        """Return the names of the files that hold these rows of the shard, joined by commas."""
        named = []
        for source, order in enumerate(self._sources):
            low, high = self._had(source, np.array([shard] * 2), np.array([start, start + max(0, rows)])).tolist()
            named.append(order.files_of(shard, low, high - low))
        return ", ".join(filter(None, named))

    def _had(self, source: int, shards: Ints, positions: Ints) -> Ints:
        """Return the rows of a source among the first rows, as many as `positions` says, of each of the shards."""
        first = shards * self._length // self.shards
        begin = first + positions // self.per_shard * self.per_shard
        rows = [self._until(other, begin + self.per_shard) - self._until(other, begin) for other in range(source + 1)]
        # In a step, the rows of earlier sources come first.
        inside = positions % self.per_shard - sum(rows[:source], np.zeros_like(positions))
        earlier = self._until(source, begin) - self._until(source, first)
        return np.asarray(earlier + np.clip(inside, 0, rows[source]), np.int64)

    def _until(self, source: int, places: Ints) -> Ints:
        """Return how many of the first places of the endless pattern are a source's."""
        before = self._counted[source]
        return np.asarray(places // self._length * before[-1] + before[places % self._length], np.int64)


def files_by_source(then: Mapping[str, Any], sources: int) -> list[list[dict[str, Any]]]:
    """Return the files of each source, as `dataset.json` lists them: their names begin with its number and a slash."""
    found: list[list[dict[str, Any]]] = [[] for _ in range(sources)]
    for file in then["files"]:
        number = file["path"].partition("/")[0]
        if number.isdecimal() and int(number) < sources:
            found[int(number)].append(file)
    return found


def _places(weights: Sequence[float]) -> list[int]:
    """Return the places of each source in the pattern."""
    shares = [Fraction(Decimal(str(weight))) for weight in weights]
    shares = [share / sum(shares) for share in shares]
    length = math.lcm(*(share.denominator for share in shares))
    if length <= LONGEST:
        return [int(share * length) for share in shares]
    exact = [share * LONGEST for share in shares]
    places = [math.floor(one) for one in exact]
    ranked = sorted(range(len(exact)), key=lambda source: places[source] - exact[source])
    for source in ranked[: LONGEST - sum(places)]:
        places[source] += 1
    return places


def _pattern(places: Sequence[int]) -> list[int]:
    """Return the source of each place."""
    common = math.lcm(*(count for count in places if count))
    at = [((2 * j + 1) * (common // count), source) for source, count in enumerate(places) for j in range(count)]
    return [source for _, source in sorted(at)]
