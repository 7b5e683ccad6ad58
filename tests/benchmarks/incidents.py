"""What the death of a worker cost: computed from the steps that each process reports as finished. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finished:
    """One process has finished one step."""

    time: float
    """unix seconds"""
    pid: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One worker killed, or some at once, and what followed."""

    killed: Set[int]
    """their pids"""
    stall_s: float | None
    """seconds without a new step, beyond the time of a step; None: training never continued"""
    step_s: float
    """seconds between two steps before the kill: the median of the last `MEDIAN_OF`"""
    steps_lost: int
    """steps that only killed processes have finished, and that training skipped"""
    steps_repeated: int
    """steps that every worker had finished, and that were computed again"""
    kept: float
    """the share of the other workers whose processes continue"""


MEDIAN_OF = 50


def incident(records: Iterable[Finished], killed_at: float, killed: Set[int]) -> Incident:
    """Return the cost of killing the processes `killed` at `killed_at` (unix seconds). The records may have any order.

    The step in flight may still end without the killed process, which may have contributed already. The step after
    that one cannot. So the stall is the longer of the two gaps that follow the last step finished before the kill, and
    training has continued once the second step beyond it is finished.

        step finished    s-1   s  kill  s+1                      s+2  s+3
                          |    |    x    |                        |    |
        stall                            [========================]       less the median step

    >>> steps = [(0.0, 0), (1.0, 1), (2.0, 2), (7.0, 3), (8.0, 4)]
    >>> records = [Finished(time, pid, step) for time, step in steps for pid in (10, 11) if pid == 11 or time < 2.5]
    >>> found = incident(records, 2.5, killed={10})
    >>> found.stall_s, found.steps_lost, found.steps_repeated, found.kept
    (4.0, 0, 0, 1.0)
    """
    ordered = sorted(records, key=lambda record: (record.time, record.step))
    before = [record for record in ordered if record.time <= killed_at]
    after = [record for record in ordered if record.time > killed_at]
    if not before:
        raise ValueError("no step was finished before the kill: there is nothing to compare with")
    last = max(record.step for record in before)
    # No worker finishes step s before all have contributed to it, having finished s - 1.
    members = {record.pid for record in before if record.step >= last - 1}
    survivors = members - killed
    step_s = _step_s(before)
    stall_s, resumed = _stall(before, after, last, step_s)
    others = {record.step for record in ordered if record.pid not in killed}
    on = {record.pid for record in after if resumed is not None and record.step >= resumed}
    return Incident(
        killed=killed,
        stall_s=stall_s,
        step_s=step_s,
        # All had contributed to the steps before its last; if only one finished a step, others took that one's state.
        steps_lost=0 if resumed is None else len(set(range(last, resumed)) - others),
        steps_repeated=_repeated(before, after, members),
        kept=len(survivors & on) / len(survivors) if survivors else 0.0,
    )


def frontier(records: Iterable[Finished]) -> list[Finished]:
    """Return, in order of time, the records that exceed every step finished before them: training's progress."""
    found: list[Finished] = []
    for record in sorted(records, key=lambda record: (record.time, record.step)):
        if not found or record.step > found[-1].step:
            found.append(record)
    return found


def _step_s(before: list[Finished]) -> float:
    times = [record.time for record in frontier(before)][-MEDIAN_OF - 1 :]
    return statistics.median(b - a for a, b in itertools.pairwise(times)) if len(times) > 1 else 0.0


def _stall(before: list[Finished], after: list[Finished], last: int, step_s: float) -> tuple[float | None, int | None]:
    """Return the stall in seconds, and the step that shows that training continued; None if it did not."""
    start = next(record for record in before if record.step == last)
    beyond = [record for record in frontier([start, *after]) if record.step > last]
    resumed = next((number for number, record in enumerate(beyond) if record.step > last + 1), None)
    if resumed is None:
        return None, None
    times = [start.time, *(record.time for record in beyond[: resumed + 1])]
    gap = max(b - a for a, b in itertools.pairwise(times))
    return max(0.0, gap - step_s), beyond[resumed].step


def _repeated(before: list[Finished], after: list[Finished], members: set[int]) -> int:
    done: dict[int, set[int]] = {}
    for record in before:
        done.setdefault(record.step, set()).add(record.pid)
    # A worker that replaces another makes step 0 alone, to warm up; no worker is killed that early.
    by_all = {step for step, pids in done.items() if members <= pids and step}
    return len(by_all & {record.step for record in after})
