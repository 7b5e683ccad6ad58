"""Check a run's ledger against its dataset: which rows were used never, once, or more than once.

The modules `audit_*` recompute the expected ledger from the documented formulas (the docstrings of
`data.order.sample_order` and `data.ledger.ledger`) and the files' footers. They share no code with the code that
planned and read the rows, so that a fault there cannot hide itself here.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from raytrain_plus.audit.audit_entries import find_doubled_and_missing, only_due, read_entries
from raytrain_plus.audit.audit_faults import Faults
from raytrain_plus.audit.audit_files import compare, compare_streams
from raytrain_plus.audit.audit_mix import ExpectedMix, files_by_source
from raytrain_plus.audit.audit_order import Epoch, ExpectedOrder
from raytrain_plus.audit.audit_record import Record, read_record
from raytrain_plus.audit.audit_skipped import SkippedRows, find_skipped
from raytrain_plus.errors import InputError, StorageError, first_line
from raytrain_plus.job.yaml import read_job
from raytrain_plus.storage import json_shape as has
from raytrain_plus.storage.address import split
from raytrain_plus.storage.document import read_object
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.place import place_of

_DATASET = has.object_of(
    path=has.name,
    rows=has.whole(1, 2**48),
    files=has.list_of(
        has.object_of(path=has.name, bytes=has.whole(0), footer_sha256=has.text, row_groups=has.list_of(has.whole(0))),
    ),
)
_SOURCES = has.list_of(has.object_of(path=has.name, rows=has.whole(1, 2**48)))
_RESULT = has.object_of(status=has.text, steps=has.whole(0))
"""The fields of the run's files that the audit relies on."""
_REMEDY = "restore the file that the run wrote: it is the only record of the data that the run began with"
MOST_DUE = 1 << 22
"""Maximum missing entries of a ledger that can still be audited: all of them are laid out in memory."""
SHOWN_SKIPPED = 5
"""Maximum skipped rows in the report for a person."""
SHOWN = 20
"""Maximum faults in the report for a person."""


