"""Find what a dead controller's record lacks, in the records that its workers have kept. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raytrain_plus.errors import StepsLost
from raytrain_plus.runs.history import Past, is_void
from raytrain_plus.training.exchange.step_records import Evaluated, Record, StepRecord
from raytrain_plus.workers.messages import Charter

KeptRecords = Mapping[str, Sequence[tuple[int, Record]]]
"""By living worker: what it has reported, or would have, and no controller has confirmed; with generations' numbers."""

Missing = tuple[int, Mapping[str, StepRecord] | Evaluated]
"""What the generation of a number has made: a step, as a record of each worker that has one, or an evaluation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LackingSteps:
    """What completes a record, and what its workers have made since."""

    back: bool
    """Whether the group went back to the step before the charter's first one, and no event says so."""
    told: int
    """The highest committed step in the events; -1 without any."""
    entered: int
    """The highest step in the ledger; -1 without any."""
    to: int
    """The step up to which events and ledger have all, once they have what is missing."""
    missing: Sequence[Missing]
    """Committed steps and evaluations that one of them lacks, in order."""
    further: Mapping[str, Sequence[Record]]
    """By worker: what the charter's generation has made beyond."""


def lacking_steps(past: Past, entered: int, charter: Charter, kept: KeptRecords) -> LackingSteps:
    """Return what the record of a run lacks, given its history and the highest step in its ledger.

    Raises `StepsLost` if no worker has a committed step that it lacks.
    """
    number, held = charter.number, charter.first_step - 1
    again = charter.group.again if charter.group.again > held else held
    """Up to here all steps were committed before that generation formed, though it may make some of them again."""
    # A group that goes back says so in its generation's first event, so later events are not there either.
    back = again == held < past.committed and past.recorded < number
    resumptions = (*past.resumptions, (number, held)) if back else past.resumptions
    told, entered = (min(past.committed, held), min(entered, held)) if back else (past.committed, entered)
    committed = told if is_void(number, again, resumptions) else max(told, again)
    records, evaluations = _sorted(kept, resumptions)
    made_by: dict[int, int] = {}
    to = min(told, entered)
    while to < committed:
        step = to + 1
        able = [made for made in records.get(step, {}) if made < number or step > again]
        if able:
            made_by[step] = max(able)
        elif step > held:
            # The group makes it again.
            break
        else:
            raise StepsLost(
                f"step {step + 1} is committed, and neither the run's folder nor any living worker has its record"
            )
        to = step
    evaluated_to = max((step for step in past.metrics if step <= held or not back), default=-2)
    missing: list[Missing] = [(made, records[step][made]) for step, made in made_by.items()]
    missing += [
        (made, evaluated)
        for step, (made, evaluated) in sorted(evaluations.items())
        if step > evaluated_to and (step <= to or made < number)
    ]
    return LackingSteps(
        back=back,
        told=told,
        entered=entered,
        to=to,
        # The sort is stable: an evaluation follows its step.
        missing=sorted(missing, key=lambda one: _step(one[1])),
        further={
            worker: [
                record
                for made, record in reported
                if made == number and not _is_void(made, record, resumptions) and not _has(record, to)
            ]
            for worker, reported in kept.items()
        },
    )


def _sorted(
    kept: KeptRecords, resumptions: Sequence[tuple[int, int]]
) -> tuple[dict[int, dict[int, dict[str, StepRecord]]], dict[int, tuple[int, Evaluated]]]:
    """Return what counts: step -> number -> worker -> record, and step -> (highest number, evaluation)."""
    steps: dict[int, dict[int, dict[str, StepRecord]]] = {}
    evaluations: dict[int, tuple[int, Evaluated]] = {}
    for worker, told in kept.items():
        for number, record in told:
            if _is_void(number, record, resumptions):
                continue
            if isinstance(record, StepRecord):
                steps.setdefault(record.step, {}).setdefault(number, {})[worker] = record
            elif isinstance(record, Evaluated) and number > evaluations.get(record.step, (-1,))[0]:
                evaluations[record.step] = number, record
    return steps, evaluations


def _is_void(number: int, record: Record, resumptions: Sequence[tuple[int, int]]) -> bool:
    return isinstance(record, (StepRecord, Evaluated)) and is_void(number, record.step, resumptions)


def _has(record: Record, to: int) -> bool:
    return isinstance(record, (StepRecord, Evaluated)) and record.step <= to


def _step(what: Mapping[str, StepRecord] | Evaluated) -> int:
    return what.step if isinstance(what, Evaluated) else next(iter(what.values())).step
