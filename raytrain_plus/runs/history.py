"""Read what earlier controllers of a run left in its folder, so that the next one can resume. Changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raytrain_plus.data.ledger.ledger_files import FOLDER as LEDGER
from raytrain_plus.data.sources.source import READING
from raytrain_plus.errors import InputError
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.runs.folder import DATASET, claims_of
from raytrain_plus.state.stored.checkpoint import Found, survey
from raytrain_plus.storage import json_shape as has
from raytrain_plus.storage.document import read_object
from raytrain_plus.storage.interface import Folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """The history of a run up to now."""

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


def is_older(run: Folder) -> bool:
    """Return whether a version began this run that read rows otherwise: see `data.sources.source.READING`."""
    try:
        return READING not in read_object(run, DATASET, "", has.object_of())
    except (FileNotFoundError, InputError):
        # What is wrong with it is said by those who need it.
        return False


def load_history(run: Folder) -> Past:
    """Return the history of the run in this folder; an empty one if there is no folder."""
    # Read first, so that a controller that claims the run in the meantime is noticed.
    claims = claims_of(run)
    generation = committed = -1
    recoveries, stall_s, skipped = 0, 0.0, set[int]()
    rows_skipped: dict[int, int] = {}
    resumptions: list[tuple[int, int]] = []
    members: tuple[Mapping[str, Any], ...] = ()
    gpus = dict[str, tuple[float, Mapping[str, Any]]]()
    # Metrics by step: a resumption voids those of later steps.
    metrics: dict[int, Mapping[str, float]] = {}
    for event in read_events(run):
        generation = max(generation, event["generation"])
        gpus.update({worker: (event["time"], use) for worker, use in event.get("gpus", {}).items()})
        if event["kind"] == "step_committed" and not _void(event["generation"], event["step"], resumptions):
            committed = max(committed, event["step"])
            if event.get("skipped"):
                skipped.add(event["step"])
            if event.get("rows_skipped"):
                rows_skipped[event["step"]] = event["rows_skipped"]
        elif event["kind"] == "view_formed":
            members = tuple(event["members"])
            gpus = {one["worker"]: gpus[one["worker"]] for one in members if one["worker"] in gpus}
        elif event["kind"] == "run_started":
            # Each controller names its workers alike.
            gpus.clear()
        elif event["kind"] == "recovered":
            recoveries, stall_s = recoveries + 1, stall_s + event["stall_s"]
        elif event["kind"] == "evaluated" and not _void(event["generation"], event["step"], resumptions):
            metrics[event["step"]] = {name: float(value) for name, value in event["metrics"].items()}
        elif event["kind"] == "resumed":
            resumptions.append((event["generation"], event["step"]))
            committed = min(committed, event["step"])
            metrics = {step: values for step, values in metrics.items() if step <= event["step"]}
            skipped = {step for step in skipped if step <= event["step"]}
            rows_skipped = {step: rows for step, rows in rows_skipped.items() if step <= event["step"]}
    evaluated = max(metrics, default=-2)
    found = tuple(survey(run, resumptions))
    entered = _entered(run)
    return Past(
        # Checkpoints and ledger parts may come from generations whose events were never written.
        generation=max(generation, *(one.generation for one in found), *(written for written, _ in entered), -1),
        recorded=generation,
        committed=committed,
        members=members,
        gpus=gpus,
        evaluated=evaluated,
        metrics=metrics,
        resumptions=tuple(resumptions),
        claims=claims,
        recoveries=recoveries,
        stall_s=stall_s,
        skipped=frozenset(skipped),
        rows_skipped=rows_skipped,
        found=found,
        entered=tuple(part for part in entered if not _void(*part, resumptions)),
    )


def _entered(run: Folder) -> list[tuple[int, int]]:
    """Return the generation and the first step of each part of the ledger."""
    parts = [part.removeprefix(f"{LEDGER}/").partition(".")[0].split("-") for part in run.files(LEDGER)]
    return [(int(part[0]), int(part[1])) for part in parts if len(part) == 2 and "".join(part).isdecimal()]


def _void(generation: int, step: int, resumptions: list[tuple[int, int]]) -> bool:
    return any(generation < later and step > start for later, start in resumptions)
