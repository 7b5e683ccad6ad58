"""Checks a run's ledger against its dataset: which rows were used never, once, or more than once.

What the ledger should say is computed here anew, from the documented formulas (DESIGN and the docstrings of `data.line`
and `data.ledger`) and the files' footers. Nothing is shared with the code that planned and read the rows: a fault there
must not be able to hide itself here.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from raytrain_plus.errors import InputError, StorageError
from raytrain_plus.job.yaml import read_job
from raytrain_plus.observe.events import event_lines
from raytrain_plus.storage import json_shape as has
from raytrain_plus.storage.address import split
from raytrain_plus.storage.document import read_object
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.open import open_folder

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

_DATASET = has.object_of(
    path=has.name,
    rows=has.whole(1, 2**48),
    files=has.list_of(
        has.object_of(path=has.name, bytes=has.whole(0), footer_sha256=has.text, row_groups=has.list_of(has.whole(0))),
    ),
)
_RESULT = has.object_of(status=has.text, steps=has.whole(0))
_EVENT = has.object_of(kind=has.text)
_RESUMED = has.object_of(generation=has.whole(0), step=has.whole(-1))
"""What the audit relies on, of what the run has written down."""
_REMEDY = "put back the file that the run wrote: what the data was cannot be told without it"
MOST_DUE = 1 << 22
"""Entries that a ledger can lack, and yet be judged: what is missing is laid out in memory."""
BLOCK_ROWS = 1 << 20
"""Rows whose ids are computed together: bounds the memory."""
KEPT = 100
"""Faults of one kind that are put into words; the rest is counted. A ledger can be wrong in every entry."""
TOLD = 20
"""Faults that a person is told."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """What became of the rows of one epoch that were due by the last audited step."""

    epoch: int
    due: int
    never: int
    once: int
    more: int


@dataclass(frozen=True, slots=True)
class Audit:
    """What an audit found."""

    run: str
    rows: int
    """Of the dataset."""
    files: int
    steps: int
    """Of the job."""
    audited_to: int
    """The newest step that was due, which of a run that has not ended is the newest that its ledger holds or that a
    checkpoint knows; -1 where there is none."""
    status: str
    """The run's, or `unfinished` where it is going on or was killed."""
    epochs: tuple[Epoch, ...]
    faults: tuple[str, ...]
    """The first of each kind."""
    num_faults: int
    """All of them."""

    @property
    def clean(self) -> bool:
        """Whether every row that was due was used once."""
        return not self.num_faults and all(epoch.never == epoch.more == 0 for epoch in self.epochs)

    def to_json(self) -> dict[str, Any]:
        """Plain values only."""
        return {"clean": self.clean, **asdict(self)}

    def lines(self) -> list[str]:
        """For a person."""
        said = [
            f"{self.run}: {self.rows:,} rows in {self.files:,} file{'s' * (self.files != 1)}; "
            f"{self.audited_to + 1:,} of {self.steps:,} steps audited; the run: {self.status}",
            f"  {'epoch':>6}{'rows due':>16}{'never used':>14}{'once':>16}{'more often':>14}",
        ]
        shown = self.epochs if len(self.epochs) <= TOLD else [*self.epochs[:3], *self.epochs[-3:]]
        for number, epoch in enumerate(shown):
            if len(shown) < len(self.epochs) and number == 3:
                said.append(f"  {'...':>6}")
            part = "" if epoch.due == self.rows else "  (not finished)"
            said.append(f"  {epoch.epoch:>6}{epoch.due:>16,}{epoch.never:>14,}{epoch.once:>16,}{epoch.more:>14,}{part}")
        said += [f"  fault: {fault}" for fault in self.faults[:TOLD]]
        if self.num_faults > TOLD:
            kept = "them all" if len(self.faults) == self.num_faults else f"{len(self.faults):,} of them"
            said.append(f"  and {self.num_faults - TOLD:,} more faults; --json tells {kept}")
        if self.clean:
            nothing = "  nothing is entered yet: there is nothing to judge"
            said.append("  every row that was due was used exactly once" if self.epochs else nothing)
        return said


