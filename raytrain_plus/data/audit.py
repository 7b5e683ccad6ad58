"""Check a run's ledger against its dataset: which rows were used never, once, or more than once.

The expected ledger is recomputed here from the documented formulas (DESIGN and the docstrings of `data.sample_order`
and `data.ledger`) and the files' footers. This module shares no code with the code that planned and read the rows, so
that a fault there cannot hide itself here.
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
"""The fields of the run's files and events that the audit relies on."""
_REMEDY = "restore the file that the run wrote: it is the only record of the data that the run began with"
MOST_DUE = 1 << 22
"""Maximum missing entries of a ledger that can still be audited: all of them are laid out in memory."""
BLOCK_ROWS = 1 << 20
"""Rows whose ids are computed together: bounds the memory."""
KEPT = 100
"""Maximum faults of one kind that are described; the rest are only counted. Every entry of a ledger can be wrong."""
TOLD = 20
"""Maximum faults in the report for a person."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """How often the rows of one epoch that were due by the last audited step were used.

    All counts are in rows: `due` in all, `never` used, used `once`, used `more` than once.
    """

    epoch: int
    due: int
    never: int
    once: int
    more: int


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of an audit."""

    run: str
    rows: int
    """Rows of the dataset."""
    files: int
    """Files of the dataset."""
    steps: int
    """Steps of the job."""
    audited_to: int
    """The newest step that was due; -1 if none was.

    For a run that has not ended it is the newest step in the ledger or in a checkpoint.
    """
    status: str
    """The run's status, or `unfinished` if it is still running or was killed."""
    epochs: tuple[Epoch, ...]
    faults: tuple[str, ...]
    """Descriptions of the first `KEPT` faults of each kind."""
    num_faults: int
    """The number of all faults."""

    @property
    def clean(self) -> bool:
        """Whether every row that was due was used exactly once and no fault was found."""
        return not self.num_faults and all(epoch.never == epoch.more == 0 for epoch in self.epochs)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON values."""
        return {"clean": self.clean, **asdict(self)}

    def lines(self) -> list[str]:
        """Return a report for a person, as lines of text."""
        said = [
            f"{self.run}: {self.rows:,} rows in {self.files:,} file{'s' * (self.files != 1)}; "
            f"{self.audited_to + 1:,} of {self.steps:,} steps audited; run status: {self.status}",
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
            kept = "all of them" if len(self.faults) == self.num_faults else f"{len(self.faults):,} of them"
            said.append(f"  and {self.num_faults - TOLD:,} more faults; --json lists {kept}")
        if self.clean:
            nothing = "  the ledger has no entries yet: nothing to audit"
            said.append("  every row that was due was used exactly once" if self.epochs else nothing)
        return said


def audit(where: str | Path) -> Audit:
    """Audit the run in the folder at a path or address.

    Raises `InputError` if the folder holds no run, or its files are too damaged to audit.
    """
    run = open_folder(where)
    line, then = _described(run)
    faults = _Faults()
    _compare(Path(then["path"]), then, faults)
    # Read status and checkpoints before the ledger: the ledger of a live run then covers everything that they mention.
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
            f"the run's files disagree: step {due_to:,} is due, but the ledger has only {len(entries):,} entries",
            where=run.where,
            remedy="restore the files that the run wrote: job.yaml, result.json, checkpoints/ and ledger/ record its "
            "progress",
        )
    if due_to >= 0 and not parts:
        faults.add("the ledger is missing")
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
    """The faults found: descriptions of the first ones of each kind, and the number of all."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.count = 0

    def add(self, *told: str) -> None:
        """Add faults of one kind."""
        self.add_many(len(told), told)

    def add_many(self, count: int, told: Iterable[str]) -> None:
        """Add `count` faults of one kind; only those that are kept are described."""
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
            expected="a run's folder with job.yaml and dataset.json as written by this version",
            remedy="give the path of the run's folder, or the run's name and --storage",
        ) from error
    # Validate the job, then read it as plain values.
    job = yaml.safe_load(read_job(text, f"{run.where}/job.yaml", "run").to_yaml())
    rows = sum(sum(file["row_groups"]) for file in then["files"])
    if rows != then["rows"] or not rows:
        what = f"its row groups add up to {rows:,} rows, but `rows` is {then['rows']:,}"
        raise InputError(f"the file is damaged: {what}", where=f"{run.where}/dataset.json", remedy=_REMEDY)
    return _Line(job, then), then


def _status(run: Folder, faults: _Faults) -> tuple[str, int | None]:
    """Return the run's status and, if it has ended, the number of steps that it recorded."""
    try:
        result = read_object(run, "result.json", "", _RESULT)
        return result["status"], result["steps"]
    except FileNotFoundError:
        pass
    except (OSError, InputError) as error:
        faults.add(f"result.json cannot be read: {_first_line(error)}")
    return "unfinished", None


def _compare(data: Path, then: Mapping[str, Any], faults: _Faults) -> None:
    """Report how the files differ from those that the run began with."""
    try:
        data.stat()
    except FileNotFoundError:
        faults.add(f"the dataset no longer exists: {data}")
        return
    except OSError as error:
        faults.add(f"the dataset cannot be accessed: {error.strerror}: {data}")
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
    faults.add(*(f"{name} is missing; the run began with it" for name in sorted(was.keys() - now.keys())))
    faults.add(*(f"{name} is new; the run began without it" for name in sorted(now.keys() - was.keys())))
    changes = {name: _changed(now[name], was[name]) for name in sorted(now.keys() & was.keys())}
    faults.add(*(f"{name} {change}" for name, change in changes.items() if change))


