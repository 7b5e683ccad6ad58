"""Draw a run as SVG: the loss above, and below it a lane for each worker with a bar for each step. Pure.

The colours are legible on white and on black, because a page may have either.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

Event = dict[str, Any]

_WIDTH, _LEFT, _RIGHT = 840, 76, 824
_LOSS = (64, 148)
"""Vertical positions of the largest and the smallest loss."""
_LANES, _LANE, _BAR = 190, 24, 14
"""Vertical position of the first lane, height of a lane and of its bars."""
_TEXT, _STEP, _CURVE, _LOST, _JOINED = "#7a8490", "#4c8dca", "#d9822b", "#e5534b", "#3fa45b"
_SECONDS = (0.5, 1, 2, 5, 10, 20, 60, 120, 300)
"""Possible distances between two marks of the time axis."""


@dataclass(frozen=True, slots=True)
class Step:
    """One committed step."""

    start: float
    end: float
    loss: float


@dataclass(slots=True)
class Period:
    """The time in which the same workers trained."""

    workers: tuple[str, ...]
    steps: list[Step] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Loss:
    """A worker that was lost, and what that cost."""

    worker: str
    time: float
    stall_s: float
    steps_lost: int


def periods(events: Sequence[Event]) -> list[Period]:
    """Return the groups of workers that trained, in order, with their steps; times in seconds since the first step."""
    zero = _first_end(events)
    found: list[Period] = []
    newest = 0.0
    for event in events:
        if event["kind"] == "view_formed":
            found.append(Period(tuple(member["worker"] for member in event["members"])))
        elif event["kind"] == "step_committed" and event["time"] > zero:
            end = event["time"] - zero
            # A step's own seconds may begin before the step before it is committed.
            found[-1].steps.append(Step(max(newest, end - event["seconds"]), end, event["loss"]))
            newest = end
    return [period for period in found if period.steps]


def losses(events: Sequence[Event]) -> list[Loss]:
    """Return the workers that were lost and whose loss the run survived."""
    zero = _first_end(events)
    recoveries = [event for event in events if event["kind"] == "recovered"]
    lost = [event for event in events if event["kind"] == "worker_lost"]
    return [
        Loss(event["worker"], event["time"] - zero, after["stall_s"], after["steps_lost"])
        for event in lost
        if (after := next((one for one in recoveries if one["time"] >= event["time"]), None)) is not None
    ]


def _first_end(events: Sequence[Event]) -> float:
    """Return the time at which the first step was committed. That step is not drawn: it warms everything up."""
    return float(next(event["time"] for event in events if event["kind"] == "step_committed"))


def svg(events: Sequence[Event], title: str) -> str:
    """Return the run as an SVG document. `events` are those of a run's folder, in order."""
    made, lost = periods(events), losses(events)
    workers = list(dict.fromkeys(worker for period in made for worker in period.workers))
    bottom = _LANES + _LANE * len(workers)
    height = bottom + 40
    end = made[-1].steps[-1].end
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12" fill="{_TEXT}">',
            f'<text x="{_LEFT}" y="20" font-size="15">{escape(title)}</text>',
            *(f'<text x="{_LEFT}" y="40" fill="{_LOST}">{escape(_told(one))}</text>' for one in lost[:1]),
            *_axis(end, bottom),
            *_signs(made, lost, workers, end, bottom),
            *_loss_curve([step for period in made for step in period.steps], end),
            *_lanes(made, workers, end),
            "</svg>\n",
        ]
    )


def _told(loss: Loss) -> str:
    return f"{loss.worker} is killed: {1000 * loss.stall_s:.0f} ms without a step, {loss.steps_lost} steps lost"


def _x(seconds: float, end: float) -> float:
    return _LEFT + (_RIGHT - _LEFT) * seconds / end