def audit(where: str | Path) -> Audit:
    """Audits the run in the folder at a path or address. Raises `InputError` where there is no run to audit."""
    run = open_folder(where)
    line, then = _described(run)
    faults = _Faults()
    _compare(Path(then["path"]), then, faults)
    # Before the ledger, which of a run that goes on holds by then whatever these know of.
    status, made = _status(run, faults)
    saved = _checkpoints(run)
    parts = sorted(name for name in run.files("ledger") if name.endswith(".parquet"))
    entries = _entries(run, parts, faults)
    void = list(_resumptions(run))
    entries, saved = _without(void, entries), _without(void, saved)
    if status == "finished":
        due_to = line.steps - 1
        if made != line.steps:
            faults.add(f"the run finished with {made:,} steps; the job has {line.steps:,}")
    elif made is not None:
        due_to = min(made, line.steps) - 1
    else:
        due_to = min(int(np.concatenate([entries["step"], saved["step"], [-1]]).max()), line.steps - 1)
    if (due_to + 1) * line.shards > max(MOST_DUE, 16 * len(entries)):
        raise InputError(
            f"step {due_to:,} is said to be due, and the ledger has only {len(entries):,} entries: one is damaged",
            where=run.where,
            remedy="put back what the run wrote: job.yaml, result.json, checkpoints/ and ledger/ say how far it came",
        )
    if due_to >= 0 and not parts:
        faults.add("there is no ledger")
    entries = _only_due(entries, line, due_to, faults)
    _find_doubled_and_missing(entries, line, due_to, faults)
    good = line.check(entries, faults)
    epochs = line.use(entries[good], due_to)
    return Audit(
        run=split(run.address)[1],
        rows=line.rows,
        files=len(then["files"]),
        steps=line.steps,
        audited_to=due_to,
        status=status,
        epochs=tuple(epochs),
        faults=tuple(faults.told),
        num_faults=faults.count,
    )


class _Faults:
    """What is wrong: the first faults of each kind in words, and how many there are."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.count = 0

    def add(self, *told: str) -> None:
        """Faults of one kind."""
        self.add_many(len(told), told)

    def add_many(self, count: int, told: Iterable[str]) -> None:
        """So many faults of one kind; only those that are kept are put into words."""
        self.told += itertools.islice(told, KEPT)
        self.count += count


def _described(run: Folder) -> tuple[_Line, dict[str, Any]]:
    try:
        text = run.read("job.yaml").decode()
        then = read_object(run, "dataset.json", _REMEDY, _DATASET)
    except StorageError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"there is no run to audit: {type(error).__name__}: {error}",
            where=run.where,
            expected="a run's folder, with job.yaml and dataset.json in it, as this version writes them",
            remedy="name the run's folder, or its name and --storage",
        ) from error
    # Checked, then as plain values.
    job = yaml.safe_load(read_job(text, f"{run.where}/job.yaml", "run").to_yaml())
    rows = sum(sum(file["row_groups"]) for file in then["files"])
    if rows != then["rows"] or not rows:
        what = f"its row groups have {rows:,} rows, and it says {then['rows']:,}"
        raise InputError(f"the file is damaged: {what}", where=f"{run.where}/dataset.json", remedy=_REMEDY)
    return _Line(job, then), then


def _status(run: Folder, faults: _Faults) -> tuple[str, int | None]:
    """The run's status, and how many steps it says that it made where it has ended."""
    try:
        result = read_object(run, "result.json", "", _RESULT)
        return result["status"], result["steps"]
    except FileNotFoundError:
        pass
    except (OSError, InputError) as error:
        faults.add(f"result.json cannot be read: {_first_line(error)}")
    return "unfinished", None