def _changed(file: Path, then: Mapping[str, Any]) -> str:
    """Describe how a file has changed since the run began; empty if it has not."""
    try:
        size, raw = file.stat().st_size, _footer(file)
        metadata = pq.read_metadata(file)
    except (OSError, pa.ArrowException) as error:
        return f"cannot be read: {_first_line(error)}"
    if size != then["bytes"]:
        return f"has changed: {size:,} bytes now, {then['bytes']:,} when the run began"
    if hashlib.sha256(raw).hexdigest() != then["footer_sha256"]:
        return "has changed: its footer differs"
    groups = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return "" if groups == then["row_groups"] else "has other row groups than dataset.json lists"


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
"""A row of the ledger; `summed`: whether the row holds its step's sum."""
_SCHEMA = pa.schema([*((name, pa.int64()) for name in _NUMBERS), *((name, pa.uint64()) for name in _SUMS)])


def _entries(run: Folder, names: Iterable[str], faults: _Faults) -> npt.NDArray[Any]:
    """Return the rows of the ledger's parts; parts that cannot be read become faults."""
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
    """Return step and generation of each checkpoint.

    The ledger is written before the checkpoint, so it covers the steps up to the checkpoint's.
    """
    found = filter(None, map(_CHECKPOINT.fullmatch, run.files("checkpoints")))
    return np.array([(int(name[1]), int(name[2])) for name in found], [("step", "<i8"), ("generation", "<i8")])


def _without(void: Iterable[tuple[int, int]], done: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the entries that no resumption has made void; see `_resumptions`."""
    for generation, step in void:
        done = done[(done["generation"] >= generation) | (done["step"] <= step)]
    return done


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _resumptions(run: Folder) -> Iterator[tuple[int, int]]:
    """Yield (generation, step) of each resumption: work of older generations after that step is void."""
    for line in event_lines(run):
        # Most lines hold other events and need no parsing.
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
                    remedy="repair the line: it records which steps are void",
                ) from None


def _only_due(entries: npt.NDArray[Any], line: _Line, due_to: int, faults: _Faults) -> npt.NDArray[Any]:
    """Return the entries of due steps and existing shards; report the others."""
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
    for found, what in ((doubled, "is in the ledger more than once"), (missing, "is missing from the ledger")):
        runs = _Runs(found // (due_to + 1), found % (due_to + 1))
        faults.add_many(
            len(runs),
            (
                f"{which} {what} ({line.files_of(shard, first * line.per_shard, line.per_shard)})"
                for which, shard, first in runs
            ),
        )


class _Runs:
    """Runs of consecutive steps of a shard, from arrays of shards and steps sorted by shard and step."""

    def __init__(self, shards: Ints, steps: Ints) -> None:
        self._shards, self._steps = shards, steps
        gaps = np.diff(steps)
        # A step that appears twice does not break a run.
        breaks = np.flatnonzero((gaps < 0) | (gaps > 1) | (np.diff(shards) != 0))
        self._ends = np.append(breaks, len(steps) - 1) if len(steps) else np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        """Yield each run's description, its shard and its first step."""
        start = 0
        for end in self._ends.tolist():
            first, last, shard = int(self._steps[start]), int(self._steps[end]), int(self._shards[start])
            which = f"step {first}" if first == last else f"every step from {first} to {last}"
            yield f"{which} of shard {shard}", shard, first
            start = end + 1


class _Line:
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
        """Return for each shard the number of rows due before `epoch`."""
        k = np.arange(self.shards)
        return np.maximum(0, -((k - epoch * self.rows) // self.shards))

    def _ends(self, step: int) -> Ints:
        """Return for each shard the position in its own sequence at which its rows of `step` end."""
        if self._epochs is not None and step == self.steps - 1:
            return self._before(int(self._epochs))
        return np.full(self.shards, (step + 1) * self.per_shard)

    def check(self, entries: npt.NDArray[Any], faults: _Faults) -> npt.NDArray[np.bool_]:
        """Return which entries hold the due rows with the right ids; report the others."""
        starts = entries["step"] * self.per_shard
        ends = np.where(
            entries["step"] == self.steps - 1, self._ends(self.steps - 1)[entries["shard"]], starts + self.per_shard
        )
        placed = (entries["start"] == starts) & (entries["rows"] == ends - starts)
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
        held = (entries["start"] >= 0) & (entries["rows"] >= 0) & (entries["rows"] <= total - entries["start"])
        stops = np.where(held, entries["start"] + entries["rows"], 0)
        starts = np.where(held, entries["start"], 0)
        expected = np.zeros(len(entries), np.uint64)
        order = np.argsort(starts, kind="stable")
        most = int((stops - starts).max(initial=0))
        for epoch in range(int(stops.max(initial=0)) * self.shards // self.rows + 2):
            before, after = self._before(epoch), self._before(epoch + 1)
            # Only the entries that can reach into the epoch.
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
                f"step {entry['step']}, shard {entry['shard']}: rows outside the sample order were used "
                f"({self.files_of(int(entry['shard']), int(entry['start']), int(entry['rows']))})"
                for entry in others
            ),
        )
        return right & ~self._in_wrong_steps(entries, expected, right, faults)

    def _in_wrong_steps(
        self, entries: npt.NDArray[Any], expected: Words, right: npt.NDArray[np.bool_], faults: _Faults
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
                keys = _scramble(_chain(self._seed, 2, epoch) + units.astype(np.uint64))
                ids = ids[np.lexsort((place, _scramble(keys[unit] + place), unit))]
            sums[at : at + len(ids)] = ids
            at += len(ids)
        return np.cumsum(sums, out=sums)

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


def _blocks(units: Ints, rows: Ints) -> Iterator[Ints]:
    """Yield the units, in order, in runs of about `BLOCK_ROWS` rows."""
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
    """Apply splitmix64, by its published definition."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
