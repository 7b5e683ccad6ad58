"""Read from a run's events what the audit relies on, and find out whether they are all there."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

from raytrain_plus.errors import InputError, first_line
from raytrain_plus.observe.run_events import event_lines
from raytrain_plus.storage import json_shape as has
from raytrain_plus.storage.interface import Folder

_EVENT = has.object_of(kind=has.text)
_RESUMED = has.object_of(generation=has.whole(0), step=has.whole(-1))
# Inside a text, such as an error's, the quotes would be escaped.
_GENERATION = re.compile(r'"generation": *(\d+)')
_STEP = re.compile(r'"step": *(\d+)')


@dataclass
class Record:
    """The facts that the events of a run record."""

    resumptions: list[tuple[int, int]] = field(default_factory=list)
    """(generation, step) of each resumption: work of older generations after that step is void."""
    step: int = -1
    """The newest committed step that is not void."""
    generation: int = -1
    """The highest generation of an event."""

    def lacks(self, step: int, generation: int) -> bool:
        """Return whether events are missing if the run has reached that step, in that generation.

        Events are durable before anything else that says the same: the ledger, a checkpoint, the result.
        """
        return step > self.step or generation > self.generation


def read_record(run: Folder) -> Record:
    """Return what the events say. Raises `InputError` if a resumption is damaged."""
    record = Record()
    for line in event_lines(run):
        # Most lines need no parsing: those of a long run would take minutes.
        if found := _GENERATION.search(line):
            record.generation = max(record.generation, int(found[1]))
        if '"step_committed"' in line and (found := _STEP.search(line)):
            record.step = int(found[1])
        elif '"resumed"' in line and (resumption := _resumption(run, line)) is not None:
            record.resumptions.append(resumption)
            record.step = min(record.step, resumption[1])
    return record


def _resumption(run: Folder, line: str) -> tuple[int, int] | None:
    """Return (generation, step) of a `resumed` event; None if the line holds another event."""
    try:
        event = json.loads(line)
        if wrong := _EVENT(event) or (event["kind"] == "resumed" and _RESUMED(event)):
            raise ValueError(wrong)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"a `resumed` event is damaged: {first_line(error)}",
            where=f"{run.where}: events",
            remedy="repair the line: it records which steps are void",
        ) from None
    return (event["generation"], event["step"]) if event["kind"] == "resumed" else None