def _compare(data: Path, then: Mapping[str, Any], faults: _Faults) -> None:
    """How the files differ from those that the run began with."""
    try:
        data.stat()
    except FileNotFoundError:
        faults.add(f"the dataset is gone: {data}")
        return
    except OSError as error:
        faults.add(f"the dataset cannot be looked at: {error.strerror}: {data}")
        return
    now = {}
    if data.is_file():
        now[data.name] = data
    else:
        for folder, _, names in os.walk(data):
            for name in names:
                path = Path(folder, name).relative_to(data)
                if (
                    name.endswith(".parquet")
                    and Path(folder, name).is_file()
                    and not any(part[0] in "._" for part in path.parts)
                ):
                    now[path.as_posix()] = data / path
    was = {file["path"]: file for file in then["files"]}
    faults.add(*(f"{name}, which the run began with, is missing" for name in sorted(was.keys() - now.keys())))
    faults.add(*(f"{name} is foreign: the run did not begin with it" for name in sorted(now.keys() - was.keys())))
    changes = {name: _changed(now[name], was[name]) for name in sorted(now.keys() & was.keys())}
    faults.add(*(f"{name} {change}" for name, change in changes.items() if change))


def _changed(file: Path, then: Mapping[str, Any]) -> str:
    """What became of a file since the run began; empty where it is the same."""
    try:
        size, raw = file.stat().st_size, _footer(file)
        metadata = pq.read_metadata(file)
    except (OSError, pa.ArrowException) as error:
        return f"cannot be read: {_first_line(error)}"
    if size != then["bytes"]:
        return f"has changed: {size:,} bytes, {then['bytes']:,} when the run began"
    if hashlib.sha256(raw).hexdigest() != then["footer_sha256"]:
        return "has changed: its footer is another"
    groups = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return "" if groups == then["row_groups"] else "holds other row groups than the run counted"


def _footer(file: Path) -> bytes:
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 8))
        length = int.from_bytes(stream.read(4), "little")
        stream.seek(max(0, size - 8 - length))
        return stream.read(length)


_NUMBERS = ("generation", "step", "shard", "start", "rows")
_SUMS = ("ids", "step_ids")
_COLUMNS = (*_NUMBERS, *_SUMS)
_ENTRY = np.dtype([*((name, "<i8") for name in _NUMBERS), *((name, "<u8") for name in _SUMS), ("summed", "?")])
"""A row of the ledger; `summed`: whether the sum of its step stands in it."""
_SCHEMA = pa.schema([*((name, pa.int64()) for name in _NUMBERS), *((name, pa.uint64()) for name in _SUMS)])


def _entries(run: Folder, names: Iterable[str], faults: _Faults) -> npt.NDArray[Any]:
    """The rows of the ledger's parts."""
    parts: list[npt.NDArray[Any]] = []
    torn = []
    for name in names:
        try:
            file = pa.BufferReader(run.read(name))
            table = pq.read_table(file, columns=list(_COLUMNS), page_checksum_verification=True).cast(_SCHEMA)
            if any(table.column(column).null_count for column in _COLUMNS[:-1]):
                raise ValueError("a column has nulls")
            summed = table.column("step_ids").is_valid().to_numpy()
            table = table.set_column(len(_NUMBERS) + 1, "step_ids", table.column("step_ids").fill_null(0))
        except (OSError, pa.ArrowException, KeyError, ValueError) as error:
            torn.append(f"{name} cannot be read: {_first_line(error)}")
            continue
        part = np.empty(table.num_rows, _ENTRY)
        for column in _COLUMNS:
            part[column] = table.column(column).to_numpy()
        part["summed"] = summed
        parts.append(part)
    faults.add(*torn)
    return np.concatenate(parts) if parts else np.empty(0, _ENTRY)


_CHECKPOINT = re.compile(r"checkpoints/(\d{12})-(\d{8})\.json")


