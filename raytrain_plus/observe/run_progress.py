"""What a run's events add up to while it goes on: step, loss, speed, time left. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raytrain_plus.observe.events import Event
from raytrain_plus.storage.outage import outage_text

WINDOW_S = 10.0
"""Speed is taken over the steps of about the last so many seconds."""


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
    _recent: deque[tuple[int, float]] = field(default_factory=deque)
    """(rows, seconds) of the latest steps. By the steps' own seconds: evaluations between them slow none down."""
    _recent_s: float = 0.0
    _first_of_view: bool = True
    _members: list[str] = field(default_factory=list)
    _lost: list[str] = field(default_factory=list)
    """Losses of members that have not been told yet."""
    _recovering: bool = False
    _outages: set[tuple[str, str]] = field(default_factory=set)
    """(place, error) of each storage that takes no more."""

    def add(self, event: Event) -> str | None:
        """Takes one event; the line that it deserves, if it does.

        A loss gets one line, when it is recovered from or has to wait; a planned change gets one, too.
        """
        kind = event["kind"]
        if kind == "step_committed":
            self.step, self.loss, self.waiting = event["step"] + 1, float(event["loss"]), ""
            self._time(event["samples"], event["seconds"])
            if event.get("skipped"):
                return f"step {event['step'] + 1} was skipped: its loss or gradient is not finite"
            return None
        if kind == "view_formed":
            return self._view(event)
        if kind == "worker_lost":
            what = f"{event['worker']} (pid {event['pid']}) was lost: {event['cause']}"
            if event["worker"] not in self._members:
                return what
            self._lost.append(what)
            self._recovering = True
            self.waiting = "the others to go on"
            return None
        if kind == "waiting":
            self.waiting = event["for"]
            return "; ".join([*self._untold(), f"waiting for {event['for']}"])
        if kind == "recovered":
            self._recovering = False
            causes = self._untold() or [event["cause"]]
            steps = f"{plural(event['steps_lost'], 'step')} lost"
            if event["steps_recomputed"]:
                steps += f", {plural(event['steps_recomputed'], 'step')} made again"
            who = f"{len(event['kept'])} kept, {len(event['replaced'])} replaced"
            return f"recovered in {event['stall_s']:.2f} s: {'; '.join(causes)}; {steps}; {who}"
        if kind == "run_finished":
            # Of a loss from which nothing recovered.
            return "; ".join(self._untold()) or None
        if kind == "evaluated":
            self.evaluations.append((event["step"], event["metrics"]))
        elif kind == "storage_failed":
            self._outages.add((event["place"], event["error"]))
        elif kind == "storage_recovered":
            self._outages.discard((event["place"], event["error"]))
        elif kind == "checkpoint_failed" and any(error in event["error"] for _, error in self._outages):
            # Its cause has its line.
            return None
        return told(event)

    def _untold(self) -> list[str]:
        lost, self._lost = self._lost, []
        return lost

    def _view(self, event: Event) -> str | None:
        before, self._members = self._members, [member["worker"] for member in event["members"]]
        self.workers, self.collective, self.waiting = len(self._members), event["collective"], ""
        self._recent.clear()
        self._recent_s = 0.0
        self._first_of_view = True
        if not before:
            return _ready(event)
        if self._recovering or set(before) == set(self._members):
            # Of this, what is told of the loss tells.
            return None
        came = [f"{name} joined" for name in self._members if name not in before]
        went = [f"{name} left" for name in before if name not in self._members]
        return f"{plural(self.workers, 'worker')} now: {', '.join([*came, *went])}"

    def _time(self, rows: int, seconds: float) -> None:
        if self._first_of_view:
            # Files open and caches fill in the first step of a group: it says nothing about those that follow.
            self._first_of_view = False
            return
        self._recent.append((rows, seconds))
        self._recent_s += seconds
        while len(self._recent) > 1 and self._recent_s - self._recent[0][1] >= WINDOW_S:
            self._recent_s -= self._recent.popleft()[1]

    @property
    def samples_per_s(self) -> float | None:
        """Rows a second, lately; None before the second step of a group."""
        if self._recent_s <= 0:
            return None
        return sum(rows for rows, _ in self._recent) / self._recent_s

    @property
    def seconds_left(self) -> float | None:
        """Time to the last step at the present speed; None before the second step of a group."""
        if self._recent_s <= 0:
            return None
        return self._recent_s / len(self._recent) * max(0, self.total - self.step)

    def line(self) -> str:
        """All of it in one line of text."""
        parts = [f"step {self.step}/{self.total}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.waiting:
            # Before anything that a narrow screen may cut; the last speed would be a lie now.
            return "  ".join([*parts, f"waiting for {self.waiting}"])
        if not self.workers:
            return "  ".join([*parts, "starting workers"])
        if (speed := self.samples_per_s) is not None:
            parts.append(f"{spell_speed(speed)} samples/s")
        parts.append(plural(self.workers, "worker"))
        if (left := self.seconds_left) is not None:
            parts.append(f"{clock_text(left)} left")
        return "  ".join(parts)


def spell_speed(per_s: float) -> str:
    """A speed with the digits that matter.

    >>> spell_speed(0.25), spell_speed(117.3), spell_speed(12345.6)
    ('0.25', '117', '12,346')
    """
    return f"{per_s:.2g}" if per_s < 10 else f"{per_s:,.0f}"


def plural(count: int, noun: str) -> str:
    """A number of things.

    >>> plural(1, "worker"), plural(2, "worker")
    ('1 worker', '2 workers')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


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
    """A line for an event that deserves one whatever was before, or None."""
    kind = event["kind"]
    if kind == "evaluated":
        return f"held out, {after_step(event['step'])}: {figures(event['metrics'])}"
    if kind == "drain_notice":
        return f"node {event['node'][:12]} will leave"
    if kind == "checkpoint_failed":
        return f"the checkpoint after step {event['step'] + 1} failed: {event['error']}"
    if kind == "storage_failed":
        text = outage_text(event["place"], event["error"], event["wanted"], event["free"])
        return f"cannot write to {text}; training continues"
    if kind == "storage_recovered":
        return f"can write to {event['place']} again after {event['seconds']:.0f} s ({event['error']})"
    if kind == "resumed":
        return f"resumed after step {event['step'] + 1} from {event['checkpoint']}"
    return None


def _ready(event: Event) -> str:
    members = event["members"]
    hosted = sorted({len(member["shards"]) for member in members}, reverse=True)
    # Cells hold copies of one model and stages parts of it: one cell's members together hold it once.
    parameters = sum(member["params"] for member in members if member["cell"] == members[0]["cell"])
    stages = 1 + max(member["stage"] for member in members)
    cells = f" in {plural(len(members) // stages, 'cell')} of {stages} stages" * (stages > 1)
    return (
        f"{plural(len(members), 'worker')} ready{cells}, {' or '.join(map(str, hosted))} shards each; "
        f"{parameters:,} parameters; collective: {event['collective']}"
    )


def after_step(step: int) -> str:
    """When figures were taken.

    >>> after_step(-1), after_step(99)
    ('untrained', 'after step 100')
    """
    return "untrained" if step < 0 else f"after step {step + 1}"


def figures(metrics: Mapping[str, Any]) -> str:
    """Named figures in one line."""
    return ", ".join(f"{name} {float(value):.4f}" for name, value in metrics.items())