@dataclass(frozen=True, slots=True)
class AuditedSource:
    """A source of a mix."""

    path: str
    rows: int


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
    sources: tuple[AuditedSource, ...] = ()
    """The sources of a mix."""
    skipped: SkippedRows = field(default_factory=SkippedRows)
    """The rows that were due and skipped, because they cannot be used (`data.on_error: skip`)."""

    @property
    def clean(self) -> bool:
        """Whether every row that was due was used exactly once, or skipped, and no fault was found."""
        return not self.num_faults and all(epoch.never == epoch.more == 0 for epoch in self.epochs)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON values."""
        return {"clean": self.clean, **asdict(self)}

    def lines(self) -> list[str]:
        """Return a report for a person, as lines of text."""
        said = [
            f"{self.run}: {self.rows:,} rows in {self.files:,} file{'s' * (self.files != 1)}; "
            f"{self.audited_to + 1:,} of {self.steps:,} steps audited; run status: {self.status}",
            f"  {'epoch':>6}{'rows due':>16}{'never used':>14}{'once':>16}{'more often':>14}"
            f"{'skipped' if self.skipped.times else '':>14}".rstrip(),
        ]
        for number, source in enumerate(self.sources):
            said.append(f"  source {number} ({source.path}): {source.rows:,} rows")
            said += _epoch_lines([epoch for epoch in self.epochs if epoch.source == number], source.rows)
        said += _epoch_lines([epoch for epoch in self.epochs if epoch.source is None], self.rows)
        said += [f"  fault: {fault}" for fault in self.faults[:SHOWN]]
        if self.num_faults > SHOWN:
            kept = "all of them" if len(self.faults) == self.num_faults else f"{len(self.faults):,} of them"
            said.append(f"  and {self.num_faults - SHOWN:,} more faults; --json lists {kept}")
        said += _skipped_lines(self.skipped)
        if self.clean:
            nothing = "  the ledger has no entries yet: nothing to audit"
            instead = ", or skipped" if self.skipped.times else ""
            said.append(f"  every row that was due was used exactly once{instead}" if self.epochs else nothing)
        return said


def _epoch_lines(epochs: Sequence[Epoch], rows: int) -> list[str]:
    """Return a line of text for each epoch of `rows` rows; of many, only for the first and the last ones."""
    said = []
    shown = epochs if len(epochs) <= SHOWN else [*epochs[:3], *epochs[-3:]]
    for number, epoch in enumerate(shown):
        if len(shown) < len(epochs) and number == 3:
            said.append(f"  {'...':>6}")
        part = "" if epoch.due == rows else "  (not finished)"
        skipped = f"{epoch.skipped:>14,}" if epoch.skipped else ""
        counts = f"{epoch.due:>16,}{epoch.never:>14,}{epoch.once:>16,}{epoch.more:>14,}{skipped}"
        said.append(f"  {epoch.epoch:>6}{counts}{part}")
    return said


def _skipped_lines(skipped: SkippedRows) -> list[str]:
    """Return a line of text on the rows that were skipped, if any were, and one on each of the first ones."""
    if not skipped.times:
        return []
    rows = f"{skipped.rows:,} row{'s' * (skipped.rows != 1)}"
    times = "" if skipped.times == skipped.rows else f", {skipped.times:,} times in all"
    said = [f"  skipped, because they cannot be used: {rows}{times}"]
    said += [f"    {row}" for row in skipped.named[:SHOWN_SKIPPED]]
    if skipped.rows > SHOWN_SKIPPED:
        said.append(f"    and {skipped.rows - SHOWN_SKIPPED:,} more; --json lists {len(skipped.named):,} of them")
    return said


def audit(where: str | Path) -> Audit:
    """Audit the run in the folder at a path or address.

    Raises `InputError` if the folder holds no run, or its files are too damaged to audit.
    """
    run = open_folder(where)
    expected, then = _described(run)
    faults = Faults()
    _compare(then, faults)
    # Read status and checkpoints before the ledger: the ledger of a live run then covers everything that they mention.
    status, made, early = _status(run, faults)
    saved = _checkpoints(run)
    faults.add(*_find_incomplete(run))
    parts = sorted(name for name in run.files("ledger") if name.endswith(".parquet"))
    entries = read_entries(run, parts, faults)
    # Read after the ledger, for the same reason.
    record = read_record(run)
    entries, saved = _without(record.resumptions, entries), _without(record.resumptions, saved)
    if status == "finished" and not early:
        due_to = expected.steps - 1
        if made != expected.steps:
            faults.add(f"the run finished with {made:,} steps; the job has {expected.steps:,}")
    elif made is not None:
        due_to = min(made, expected.steps) - 1
    else:
        due_to = min(int(np.concatenate([entries["step"], saved["step"], [-1]]).max()), expected.steps - 1)
    if (due_to + 1) * expected.shards > max(MOST_DUE, 16 * len(entries)):
        raise InputError(
            f"the run's files disagree: step {due_to:,} is due, but the ledger has only {len(entries):,} entries",
            where=run.where,
            remedy="restore the files that the run wrote: job.yaml, result.json, checkpoints/ and ledger/ record its "
            "progress",
        )
    if due_to >= 0 and not parts:
        faults.add("the ledger is missing")
    reached = max(due_to if made is None else made - 1, int(saved["step"].max(initial=-1)))
    if record.lacks(reached, max(int(done["generation"].max(initial=-1)) for done in (entries, saved))):
        faults.add(_incomplete(record, reached))
        # A later event may have made these entries void, or others: judge only what the events cover.
        entries = entries[(entries["generation"] <= record.generation) & (entries["step"] <= record.step)]
        due_to = min(due_to, record.step, int(entries["step"].max(initial=-1)))
    entries = only_due(entries, expected, due_to, faults)
    find_doubled_and_missing(entries, expected, due_to, faults)
    good = expected.check(entries, faults)
    epochs = expected.use(entries[good], due_to)
    skipped = find_skipped(expected, entries[good], due_to, faults, transformed=expected.transformed)
    return Audit(
        run=split(run.address)[1],
        rows=expected.rows,
        files=len(then["files"]),
        steps=expected.steps,
        audited_to=due_to,
        status=status,
        epochs=tuple(epochs),
        faults=tuple(faults.found),
        num_faults=faults.count,
        sources=tuple(AuditedSource(source["path"], source["rows"]) for source in then.get("sources", ())),
        skipped=skipped,
    )


def _described(run: Folder) -> tuple[ExpectedOrder, dict[str, Any]]:
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
    mix = job["data"]["mix"]
    wrong = _find_wrong_rows(then["files"], then["rows"]) or ("" if mix is None else _find_wrong_sources(then, mix))
    if wrong:
        raise InputError(f"the file is damaged: {wrong}", where=f"{run.where}/dataset.json", remedy=_REMEDY)
    if mix is None:
        then.pop("sources", None)
        return ExpectedOrder(job, then), then
    return ExpectedMix(job, then), then


def _find_wrong_rows(files: Iterable[Mapping[str, Any]], said: int) -> str:
    """Return how the rows of files differ from the number that `dataset.json` says; empty if they do not."""
    rows = sum(sum(file["row_groups"]) for file in files)
    return "" if rows == said and rows else f"its row groups add up to {rows:,} rows, but `rows` is {said:,}"


def _find_wrong_sources(then: Mapping[str, Any], mix: Sequence[Any]) -> str:
    """Return what is wrong with the sources of a mix in `dataset.json`; empty if nothing is."""
    sources = then.get("sources")
    if wrong := _SOURCES(sources):
        return f"`sources`: {wrong}"
    if len(then["sources"]) != len(mix):
        return f"it has {len(then['sources'])} sources, and data.mix {len(mix)}"
    for number, (source, files) in enumerate(zip(then["sources"], files_by_source(then, len(mix)), strict=True)):
        if wrong := _find_wrong_rows(files, source["rows"]):
            return f"source {number}: {wrong}"
    return ""


def _compare(then: Mapping[str, Any], faults: Faults) -> None:
    """Report how the data's files differ from those that the run began with.

    Items that are read by index have no file; the run itself has compared some of them.
    """
    sources = then.get("sources", ())
    for number, (source, files) in enumerate(zip(sources, files_by_source(then, len(sources)), strict=True)):
        _compare_source(source, files, faults, f"{number}/")
    if not sources:
        _compare_source(then, then["files"], faults)


def _compare_source(
    source: Mapping[str, Any], files: Sequence[Mapping[str, Any]], faults: Faults, prefix: str = ""
) -> None:
    if "windows" in source:
        compare_streams(Path(source["path"]), files, faults, prefix)
    elif "dataset" not in source:
        compare(place_of(source["path"]), files, faults, prefix)


def _status(run: Folder, faults: Faults) -> tuple[str, int | None, bool]:
    """Return the run's status, the number of steps that it recorded if it has ended, and whether that was early."""
    try:
        result = read_object(run, "result.json", "", _RESULT)
        return result["status"], result["steps"], isinstance(result.get("stopped_early"), str)
    except FileNotFoundError:
        pass
    except (OSError, InputError) as error:
        faults.add(f"result.json cannot be read: {first_line(error)}")
    return "unfinished", None, False


