"""Timeline of the stages: the order of a schedule, laid out in time. Pure.

A chunk is a sequence of layers that one stage holds at one position; chunks are numbered along the model. A schedule
is, for each stage, the order of its actions:

    F   forward of a microbatch through a chunk         B   backward, both parts at once
    I   backward, for the chunk's input alone           W   backward, for its weights alone

An action begins when the stage is free and its inputs are ready. F needs the F of the chunk before. B and I need the F
of the same chunk and the B or I of the chunk after. W needs the I of the same chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a stage: one microbatch in one of its chunks."""

    kind: Kind
    chunk: int
    microbatch: int


Orders = Sequence[Sequence[Action]]
"""For each stage, its actions in order."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that a chunk takes for one microbatch."""

    forward: float
    backward_input: float
    backward_weight: float

    def of(self, kind: Kind) -> float:
        """Return the seconds of one action."""
        if kind == "F":
            return self.forward
        if kind == "I":
            return self.backward_input
        if kind == "W":
            return self.backward_weight
        return self.backward_input + self.backward_weight


@dataclass(frozen=True, slots=True)
class Bar:
    """An action in time, in seconds since the step began."""

    stage: int
    action: Action
    start: float
    end: float


def gpipe(stages: int, microbatches: int) -> Orders:
    """Return all forwards, then all backwards (Huang et al., "GPipe", NeurIPS 2019). One chunk per stage."""
    return [
        [
            *(Action("F", stage, number) for number in range(microbatches)),
            *(Action("B", stage, number) for number in range(microbatches)),
        ]
        for stage in range(stages)
    ]


def one_forward_one_backward(stages: int, microbatches: int) -> Orders:
    """Return enough forwards to fill the following stages, then alternating backwards and forwards, then the remaining
    ones.

    PipeDream-flush of Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021.
    """
    orders = []
    for stage in range(stages):
        ahead = min(microbatches, stages - stage)
        order = [Action("F", stage, number) for number in range(ahead)]
        for number in range(microbatches):
            order.append(Action("B", stage, number))
            if number + ahead < microbatches:
                order.append(Action("F", stage, number + ahead))
        orders.append(order)
    return orders


def simulate(orders: Orders, costs: Sequence[Cost], transfer_s: float = 0.0) -> list[Bar]:
    """Return when each action runs, in the order of the starts.

    `costs`: by chunk; `transfer_s`: seconds of a transfer to another stage. Raises `ValueError` if the schedule
    deadlocks.
    """
    stage_of = {action.chunk: stage for stage, order in enumerate(orders) for action in order}
    last = max(stage_of, default=0)
    ends: dict[Action, tuple[float, int]] = {}
    free = [0.0] * len(orders)
    at = [0] * len(orders)
    bars: list[Bar] = []
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while at[stage] < len(order):
                action = order[at[stage]]
                ready = _ready(action, stage, ends, last, transfer_s)
                if ready is None:
                    break
                start = max(free[stage], ready)
                end = start + costs[action.chunk].of(action.kind)
                ends[action] = (end, stage)
                bars.append(Bar(stage, action, start, end))
                free[stage] = end
                at[stage] += 1
                moved = True
    stuck = [order[done] for order, done in zip(orders, at, strict=True) if done < len(order)]
    if stuck:
        raise ValueError(f"the schedule deadlocks; waiting actions: {stuck}")
    return sorted(bars, key=lambda bar: (bar.start, bar.stage))


def _ready(
    action: Action, stage: int, ends: Mapping[Action, tuple[float, int]], last: int, transfer_s: float
) -> float | None:
    """Return when an action's inputs are ready; None if that is not known yet."""
    needs: list[tuple[tuple[Kind, ...], int]] = []
    if action.kind == "F":
        needs += [(("F",), action.chunk - 1)] * (action.chunk > 0)
    elif action.kind == "W":
        needs.append((("I",), action.chunk))
    else:
        needs.append((("F",), action.chunk))
        needs += [(("B", "I"), action.chunk + 1)] * (action.chunk < last)
    ready = 0.0
    for kinds, chunk in needs:
        found = [ends[one] for kind in kinds if (one := Action(kind, chunk, action.microbatch)) in ends]
        if not found:
            return None
        end, where = found[0]
        ready = max(ready, end + transfer_s * (where != stage))
    return ready


def makespan(bars: Sequence[Bar]) -> float:
    """Return the seconds from the first action to the end of the last."""
    return max((bar.end for bar in bars), default=0.0) - min((bar.start for bar in bars), default=0.0)


def bubble(bars: Sequence[Bar], stages: int) -> float:
    """Return the share of the stages' time in which they are idle.

    >>> each = [Cost(1.0, 1.0, 1.0)] * 4
    >>> round(bubble(simulate(one_forward_one_backward(4, 16), each), 4), 4)
    0.1579
    """
    whole = makespan(bars) * stages
    return 1.0 - sum(bar.end - bar.start for bar in bars) / whole if whole else 0.0


def most_open_passes(order: Sequence[Action]) -> int:
    """Return the most activations that a stage holds at once: forwards whose backward, or its last part, is pending."""
    now = most = 0
    for action in order:
        if action.kind == "F":
            now += 1
        elif action.kind in ("B", "W"):
            now -= 1
        most = max(most, now)
    return most
