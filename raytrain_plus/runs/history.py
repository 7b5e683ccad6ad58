"""Read what earlier controllers of a run left in its folder, so that the next one can resume. Changes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raytrain_plus.data.ledger.ledger_files import FOLDER as LEDGER
from raytrain_plus.data.ledger.ledger_files import entries_of_part, part_name
from raytrain_plus.data.sources.source import READING
from raytrain_plus.errors import InputError
from raytrain_plus.observe.run_events import PLAIN_STEP, LogLine, RunEvent, event_of, log_lines
from raytrain_plus.runs.folder import DATASET, claims_of
from raytrain_plus.state.stored.checkpoint import Found, survey
from raytrain_plus.storage import json_shape as has
from raytrain_plus.storage.document import read_object
from raytrain_plus.storage.interface import Folder

_WORKER = re.compile(r"worker-(\d{1,9})").fullmatch


@dataclass(frozen=True, kw_only=True, slots=True)
class StartSums:
    """What the events since the last `run_started` say of its steps."""

    first_step: int = 0
    """The first step after the earliest state that it began from, or went back to before its first step."""
    first_time: float | None = None
    """When its first step was made, in Unix seconds."""
    loss: float | None = None
    """That of its newest step, void or not; so are the next two."""
    grad_norm: float | None = None
    time: float = 0.0
    """In Unix seconds."""
    again_to: int = -1
    """The highest step that it has made void."""
    again_s: float = 0.0
    """Seconds of the steps up to that one, made again."""
    earlier_stall_s: float = 0.0
    """`Past.stall_s` before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """The history of a run up to now. A start of the run is all since the last `run_started`."""

    generation: int = -1
    """The highest generation used so far."""
    recorded: int = -1
    """The highest generation of an event."""
    committed: int = -1
    """The highest committed step that is not void."""
    evaluated: int = -2
    """The highest step whose evaluation was reported and is not void."""
    members: tuple[Mapping[str, Any], ...] = ()
    """The members of the newest group: `worker`, `pid`, `node` and more."""
    gpus: Mapping[str, tuple[float, Mapping[str, Any]]] = field(default_factory=dict)
    """The newest reading of the GPU of each of these members that has one, and when it was written, in Unix seconds."""
    metrics: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Held-out metrics by step."""
    experts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The newest use of the experts of each layer that has any, void or not: see `expert_use.ExpertUse.fields`."""
    resumptions: tuple[tuple[int, int], ...] = ()
    """(generation, step) pairs: what older generations did after that step is void."""
    claims: int = 0
    """Number of controllers so far."""
    recoveries: int = 0
    """Number of worker losses that the run recovered from so far."""
    stall_s: float = 0.0
    """Total seconds that they cost."""
    skipped: frozenset[int] = frozenset()
    """The committed steps that were skipped and are not void."""
    rows_skipped: Mapping[int, int] = field(default_factory=dict)
    """The number of rows left out of each committed step that is not void and has any."""
    found: tuple[Found, ...] = ()
    """The checkpoints, complete or not, newest first."""
    entered: tuple[tuple[int, int], ...] = ()
    """(generation, first step) of each part of the ledger, without those whose first step is void."""
    behind: int = 0
    """Where the log of this start begins, as the first number of a `Tail.place`."""
    told: int = 0
    """The number of events of this start, `run_started` included."""
    requested: tuple[Mapping[str, Any], ...] = ()
    """The `requested` events of this start, in order."""
    formed: int = -1
    """The highest generation of a `view_formed` of this start."""
    saved: frozenset[str] = frozenset()
    """The names of the checkpoints that a `checkpoint_saved` of this start names."""
    started: int = 0
    """How many `controller_started` events of this start no step has followed."""
    claimed: int = 0
    """The number of the claim of the newest controller in the events of this start; 0 if none says it."""
    over: str = ""
    """The status of the `run_finished` of this start; empty without one."""
    named: int = -1
    """The highest N of a `worker-N` in an event of this start."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """The workers that were lost since the newest `view_formed` of this start, and why."""
    noted: frozenset[str] = frozenset()
    """The texts of the `noted` events of this start."""
    sums: StartSums = field(default_factory=StartSums)

    @property
    def last_time(self) -> float:
        """When the newest step of this start was made, in Unix seconds; 0 without one."""
        return self.sums.time

    @property
    def rules(self) -> Mapping[str, Any] | None:
        """The rules in the tree of the newest checkpoint, as `Plan.resumed` has them; None without a checkpoint."""
        manifest = next((one.manifest for one in self.found if one.manifest is not None), None)
        return None if manifest is None else {"rules": manifest.tree.get("rules", {})}


def is_older(run: Folder) -> bool:
    """Return whether a version began this run that read rows otherwise: see `data.sources.source.READING`."""
    try:
        return READING not in read_object(run, DATASET, "", has.object_of())
    except (FileNotFoundError, InputError):
        # What is wrong with it is said by those who need it.
        return False


def load_history(run: Folder) -> Past:
    """Return the history of the run in this folder; an empty one if there is no folder.

    The log of a million steps takes about two seconds.
    """
    # Read first, so that a controller that claims the run in the meantime is noticed.
    claims = claims_of(run)
    history = _History()
    for line in log_lines(run):
        if found := PLAIN_STEP(line[3]):
            history.step(int(found[2]), int(found[3]), found[1], found[4])
            history.start.newest = line
        else:
            history.add(event_of(run, line), line)
        history.start.told += 1
    return history.past(run, claims)


def entered_to(run: Folder, past: Past) -> int:
    """Return the highest step in the ledger that is not void; -1 if there is none.

    Raises `OSError` if the newest part cannot be read, and `InputError` if it is damaged.
    """
    # Also a part that begins with void steps: others may follow them.
    for generation, first in sorted(_entered(run), reverse=True):
        entries = entries_of_part(run, part_name(generation, first))
        if steps := [step for number, step in entries if not is_void(number, step, past.resumptions)]:
            return max(steps)
    return -1


class _Start:
    """What is known of a start of the run: see the fields of `Past`."""

    def __init__(self, behind: int, stall_s: float) -> None:
        self.behind, self.stall_s = behind, stall_s
        self.told = self.started = self.first_step = self.claimed = 0
        self.formed = self.named = self.again_to = -1
        self.requested: list[RunEvent] = []
        self.saved: set[str] = set()
        self.lost: dict[str, str] = {}
        self.noted: set[str] = set()
        self.over = ""
        self.first_time: float | None = None
        self.again_s = 0.0
        self.newest: LogLine | None = None
        """The line of its newest step."""

    def add(self, event: RunEvent) -> None:
        kind = event["kind"]
        self.named = max(self.named, *_numbers(event), -1)
        if kind == "view_formed":
            self.formed = max(self.formed, event["generation"])
            self.lost.clear()
        elif kind == "worker_lost":
            self.lost[event["worker"]] = event["cause"]
        elif kind == "controller_started":
            self.started += 1
            self.claimed = event.get("claim", 0)
        elif kind == "requested":
            self.requested.append(event)
        elif kind == "checkpoint_saved":
            self.saved.add(event.get("checkpoint") or "")
        elif kind == "noted":
            self.noted.add(event["text"])
        elif kind == "run_finished":
            self.over = event["status"]
        elif kind == "resumed":
            self.again_to = max(self.again_to, event["voided_to"])
            if self.first_time is None or event["step"] < self.first_step:
                self.first_step = event["step"] + 1

    def sums(self, run: Folder) -> StartSums:
        newest = None if self.newest is None else event_of(run, self.newest)
        return StartSums(
            first_step=self.first_step,
            first_time=self.first_time,
            loss=None if newest is None else float(newest["loss"]),
            grad_norm=None if newest is None else float(newest.get("grad_norm", 0.0)),
            time=0.0 if newest is None else newest["time"],
            again_to=self.again_to,
            again_s=self.again_s,
            earlier_stall_s=self.stall_s,
        )


class _History:
    """Sums up the events of a run, which come in order."""

    def __init__(self) -> None:
        self.start = _Start(0, 0.0)
        self.generation = self.committed = -1
        self.recoveries, self.stall_s = 0, 0.0
        self.skipped: set[int] = set()
        self.rows_skipped: dict[int, int] = {}
        self.resumptions: list[tuple[int, int]] = []
        self.members: tuple[Mapping[str, Any], ...] = ()
        self.gpus: dict[str, tuple[float, Mapping[str, Any]]] = {}
        self.experts: dict[str, Mapping[str, Any]] = {}
        self.metrics: dict[int, Mapping[str, float]] = {}
        """By step: a resumption voids those of later steps."""

    def step(self, generation: int, step: int, time: bytes | float, seconds: bytes | float) -> None:
        """Add a step. Times are read only if they matter: a run has very many steps."""
        start = self.start
        if generation > self.generation:
            self.generation = generation
        if step > self.committed and not (self.resumptions and is_void(generation, step, self.resumptions)):
            self.committed = step
        start.started = 0
        if start.first_time is None:
            start.first_time = float(time)
        if step <= start.again_to:
            start.again_s += float(seconds)

    def add(self, event: RunEvent, line: LogLine) -> None:
        """Add any event."""
        kind = event["kind"]
        self.generation = max(self.generation, event["generation"])
        if kind == "run_started":
            # Each controller names its workers alike.
            self.gpus.clear()
            self.start = _Start(line[0], self.stall_s)
        self.start.add(event)
        self.gpus.update({worker: (event["time"], use) for worker, use in event.get("gpus", {}).items()})
        if kind == "step_committed":
            self.start.newest = line
            self.step(event["generation"], event["step"], event["time"], event["seconds"])
            if not is_void(event["generation"], event["step"], self.resumptions):
                if event.get("skipped"):
                    self.skipped.add(event["step"])
                if event.get("rows_skipped"):
                    self.rows_skipped[event["step"]] = event["rows_skipped"]
        elif kind == "view_formed":
            self.members = tuple(event["members"])
            self.gpus = {one["worker"]: self.gpus[one["worker"]] for one in self.members if one["worker"] in self.gpus}
        elif kind == "recovered":
            self.recoveries, self.stall_s = self.recoveries + 1, self.stall_s + event["stall_s"]
        elif kind == "evaluated" and not is_void(event["generation"], event["step"], self.resumptions):
            self.metrics[event["step"]] = {name: float(value) for name, value in event["metrics"].items()}
        elif kind == "experts":
            self.experts |= event["layers"]
        elif kind == "resumed":
            self._go_back(event["generation"], event["step"])

    def _go_back(self, generation: int, step: int) -> None:
        self.resumptions.append((generation, step))
        self.committed = min(self.committed, step)
        self.metrics = {at: values for at, values in self.metrics.items() if at <= step}
        self.skipped = {at for at in self.skipped if at <= step}
        self.rows_skipped = {at: rows for at, rows in self.rows_skipped.items() if at <= step}

    def past(self, run: Folder, claims: int) -> Past:
        """Return all of it, with the checkpoints and the parts of the ledger in the run's folder."""
        found, entered, start = tuple(survey(run, self.resumptions)), _entered(run), self.start
        return Past(
            # Checkpoints and ledger parts may come from generations whose events were never written.
            generation=max(self.generation, *(one.generation for one in found), *(number for number, _ in entered), -1),
            recorded=self.generation,
            committed=self.committed,
            members=self.members,
            gpus=self.gpus,
            evaluated=max(self.metrics, default=-2),
            metrics=self.metrics,
            experts=self.experts,
            resumptions=tuple(self.resumptions),
            claims=claims,
            recoveries=self.recoveries,
            stall_s=self.stall_s,
            skipped=frozenset(self.skipped),
            rows_skipped=self.rows_skipped,
            found=found,
            entered=tuple(part for part in entered if not is_void(*part, self.resumptions)),
            behind=start.behind,
            told=start.told,
            requested=tuple(start.requested),
            formed=start.formed,
            saved=frozenset(start.saved),
            started=start.started,
            claimed=start.claimed,
            lost=start.lost,
            over=start.over,
            named=start.named,
            noted=frozenset(start.noted),
            sums=start.sums(run),
        )


def _entered(run: Folder) -> list[tuple[int, int]]:
    """Return the generation and the first step of each part of the ledger."""
    parts = [part.removeprefix(f"{LEDGER}/").partition(".")[0].split("-") for part in run.files(LEDGER)]
    return [(int(part[0]), int(part[1])) for part in parts if len(part) == 2 and "".join(part).isdecimal()]


def is_void(generation: int, step: int, resumptions: Sequence[tuple[int, int]]) -> bool:
    """Return whether these resumptions make void what a generation did in a step: see `Past.resumptions`."""
    return any(generation < later and step > start for later, start in resumptions)


def _numbers(value: Any) -> Iterator[int]:
    """Yield N for each `worker-N` in an event."""
    if isinstance(value, str):
        if found := _WORKER(value):
            yield int(found[1])
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from _numbers(name)
            yield from _numbers(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _numbers(one)
