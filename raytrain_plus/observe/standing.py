"""What a run's events add up to while it goes on: step, loss, speed, time left. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from raytrain_plus.observe.events import Event

WINDOW_S = 10.0
"""Speed is taken over the last so many seconds."""


@dataclass(slots=True)
class Standing:
    """Where a run stands. `total` is its number of steps."""

    total: int
    step: int = 0
    """Committed steps."""
    loss: float | None = None
    workers: int = 0
    collective: str = ""
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """(step after which, figures), in order."""
    waiting: str = ""
    """What the run waits for; empty while it steps."""
    _recent: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, event: Event) -> None:
        """Takes one event."""
        kind = event["kind"]
        if kind == "step_committed":
            self.step, self.loss, self.waiting = event["step"] + 1, event["loss"], ""
            self._recent.append((event["time"], event["samples"]))
            while self._recent[-1][0] - self._recent[0][0] > WINDOW_S:
                self._recent.popleft()
        elif kind == "view_formed":
            self.workers, self.collective = len(event["members"]), event["collective"]
        elif kind == "evaluated":
            self.evaluations.append((event["step"], event["metrics"]))
            # The evaluation's own time is no step's.
            self._recent.clear()
        elif kind == "waiting":
            self.waiting = event["for"]

    @property
    def samples_per_s(self) -> float | None:
        """Rows a second, lately; None before there are two steps."""
        if len(self._recent) < 2 or self._recent[-1][0] <= self._recent[0][0]:
            return None
        rows = sum(samples for _, samples in list(self._recent)[1:])
        return rows / (self._recent[-1][0] - self._recent[0][0])

    @property
    def seconds_left(self) -> float | None:
        """Time to the last step at the present speed; None before there is one."""
        if len(self._recent) < 2:
            return None
        each = (self._recent[-1][0] - self._recent[0][0]) / (len(self._recent) - 1)
        return each * (self.total - self.step)

    def line(self) -> str:
        """All of it in one line of text."""
        parts = [f"step {self.step}/{self.total}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if (speed := self.samples_per_s) is not None:
            parts.append(f"{speed:,.0f} samples/s")
        parts.append(f"{self.workers} worker{'s' * (self.workers != 1)}")
        if (left := self.seconds_left) is not None:
            parts.append(f"{clock_text(left)} left")
        if self.waiting:
            parts.append(f"waiting for {self.waiting}")
        return "  ".join(parts)


def clock_text(seconds: float) -> str:
    """Minutes and seconds, or hours and minutes.

    >>> clock_text(75), clock_text(7260)
    ('1:15', '2:01 h')
    """
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
    return f"{whole // 60}:{whole % 60:02d}"


def told(event: Event) -> str | None:
    """A line for an event that deserves one, or None."""
    kind = event["kind"]
    if kind == "view_formed":
        shards = sorted({len(member["shards"]) for member in event["members"]}, reverse=True)
        spelled = " or ".join(map(str, shards))
        parameters = event["members"][0]["params"]
        return (
            f"{len(event['members'])} worker{'s' * (len(event['members']) != 1)} ready, {spelled} shards each; "
            f"{parameters:,} parameters; collective: {event['collective']}"
        )
    if kind == "evaluated":
        after = "untrained" if event["step"] < 0 else f"after step {event['step'] + 1}"
        return f"held out, {after}: {figures(event['metrics'])}"
    if kind == "worker_lost":
        return f"{event['worker']} (pid {event['pid']}) was lost: {event['cause']}"
    if kind == "waiting":
        return f"waiting for {event['for']}"
    return None


def figures(metrics: dict[str, Any]) -> str:
    """Named figures in one line."""
    return ", ".join(f"{name} {float(value):.4f}" for name, value in metrics.items())