def _checkpoints(run: Folder) -> npt.NDArray[Any]:
    """Step and generation of each. The steps up to a checkpoint's are entered before it is made."""
    found = filter(None, map(_CHECKPOINT.fullmatch, run.files("checkpoints")))
    return np.array([(int(name[1]), int(name[2])) for name in found], [("step", "<i8"), ("generation", "<i8")])


def _without(void: Iterable[tuple[int, int]], done: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What is left of what was done, once what a resumption made void is gone; see `_resumptions`."""
    for generation, step in void:
        done = done[(done["generation"] >= generation) | (done["step"] <= step)]
    return done


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _resumptions(run: Folder) -> Iterator[tuple[int, int]]:
    """(generation, step): what older generations did after that step is void."""
    for line in event_lines(run):
        # Most lines are of others, and need no parsing.
        if '"resumed"' in line:
            try:
                event = json.loads(line)
                if wrong := _EVENT(event) or (event["kind"] == "resumed" and _RESUMED(event)):
                    raise ValueError(wrong)
                if event["kind"] == "resumed":
                    yield event["generation"], event["step"]
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"a `resumed` event is damaged: {_first_line(error)}",
                    where=f"{run.where}: events",
                    remedy="mend the line: what it makes void cannot be told without it",
                ) from None


def _only_due(entries: npt.NDArray[Any], line: _Line, due_to: int, faults: _Faults) -> npt.NDArray[Any]:
    """The entries of steps and shards that the job has."""
    fits = (entries["step"] >= 0) & (entries["step"] <= due_to)
    fits &= (entries["shard"] >= 0) & (entries["shard"] < line.shards)
    strange = entries[~fits]
    strange = strange[np.lexsort((strange["step"], strange["shard"]))]
    runs = _Runs(strange["shard"], strange["step"])
    faults.add_many(len(runs), (f"{which} was never due" for which, _, _ in runs))
    return entries[fits]


def _find_doubled_and_missing(entries: npt.NDArray[Any], line: _Line, due_to: int, faults: _Faults) -> None:
    keys = entries["shard"] * (due_to + 1) + entries["step"]
    values, counts = np.unique(keys, return_counts=True)
    doubled = values[counts > 1]
    missing = np.setdiff1d(np.arange((due_to + 1) * line.shards), values, assume_unique=True)
    for found, what in ((doubled, "is entered more than once"), (missing, "is not entered")):
        runs = _Runs(found // (due_to + 1), found % (due_to + 1))
        faults.add_many(
            len(runs),
            (
                f"{which} {what} ({line.files_of(shard, first * line.per_shard, line.per_shard)})"
                for which, shard, first in runs
            ),
        )


class _Runs:
    """Runs of consecutive steps of a shard, out of shards and steps that are sorted by shard and step."""

    def __init__(self, shards: Ints, steps: Ints) -> None:
        self._shards, self._steps = shards, steps
        gaps = np.diff(steps)
        # What is there twice does not break a run.
        breaks = np.flatnonzero((gaps < 0) | (gaps > 1) | (np.diff(shards) != 0))
        self._ends = np.append(breaks, len(steps) - 1) if len(steps) else np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        """Each in words, with the shard and the first step."""
        start = 0
        for end in self._ends.tolist():
            first, last, shard = int(self._steps[start]), int(self._steps[end]), int(self._shards[start])
            which = f"step {first}" if first == last else f"every step from {first} to {last}"
            yield f"{which} of shard {shard}", shard, first
            start = end + 1


class _Line:
    """Which rows a shard was to give to a step, and their ids."""

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
        keys = [int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "little") for path in self._files]
        with np.errstate(over="ignore"):
            self._unit_key = _scramble(np.array(keys, np.uint64)[self._unit_file] + np.array(places, np.uint64))
        self.rows = int(self._unit_rows.sum())
        if not self.rows:
            raise ValueError("a dataset without rows")
        self._order: tuple[int, Ints] = (-1, np.empty(0, np.int64))
        self._epochs = job["epochs"]
        self.steps = int(job["steps"]) if self._epochs is None else self._steps(int(self._epochs))

    def _steps(self, epochs: int) -> int:
        each = epochs * self.rows // self.shards
        full, left = divmod(each, self.per_shard)
        something = left > 0 or epochs * self.rows % self.shards > 0
        return full + (something and (left >= 2 or full == 0))

    def _before(self, epoch: int) -> Ints:
        """For each shard, how many rows it was to have had before `epoch`."""
        k = np.arange(self.shards)
        return np.maximum(0, -((k - epoch * self.rows) // self.shards))

    def _ends(self, step: int) -> Ints:
        """For each shard, where its rows of `step` end in its own sequence."""
        if self._epochs is not None and step == self.steps - 1:
            return self._before(int(self._epochs))
        return np.full(self.shards, (step + 1) * self.per_shard)

    def check(self, entries: npt.NDArray[Any], faults: _Faults) -> npt.NDArray[np.bool_]:
        """Which entries name the rows that were due, and whose ids are theirs; what is wrong with others."""
        starts = entries["step"] * self.per_shard
        ends = np.where(
            entries["step"] == self.steps - 1, self._ends(self.steps - 1)[entries["shard"]], starts + self.per_shard
        )
        placed = (entries["start"] == starts) & (entries["rows"] == ends - starts)
        misplaced = zip(entries[~placed], starts[~placed], (ends - starts)[~placed], strict=True)
        faults.add_many(
            int((~placed).sum()),
            (
                f"step {entry['step']}, shard {entry['shard']}: {entry['rows']} rows from {entry['start']} of its line "
                f"were used, not {rows} from {start} ({self.files_of(int(entry['shard']), int(start), int(rows))})"
                for entry, start, rows in misplaced
            ),
        )
        total = int(self._ends(self.steps - 1).max())
        held = (entries["start"] >= 0) & (entries["rows"] >= 0) & (entries["rows"] <= total - entries["start"])
        stops = np.where(held, entries["start"] + entries["rows"], 0)
        starts = np.where(held, entries["start"], 0)
        expected = np.zeros(len(entries), np.uint64)
        order = np.argsort(starts, kind="stable")
        most = int((stops - starts).max(initial=0))
        for epoch in range(int(stops.max(initial=0)) * self.shards // self.rows + 2):
            before, after = self._before(epoch), self._before(epoch + 1)
            # Of all entries those that can reach into the epoch.
            span = np.searchsorted(starts[order], [before.min() - most, after.max()])
            near = order[span[0] : span[1]]
            shard = entries["shard"][near]
            low = np.clip(starts[near], before[shard], after[shard])
            high = np.clip(stops[near], before[shard], after[shard])
            inside = np.flatnonzero(high > low)
            if not len(inside):
                continue
            offsets = np.concatenate([[0], np.cumsum(after - before)[:-1]])
            shift = (offsets - before)[shard[inside]]
            sums = self._sums(epoch)
            expected[near[inside]] += sums[high[inside] + shift] - sums[low[inside] + shift]
        kept = min(64, max(0, 390 // self.shards - 1))
        right: npt.NDArray[np.bool_] = held & (expected & np.uint64(2**kept - 1) == entries["ids"])
        others = entries[placed & ~right]
        faults.add_many(
            len(others),
            (
                f"step {entry['step']}, shard {entry['shard']}: other rows were used than those of its line "
                f"({self.files_of(int(entry['shard']), int(entry['start']), int(entry['rows']))})"
                for entry in others
            ),
        )
        return right & ~self._in_wrong_steps(entries, expected, right, faults)

    def _in_wrong_steps(
        self, entries: npt.NDArray[Any], expected: Words, right: npt.NDArray[np.bool_], faults: _Faults
    ) -> npt.NDArray[np.bool_]:
        """Which entries are of steps whose own sum is wrong though each of their shards seems right.

        Where a shard's entry is missing or wrong, nothing follows from the step's sum, and others count by their bits.
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
        # In a complete step each shard stands where its number says.
        place = np.arange(len(order)) - np.repeat(firsts, counts)
        judged = np.logical_and.reduceat(right[order] & (shard == place), firsts) & (counts == self.shards)
        due = np.add.reduceat(_scramble(expected[order] + shard.astype(np.uint64)), firsts)
        said = np.add.reduceat(sorted_entries["step_ids"], firsts)
        times = np.add.reduceat(sorted_entries["summed"].astype(np.int64), firsts)
        unsummed, bad = judged & (times != 1), judged & (times == 1) & (due != said)
        wrong[order] = np.repeat(bad, counts)
        for found, what in (
            (unsummed, "its sum does not stand there once"),
            (bad, "other rows were used than those of its line; whose, its shards' bits do not tell"),
        ):
            faults.add_many(int(found.sum()), (f"step {number}: {what}" for number in step[firsts[found]].tolist()))
        return wrong

    def use(self, entries: npt.NDArray[Any], due_to: int) -> list[Epoch]:
        """How often each row that was due by `due_to` was used."""
        due = self._ends(due_to) if due_to >= 0 else np.zeros(self.shards, np.int64)
        epochs = int(np.ceil(due.max() * self.shards / self.rows)) + 1 if len(due) else 0
        counts = np.zeros((epochs + 1, 3), np.int64)
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
        return [
            Epoch(number, int(row.sum()), int(row[0]), int(row[1]), int(row[2]))
            for number, row in enumerate(counts)
            if row.sum()
        ]

    def _unit_order(self, epoch: int) -> Ints:
        count = len(self._unit_rows)
        if self._shuffle == "none":
            return np.arange(count)
        if self._order[0] != epoch:
            values = _scramble(_chain(self._seed, 1, epoch) + np.arange(count, dtype=np.uint64))
            self._order = (epoch, np.argsort(values, kind="stable"))
        return self._order[1]

    def _sums(self, epoch: int) -> Words:
        """Running sums, from 0, of the ids of the epoch's rows in its order."""
        order = self._unit_order(epoch)
        sums = np.zeros(self.rows + 1, np.uint64)
        at = 1
        for units in _blocks(order, self._unit_rows[order]):
            lengths = self._unit_rows[units]
            unit = np.repeat(np.arange(len(units)), lengths)
            place = (np.arange(len(unit)) - np.repeat(np.cumsum(lengths) - lengths, lengths)).astype(np.uint64)
            ids = _scramble(self._unit_key[units][unit] + place)
            if self._shuffle == "rows":
                keys = _scramble(_chain(self._seed, 2, epoch) + units.astype(np.uint64))
                ids = ids[np.lexsort((place, _scramble(keys[unit] + place), unit))]
            sums[at : at + len(ids)] = ids
            at += len(ids)
        return np.cumsum(sums, out=sums)

    def files_of(self, shard: int, start: int, rows: int) -> str:
        """The files in which the shard's rows lie."""
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


def _blocks(units: Ints, rows: Ints) -> Iterator[Ints]:
    """The units, in order, in runs of about `BLOCK_ROWS` rows."""
    number = (np.cumsum(rows) - rows) // BLOCK_ROWS
    for run in np.split(np.arange(len(units)), np.flatnonzero(np.diff(number)) + 1):
        yield units[run]


def _chain(*parts: int) -> np.uint64:
    value = np.zeros(1, np.uint64)
    for part in parts:
        with np.errstate(over="ignore"):
            value = _scramble(value + np.uint64(part % 2**64))
    return np.uint64(value[0])


def _scramble(values: Words) -> Words:
    """splitmix64, by its published definition."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
