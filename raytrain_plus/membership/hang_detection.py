"""Detect hung workers from what their training threads report and from missing answers. Pure.

The controller polls every worker. A worker that does not answer is unresponsive: stopped, or one of its threads holds
the interpreter's lock. The others report what they do, since when, and how long that may last. Workers that wait for
others are never at fault, unless all wait.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

WAITING = frozenset({"joining", "collective", "leaving"})
"""Activities that can only end when other workers do their part."""
LEAVE_S = 0.3
"""Seconds that a worker may take to leave a collective after an interrupt."""
LEAVE_JOINING_S = 6.0
"""The same while it forms its world, when it may wait for a connection (see `collective.torch_world.CONNECT_S`)."""
LAST_S = 15.0
"""Additional seconds before all holders of the state are given up: without them everything would be lost."""
LEAVE_UNRESPONSIVE_S = 1.0
"""Seconds that a worker last seen in a collective may leave an interrupt unanswered."""

_SPELLED = {
    "data": "it waited for data",
    "computing": "it computed",
    "applying": "it applied a step",
    "saving": "it copied its state for a checkpoint",
    "preparing": "it prepared",
}


@dataclass(frozen=True, slots=True)
class Pulse:
    """What is known of a worker; times in seconds by one clock."""

    doing: str = "idle"
    since: float = 0.0
    """When its activity began."""
    limit_s: float = float("inf")
    """Seconds that its activity may last."""
    heard: float = 0.0
    """When it answered last."""
    asked: float | None = None
    """When the oldest unanswered question was asked."""
    told: float | None = None
    """When it was told to leave its world."""

    @property
    def lasted_s(self) -> float:
        """Seconds that its activity had lasted at its last answer: by now it may do something else."""
        return self.heard - self.since

    def unresponsive_s(self, now: float) -> float:
        """Return the seconds for which it has owed an answer."""
        return 0.0 if self.asked is None else now - self.asked


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """The conclusion drawn from all pulses."""

    hung: Mapping[str, str]
    """Worker -> what is wrong with it."""
    stuck: bool = False
    """All wait for one another, and nothing moves."""


def judge(
    pulses: Mapping[str, Pulse],
    inside: Collection[str],
    holders: Collection[Collection[str]],
    hang_s: float,
    now: float,
) -> HangVerdict:
    """Return which workers hang. `inside`: the current generation's members; `hang_s`: `elastic.hang_timeout_s`.

    `holders`: for each stage, the workers that may have its newest state; they are not all given up before another
    `LAST_S` seconds.
    """
    wrong = {name: found for name, pulse in pulses.items() if (found := _wrong(pulse, hang_s, now))}
    lost = _given_up({name: over_s for name, (over_s, _) in wrong.items()}, holders)
    if lost or not inside:
        return HangVerdict({name: wrong[name][1] for name in lost})
    stuck = all(
        name in pulses and pulses[name].doing in ("collective", "leaving") and pulses[name].lasted_s > hang_s
        for name in inside
    )
    return HangVerdict({}, stuck)


def _given_up(late_s: Mapping[str, float], holders: Collection[Collection[str]]) -> list[str]:
    """Return which workers are lost, given the seconds by which each is late.

    If all `holders` of a stage are late, they are lost only after `LAST_S`; if those of all stages are late, nobody is
    lost before that.
    """
    wholly = [set(of_stage) for of_stage in holders if of_stage and set(of_stage) <= late_s.keys()]
    last = late_s.keys() if wholly and len(wholly) == len(holders) else {name for one in wholly for name in one}
    return [name for name, since_s in late_s.items() if name not in last or since_s > LAST_S]


def unresponsive(
    pulses: Mapping[str, Pulse], holders: Collection[Collection[str]], limit_s: float, now: float
) -> list[str]:
    """Return the workers that have owed an answer for longer than `limit_s`.

    If all `holders` of a stage have, our own network may be down: they get `LAST_S` more.
    """
    late_s = {name: late for name, pulse in pulses.items() if (late := pulse.unresponsive_s(now) - limit_s) > 0}
    return _given_up(late_s, holders)


def _wrong(pulse: Pulse, hang_s: float, now: float) -> tuple[float, str] | None:
    """Return by how many seconds a worker exceeds its limit and what is wrong with it; None if nothing is."""
    works = pulse.doing not in WAITING and pulse.doing != "idle"
    # A worker with a longer limit for its activity (a first step, an import) may owe an answer for as long.
    over_s = pulse.unresponsive_s(now) - (max(hang_s, pulse.limit_s) if works else hang_s)
    if over_s > 0:
        return over_s, f"hung: its process has not answered for {pulse.unresponsive_s(now):.0f} s"
    if works and pulse.lasted_s > pulse.limit_s:
        what = _SPELLED.get(pulse.doing, pulse.doing)
        return pulse.lasted_s - pulse.limit_s, f"hung: no progress for {pulse.lasted_s:.0f} s while {what}"
    return None


def overdue(pulses: Mapping[str, Pulse], now: float, holders: Collection[Collection[str]]) -> list[str]:
    """Return the workers that were told to leave their world and are still inside a collective, or do not answer.

    `holders`: for each stage, the workers that may have its newest state; they are not all given up before `LAST_S`
    seconds.
    """
    late = {}
    for name, pulse in pulses.items():
        if pulse.told is None or pulse.doing not in WAITING:
            continue
        limit_s = LEAVE_JOINING_S if pulse.doing == "joining" else LEAVE_S
        # A worker that computed until a moment ago has only had that moment.
        began = max(pulse.told, pulse.since)
        unanswered = pulse.asked is not None and now - began > max(limit_s, LEAVE_UNRESPONSIVE_S)
        if pulse.heard - began > limit_s or unanswered:
            late[name] = now - began
    return _given_up(late, holders)


class Pulses:
    """The pulses of all workers, updated as questions go out and answers arrive."""

    def __init__(self) -> None:
        self.all: dict[str, Pulse] = {}

    def add(self, worker: str, now: float) -> None:
        """Add a worker whose process has started."""
        self.all[worker] = Pulse(since=now, heard=now)

    def drop(self, worker: str) -> None:
        """Remove a worker that is gone."""
        self.all.pop(worker, None)

    def asked(self, worker: str, now: float) -> None:
        """Record that a question was sent."""
        pulse = self.all[worker]
        if pulse.asked is None:
            self.all[worker] = replace(pulse, asked=now)

    def heard(self, worker: str, doing: str, since_s: float, limit_s: float, now: float) -> None:
        """Record an answer: the activity has lasted `since_s` and may last `limit_s`."""
        if worker in self.all:
            told = self.all[worker].told
            self.all[worker] = Pulse(doing=doing, since=now - since_s, limit_s=limit_s, heard=now, told=told)

    def on_pulse(self, worker: str, now: float) -> None:
        """Record that a member was told to leave its world."""
        if worker in self.all:
            self.all[worker] = replace(self.all[worker], told=now)

    def left(self, worker: str, now: float) -> None:
        """Record that a member has left its world."""
        if worker in self.all:
            self.all[worker] = replace(self.all[worker], told=None, doing="idle", since=now, limit_s=float("inf"))

    def due(self, workers: Collection[str], every_s: float, now: float) -> list[str]:
        """Return the workers to ask again: those whose last answer is old and that owe none."""
        return [name for name in workers if (p := self.all.get(name)) and p.asked is None and now - p.heard >= every_s]

    def forgive(self, gap_s: float) -> None:
        """Shift the open deadlines because the controller itself stood still for `gap_s`: no worker is to blame."""
        for name, pulse in self.all.items():
            self.all[name] = replace(
                pulse,
                asked=None if pulse.asked is None else pulse.asked + gap_s,
                told=None if pulse.told is None else pulse.told + gap_s,
            )
