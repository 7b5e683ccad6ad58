"""What earlier controllers of a run have left in its folder, for the one that goes on. Reads, and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raytrain_plus.data.parts import FOLDER as LEDGER
from raytrain_plus.observe.events import read_events
from raytrain_plus.runs.folder import claims_of
from raytrain_plus.state.checkpoint import Found, survey
from raytrain_plus.storage.interface import Folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Past:
    """A run up to now."""

    generation: int = -1
    """The highest that has been used."""
    committed: int = -1
    """The highest step that was committed and is not void."""
    evaluated: int = -2
    """The highest step whose evaluation was told and is not void."""
    figures: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """Held-out figures by step."""
    resumptions: tuple[tuple[int, int], ...] = ()
    """(generation, step): what older generations did after that step is void."""
    claims: int = 0
    """How many controllers have had it."""
    found: tuple[Found, ...] = ()
    """The checkpoints and what is left of some, newest first."""


def look_back(run: Folder) -> Past:
    """The past of the run in this folder; that of a run without one, where there is no folder."""
    # First of all: who comes meanwhile is noticed.
    claims = claims_of(run)
    generation = committed = -1
    resumptions: list[tuple[int, int]] = []
    # Figures by step: a resumption takes back those of later steps.
    told: dict[int, Mapping[str, float]] = {}
    for event in read_events(run):
        generation = max(generation, event["generation"])
        if event["kind"] == "step_committed" and not _void(event["generation"], event["step"], resumptions):
            committed = max(committed, event["step"])
        elif event["kind"] == "evaluated" and not _void(event["generation"], event["step"], resumptions):
            told[event["step"]] = {name: float(value) for name, value in event["metrics"].items()}
        elif event["kind"] == "resumed":
            resumptions.append((event["generation"], event["step"]))
            committed = min(committed, event["step"])
            told = {step: figures for step, figures in told.items() if step <= event["step"]}
    evaluated = max(told, default=-2)
    found = tuple(survey(run, resumptions))
    # Not all that was written may have been told.
    for one in found:
        generation = max(generation, one.generation)
    for part in (name for name in run.files(LEDGER) if name.endswith(".parquet")):
        written = part.removeprefix(f"{LEDGER}/").partition("-")[0]
        generation = max(generation, int(written) if written.isdecimal() else -1)
    return Past(
        generation=generation,
        committed=committed,
        evaluated=evaluated,
        figures=told,
        resumptions=tuple(resumptions),
        claims=claims,
        found=found,
    )


def _void(generation: int, step: int, resumptions: list[tuple[int, int]]) -> bool:
    return any(generation < later and step > start for later, start in resumptions)