_CHECKPOINT = re.compile(r"checkpoints/(\d{12})-(\d{8})\.json")


def _find_incomplete(run: Folder) -> list[str]:
    """Describe the checkpoints that lack parameters which others have: an older version could write such ones."""
    found: dict[str, set[str]] = {}
    for file in filter(_CHECKPOINT.fullmatch, run.files("checkpoints")):
        # One that is damaged, or was removed a moment ago, is no checkpoint.
        with contextlib.suppress(OSError, ValueError, KeyError, AttributeError):
            names = json.loads(run.read(file))["tensors"].keys()
            found[file] = {name.removeprefix("param/") for name in names if name.startswith("param/")}
    whole = set[str]().union(*found.values())
    said = []
    for file, names in sorted(found.items()):
        if missing := sorted(whole - names):
            rest = f" and {len(missing) - 3:,} more" if len(missing) > 3 else ""
            said.append(
                f"{file} is incomplete: it lacks {len(missing):,} of {len(whole):,} parameters: "
                f"{', '.join(missing[:3])}{rest}"
            )
    return said


def _checkpoints(run: Folder) -> npt.NDArray[Any]:
    """Return step and generation of each checkpoint.

    The ledger is written before the checkpoint, so it covers the steps up to the checkpoint's.
    """
    found = filter(None, map(_CHECKPOINT.fullmatch, run.files("checkpoints")))
    return np.array([(int(name[1]), int(name[2])) for name in found], [("step", "<i8"), ("generation", "<i8")])


def _incomplete(record: Record, reached: int) -> str:
    """Describe events that are missing."""
    last = "has no step" if record.step < 0 else f"ends at step {record.step:,}"
    beyond = f"reached step {reached:,}" if reached > record.step else "resumed later"
    return (
        f"the record (events.ndjson) is incomplete from step {record.step + 1:,} on: it {last}, but the run {beyond}; "
        "the rows of these steps cannot be judged; restore the file"
    )


def _without(void: Iterable[tuple[int, int]], done: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the entries that no resumption has made void; see `Record`."""
    for generation, step in void:
        done = done[(done["generation"] >= generation) | (done["step"] <= step)]
    return done