def _axis(end: float, bottom: int) -> Iterator[str]:
    apart = next((apart for apart in _SECONDS if end / apart <= 8), 600)
    for number in range(math.floor(end / apart) + 1):
        x = _x(number * apart, end)
        yield f'<path d="M{x:.1f} {_LOSS[0]}V{bottom}" stroke="{_TEXT}" stroke-opacity="0.2"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{number * apart:g} s</text>'
    legend = "each bar is one step, committed by all workers"
    yield f'<text x="{_RIGHT}" y="{bottom + 33}" text-anchor="end">{legend}</text>'


def _loss_curve(steps: Sequence[Step], end: float) -> Iterator[str]:
    top, bottom = _LOSS
    low, high = min(step.loss for step in steps), max(step.loss for step in steps)
    points = [
        f"{_x(step.end, end):.1f} {bottom - (bottom - top) * (step.loss - low) / ((high - low) or 1):.1f}"
        for step in steps
    ]
    yield f'<text x="{_LEFT - 10}" y="{top + 4}" text-anchor="end">loss {high:.1f}</text>'
    yield f'<text x="{_LEFT - 10}" y="{bottom + 4}" text-anchor="end">{low:.1f}</text>'
    yield f'<path d="M{"L".join(points)}" fill="none" stroke="{_CURVE}" stroke-width="2" stroke-linejoin="round"/>'


def _lanes(made: Sequence[Period], workers: Sequence[str], end: float) -> Iterator[str]:
    for row, worker in enumerate(workers):
        yield f'<text x="{_LEFT - 10}" y="{_middle(row) + 4}" text-anchor="end">{escape(worker)}</text>'
    for number, period in enumerate(made):
        first = workers.index(period.workers[0])
        bars = "".join(
            f"M{_x(step.start, end):.1f} {_middle(first)}H{max(_x(step.start, end) + 0.6, _x(step.end, end) - 0.8):.1f}"
            for step in period.steps
        )
        yield f'<path id="p{number}" d="{bars}" stroke="{_STEP}" stroke-width="{_BAR}"/>'
        for worker in period.workers[1:]:
            yield f'<use href="#p{number}" y="{_LANE * (workers.index(worker) - first)}"/>'


def _signs(
    made: Sequence[Period], lost: Sequence[Loss], workers: Sequence[str], end: float, bottom: int
) -> Iterator[str]:
    steps = [step for period in made for step in period.steps]
    for loss in lost:
        x = _x(loss.time, end)
        left = _x(max((step.end for step in steps if step.end <= loss.time), default=0.0), end)
        right = _x(min((step.start for step in steps if step.start >= loss.time), default=end), end)
        wide = max(right - left, 1.0)
        yield (
            f'<rect x="{left:.1f}" y="{_LOSS[0]}" width="{wide:.1f}" height="{bottom - _LOSS[0]}" '
            f'fill="{_LOST}" fill-opacity="0.2"/>'
        )
        yield (
            f'<text x="{(left + right) / 2:.1f}" y="{_LANES - 8}" text-anchor="middle" fill="{_LOST}" '
            f'font-weight="bold">{1000 * loss.stall_s:.0f} ms</text>'
        )
        if loss.worker in workers:
            y = _middle(workers.index(loss.worker))
            yield f'<path d="M{x - 5:.1f} {y - 5}l10 10m0-10l-10 10" stroke="{_LOST}" stroke-width="3"/>'
            yield f'<text x="{x + 12:.1f}" y="{y + 4}" fill="{_LOST}">killed (SIGKILL)</text>'
    for before, after in itertools.pairwise(made):
        for worker in after.workers:
            if worker not in before.workers:
                x, y = _x(after.steps[0].start, end), _middle(workers.index(worker))
                yield f'<path d="M{x:.1f} {y - 9}v18" stroke="{_JOINED}" stroke-width="3"/>'
                yield (
                    f'<text x="{x - 8:.1f}" y="{y + 4}" text-anchor="end" fill="{_JOINED}">its replacement joins</text>'
                )


def _middle(row: int) -> int:
    return _LANES + _LANE * row + _LANE // 2
