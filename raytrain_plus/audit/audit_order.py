"""Compute which rows each shard of a run was due to use at each step, for the audit.

Everything follows from the documented formulas (the docstrings of `data.order.sample_order` and `data.ledger.ledger`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raytrain_plus.audit.audit_faults import Faults
from raytrain_plus.audit.audit_files import images_below

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

Skips = npt.NDArray[Any]
"""Skipped rows: `SKIP`s, each once, sorted."""
SKIP = np.dtype([("shard", "<i8"), ("position", "<i8")])
"""A skipped row, by its position in its shard's own sequence."""

BLOCK_ROWS = 1 << 20
"""Rows whose ids are computed together: bounds the memory."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """How often the rows of one epoch that were due by the last audited step were used.

    All counts are in rows: `due` in all, `never` used, used `once`, used `more` than once, `skipped` instead.
    """

    epoch: int
    due: int
    never: int
    once: int
    more: int
    source: int | None = None
    """The source of a mix that the epoch belongs to."""
    skipped: int = 0


class ExpectedOrder:
    """The expected sample order: which rows each shard contributes to a step, and their ids."""

    def __init__(self, job: Mapping[str, Any], then: Mapping[str, Any]) -> None:
        data = job["data"]
        self._seed = int(job["seed"])
        self._shuffle = data["shuffle"]
        self.shards = int(data["shards"])
        self.per_shard = int(data["batch_size"]) // self.shards
        self._files = [file["path"] for file in then["files"]]
        units = [
            (number, group, rows)
            for number, file in enumerate(then["files"])
            for group, rows in enumerate(file["row_groups"])
            if rows
        ]
        self._unit_file = np.array([number for number, _, _ in units], np.int64)
        self._unit_rows = np.array([rows for _, _, rows in units], np.int64)
        places = [group for _, group, _ in units]
        self._unit_group = places
        self._images = then.get("converted_from") if then.get("format") == "images" else None
        """The folder of the images that were converted to these files, if they were."""
        self.source: int | None = None
        """The source of a mix that this is the order of."""
        keys = [int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "little") for path in self._files]
        with np.errstate(over="ignore"):
            self._unit_key = _scramble(np.array(keys, np.uint64)[self._unit_file] + np.array(places, np.uint64))
        self.rows = int(self._unit_rows.sum())
        if not self.rows:
            raise ValueError("a dataset without rows")
        self._order: tuple[int, Ints] = (-1, np.empty(0, np.int64))
        self._epochs = job["epochs"]
        self._skips = data.get("on_error") == "skip"
        self.transformed = data.get("transform") is not None
        """Whether the job has a `data.transform`."""
        self.steps = int(job["steps"]) if self._epochs is None else self._steps(int(self._epochs))

    def _steps(self, epochs: int) -> int:
        each = epochs * self.rows // self.shards
        full, left = divmod(each, self.per_shard)
        something = left > 0 or epochs * self.rows % self.shards > 0
        return full + (something and (left >= 2 or full == 0))

    def _before(self, epoch: int) -> Ints:
        """Return for each shard the number of rows due before `epoch`."""
        k = np.arange(self.shards)
        return np.maximum(0, -((k - epoch * self.rows) // self.shards))

    def _ends(self, step: int) -> Ints:
        """Return for each shard the position in its own sequence at which its rows of `step` end."""
        if self._epochs is not None and step == self.steps - 1:
            return self._before(int(self._epochs))
        return np.full(self.shards, (step + 1) * self.per_shard)

    def check(self, entries: npt.NDArray[Any], faults: Faults) -> npt.NDArray[np.bool_]:
        """Return which entries hold the due rows with the right ids; report the others."""
        starts = entries["step"] * self.per_shard
        ends = np.where(
            entries["step"] == self.steps - 1, self._ends(self.steps - 1)[entries["shard"]], starts + self.per_shard
        )
        spans = entries["rows"] + entries["skipped"]
        placed = (entries["start"] == starts) & (spans == ends - starts)
        misplaced = zip(entries[~placed], starts[~placed], (ends - starts)[~placed], strict=True)
        faults.add_many(
            int((~placed).sum()),
            (
                f"step {entry['step']}, shard {entry['shard']}: used {entry['rows']} rows from position "
                f"{entry['start']}, expected {rows} rows from position {start} "
                f"({self.files_of(int(entry['shard']), int(start), int(rows))})"
                for entry, start, rows in misplaced
            ),
        )
        total = int(self._ends(self.steps - 1).max())
        held = (entries["start"] >= 0) & (entries["rows"] >= 0) & (spans <= total - entries["start"])
        held &= ~self._wrongly_skipped(entries, faults)
        stops = np.where(held, entries["start"] + spans, 0)
        starts = np.where(held, entries["start"], 0)
        expected = self._used_ids(entries, held, starts, stops)
        kept = min(64, max(0, 390 // self.shards - 1))
        right: npt.NDArray[np.bool_] = held & (expected & np.uint64(2**kept - 1) == entries["ids"])
        others = entries[placed & held & ~right]
        faults.add_many(
            len(others),
            (
                f"step {entry['step']}, shard {entry['shard']}: rows outside the sample order were used "
                f"({self.files_of(int(entry['shard']), int(entry['start']), int(entry['rows']))})"
                for entry in others
            ),
        )
        return right & ~self._in_wrong_steps(entries, expected, right, faults)

    def _wrongly_skipped(self, entries: npt.NDArray[Any], faults: Faults) -> npt.NDArray[np.bool_]:
        """Return which entries skip rows as none can; report them."""
        wrong = np.zeros(len(entries), np.bool_)
        said = []
        for row in np.flatnonzero((entries["skipped"] != 0) | (entries["skipped_rows"] != None)):  # noqa: E711
            entry = entries[row]
            places, count = entry["skipped_rows"] or [], int(entry["skipped"])
            span = int(entry["rows"]) + count
            which = f"step {entry['step']}, shard {entry['shard']}"
            if not self._skips:
                said.append(f"{which}: rows were skipped, although data.on_error is stop")
            elif len(set(places)) != count or not all(isinstance(one, int) and 0 <= one < span for one in places):
                said.append(f"{which}: the ledger does not say which {count} of {span} rows were skipped")
            else:
                continue
            wrong[row] = True
        faults.add_many(len(said), said)
        return wrong

    def _used_ids(self, entries: npt.NDArray[Any], held: npt.NDArray[np.bool_], starts: Ints, stops: Ints) -> Words:
        """Return for each entry the sum of the ids of the rows [start, stop) that it did not skip."""
        skipping = np.flatnonzero(held & (entries["skipped"] > 0))
        owner = np.repeat(skipping, entries["skipped"][skipping])
        offsets = np.array([one for row in skipping for one in entries["skipped_rows"][row]], np.int64)
        positions = starts[owner] + offsets
        shards = np.concatenate([entries["shard"], entries["shard"][owner]])
        sums = self.ids_between(shards, np.append(starts, positions), np.append(stops, positions + 1))
        expected = sums[: len(entries)]
        np.subtract.at(expected, owner, sums[len(entries) :])
        return expected

    def ids_between(self, shards: Ints, starts: Ints, stops: Ints) -> Words:
        """Return for each entry the sum of the ids of the rows [start, stop) of its shard's own sequence."""
        expected = np.zeros(len(starts), np.uint64)
        order = np.argsort(starts, kind="stable")
        most = int((stops - starts).max(initial=0))
        for epoch in range(int(stops.max(initial=0)) * self.shards // self.rows + 2):
            before, after = self._before(epoch), self._before(epoch + 1)
            # Only the entries that can reach into the epoch.
            span = np.searchsorted(starts[order], [before.min() - most, after.max()])
            near = order[span[0] : span[1]]
            shard = shards[near]
            low = np.clip(starts[near], before[shard], after[shard])
            high = np.clip(stops[near], before[shard], after[shard])
            inside = np.flatnonzero(high > low)
            if not len(inside):
                continue
            offsets = np.concatenate([[0], np.cumsum(after - before)[:-1]])
            shift = (offsets - before)[shard[inside]]
            sums = self._sums(epoch)
            expected[near[inside]] += sums[high[inside] + shift] - sums[low[inside] + shift]
        return expected

    def _in_wrong_steps(
        self, entries: npt.NDArray[Any], expected: Words, right: npt.NDArray[np.bool_], faults: Faults
    ) -> npt.NDArray[np.bool_]:
        """Return which entries belong to steps whose sum is wrong though each of their shards seems right.

        If a shard's entry is missing or wrong, the step's sum proves nothing; the other shards count by their own bits.
        """
        wrong = np.zeros(len(entries), np.bool_)
        if not len(entries):
            return wrong
        order = np.lexsort((entries["shard"], entries["step"], entries["generation"]))
        sorted_entries = entries[order]
        step, shard = sorted_entries["step"], sorted_entries["shard"]
        new = np.concatenate([[True], (np.diff(step) != 0) | (np.diff(sorted_entries["generation"]) != 0)])
        firsts = np.flatnonzero(new)
        counts = np.diff(np.append(firsts, len(order)))
        # In a complete step each shard's entry is at the index of the shard.
        place = np.arange(len(order)) - np.repeat(firsts, counts)
        judged = np.logical_and.reduceat(right[order] & (shard == place), firsts) & (counts == self.shards)
        due = np.add.reduceat(_scramble(expected[order] + shard.astype(np.uint64)), firsts)
        said = np.add.reduceat(sorted_entries["step_ids"], firsts)
        times = np.add.reduceat(sorted_entries["summed"].astype(np.int64), firsts)
        unsummed, bad = judged & (times != 1), judged & (times == 1) & (due != said)
        wrong[order] = np.repeat(bad, counts)
        for found, what in (
            (unsummed, "expected exactly one step sum in the ledger"),
            (bad, "rows outside the sample order were used; the shards' bits do not show by which shard"),
        ):
            faults.add_many(int(found.sum()), (f"step {number}: {what}" for number in step[firsts[found]].tolist()))
        return wrong

    def use(self, entries: npt.NDArray[Any], due_to: int) -> list[Epoch]:
        """Count how often the rows that were due by step `due_to` were used, by epoch."""
        return [
            epoch for order, own, skips, due in self.by_source(entries, due_to) for epoch in order.used(own, skips, due)
        ]

    def by_source(
        self, entries: npt.NDArray[Any], due_to: int
    ) -> Iterator[tuple[ExpectedOrder, npt.NDArray[Any], Skips, Ints]]:
        """Yield for each source of a mix, or for the only dataset, its order and what entries are to it.

        These are: the entries, whose `rows` are now their whole spans; the rows that were skipped; and how many rows of
        each shard are due by step `due_to`.
        """
        due = self._ends(due_to) if due_to >= 0 else np.zeros(self.shards, np.int64)
        yield self, *spans_of(entries, due), due

    def used(self, entries: npt.NDArray[Any], skips: Skips, due: Ints) -> list[Epoch]:
        """Count how often the first `due` rows of each shard were used, by epoch; see `by_source`."""
        epochs = int(np.ceil(due.max() * self.shards / self.rows)) + 1 if len(due) else 0
        counts, skipped = np.zeros((epochs + 1, 3), np.int64), np.zeros(epochs + 1, np.int64)
        bounds = [self._before(epoch) for epoch in range(epochs + 2)]
        entries = entries[np.argsort(entries["shard"], kind="stable")]
        firsts = np.searchsorted(entries["shard"], np.arange(self.shards + 1))
        for shard in range(self.shards):
            mine = entries[firsts[shard] : firsts[shard + 1]]
            edges = np.array([bound[shard] for bound in bounds])
            points = np.concatenate([mine["start"], mine["start"] + mine["rows"], edges, [0, due[shard]]])
            changes = np.concatenate([np.ones(len(mine)), -np.ones(len(mine)), np.zeros(len(edges) + 2)])
            order = np.argsort(points, kind="stable")
            points, depth = points[order], np.cumsum(changes[order])
            lengths = np.diff(points)
            keep = (lengths > 0) & (points[:-1] < due[shard])
            epoch = np.searchsorted(edges, points[:-1][keep], side="right") - 1
            often = np.minimum(depth[:-1][keep], 2).astype(int)
            np.add.at(counts, (epoch, often), lengths[keep])
            left_out = skips["position"][skips["shard"] == shard]
            once = depth[np.searchsorted(points, left_out, side="right") - 1] == 1
            np.add.at(skipped, np.searchsorted(edges, left_out[once], side="right") - 1, 1)
        return [
            Epoch(number, int(row.sum()), int(row[0]), int(row[1] - left_out), int(row[2]), self.source, int(left_out))
            for number, (row, left_out) in enumerate(zip(counts, skipped, strict=True))
            if row.sum()
        ]

    def places_of(self, ids: Words, due: Ints) -> Iterator[tuple[int, int, int, np.uint64]]:
        """Yield epoch, shard, position and id of each due row that has one of these ids."""
        for epoch in range(int(np.ceil(due.max() * self.shards / self.rows)) + 1):
            before, after = self._before(epoch), self._before(epoch + 1)
            ends = np.cumsum(after - before)
            own = np.diff(self._sums(epoch))
            lines = np.flatnonzero(np.isin(own, ids))
            for line, shard in zip(lines.tolist(), np.searchsorted(ends, lines, side="right").tolist(), strict=True):
                position = line - int(ends[shard]) + int(after[shard])
                if position < due[shard]:
                    yield epoch, shard, position, own[line]

    def _unit_order(self, epoch: int) -> Ints:
        count = len(self._unit_rows)
        if self._shuffle == "none":
            return np.arange(count)
        if self._order[0] != epoch:
            values = _scramble(chain(self._seed, 1, epoch) + np.arange(count, dtype=np.uint64))
            self._order = (epoch, np.argsort(values, kind="stable"))
        return self._order[1]

    def _sums(self, epoch: int) -> Words:
        """Return running sums, from 0, of the ids of the epoch's rows in the epoch's order."""
        order = self._unit_order(epoch)
        sums = np.zeros(self.rows + 1, np.uint64)
        at = 1
        for units in _blocks(order, self._unit_rows[order]):
            lengths = self._unit_rows[units]
            unit = np.repeat(np.arange(len(units)), lengths)
            place = (np.arange(len(unit)) - np.repeat(np.cumsum(lengths) - lengths, lengths)).astype(np.uint64)
            ids = _scramble(self._unit_key[units][unit] + place)
            if self._shuffle == "rows":
                keys = _scramble(chain(self._seed, 2, epoch) + units.astype(np.uint64))
                ids = ids[np.lexsort((place, _scramble(keys[unit] + place), unit))]
            sums[at : at + len(ids)] = ids
            at += len(ids)
        return np.cumsum(sums, out=sums)

    def row_named(self, shard: int, position: int, row: np.uint64) -> str:
        """Return the name of the row at a position of a shard's own sequence. `row`: its id."""
        epoch = position * self.shards // self.rows
        epoch -= int(self._before(epoch)[shard] > position)
        before, after = self._before(epoch), self._before(epoch + 1)
        line = int((after - before)[:shard].sum()) + position - int(before[shard])
        order = self._unit_order(epoch)
        unit = order[np.searchsorted(np.cumsum(self._unit_rows[order]), line, side="right")]
        ids = _scramble(self._unit_key[unit] + np.arange(self._unit_rows[unit], dtype=np.uint64))
        place = int(np.flatnonzero(ids == row)[0])
        if self._images is not None and len(images := images_below(self._images)) == self.rows:
            return images[int(self._unit_rows[:unit].sum()) + place]
        return f"row {place} of {self._files[self._unit_file[unit]]}, row group {self._unit_group[unit]}"

    def files_of(self, shard: int, start: int, rows: int) -> str:
        """Return the names of the files that hold these rows of the shard, joined by commas."""
        found: dict[str, None] = {}
        epoch = start * self.shards // self.rows
        epoch -= int(self._before(epoch)[shard] > start)
        while rows > 0:
            before, after = self._before(epoch), self._before(epoch + 1)
            count = min(rows, int(after[shard]) - start)
            if count > 0:
                low = int((after - before)[:shard].sum()) + start - int(before[shard])
                order = self._unit_order(epoch)
                ends = np.cumsum(self._unit_rows[order])
                first, last = np.searchsorted(ends, [low, low + count - 1], side="right")
                found |= dict.fromkeys(self._files[self._unit_file[unit]] for unit in order[first : last + 1])
                start, rows = start + count, rows - count
            epoch += 1
        return ", ".join(sorted(found))


def spans_of(entries: npt.NDArray[Any], due: Ints) -> tuple[npt.NDArray[Any], Skips]:
    """Return the entries with their whole spans as `rows`, and the rows that they skipped, if they are due."""
    spans = entries.copy()
    spans["rows"] += spans["skipped"]
    found = [
        (entry["shard"], entry["start"] + offset)
        for entry in entries[entries["skipped"] > 0]
        for offset in entry["skipped_rows"]
    ]
    skips = np.unique(np.array(found, SKIP))
    return spans, skips[skips["position"] < due[skips["shard"]]]


def _blocks(units: Ints, rows: Ints) -> Iterator[Ints]:
    """Yield the units, in order, in runs of about `BLOCK_ROWS` rows."""
    number = (np.cumsum(rows) - rows) // BLOCK_ROWS
    for run in np.split(np.arange(len(units)), np.flatnonzero(np.diff(number)) + 1):
        yield units[run]


def chain(*parts: int) -> np.uint64:
    """Return the documented hash `mix` of integers."""
    value = np.zeros(1, np.uint64)
    for part in parts:
        with np.errstate(over="ignore"):
            value = _scramble(value + np.uint64(part % 2**64))
    return np.uint64(value[0])


def _scramble(values: Words) -> Words:
    """Apply splitmix64, by its published definition."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
