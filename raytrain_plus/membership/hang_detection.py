"""Who has hung: told from what each worker's training thread says it does, and from who says nothing. Pure.

Every worker is asked now and then what it does. One that does not answer is silent: stopped, or a thread of it holds
the interpreter's lock. The others say since when they do what they do, and for how long that may last. Those that wait
for others are never at fault, unless all wait.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

WAITING = frozenset({"joining", "collective", "leaving"})
"""What can only end when others do their part."""
LEAVE_S = 0.3
"""How long a worker may take to leave a collective once it is told to."""
LEAVE_JOINING_S = 6.0
"""The same while it forms its world, where it may wait for a connection (see `collective.torch.CONNECT_S`)."""
LAST_S = 15.0
"""How much longer to wait where all who hold the state would be given up: without them everything would be lost."""
LEAVE_SILENT_S = 1.0
"""For how long one that was last seen in a collective may say nothing when it is told to leave."""

_SPELLED = {
    "data": "it waited for data",
    "computing": "it computed",
    "applying": "it applied a step",
    "saving": "it copied its state for a checkpoint",
    "preparing": "it prepared",
}


@dataclass(frozen=True, slots=True)
class Pulse:
    """What is known of a worker; moments in seconds by one clock."""

    doing: str = "idle"
    since: float = 0.0
    """When it began to do so."""
    limit_s: float = float("inf")
    """How long it may."""
    heard: float = 0.0
    """When it answered last."""
    asked: float | None = None
    """When the oldest open question was put."""
    told: float | None = None
    """When it was told to leave its world."""

    @property
    def lasted_s(self) -> float:
        """For how long it had done so when it answered last: by now it may do something else."""
        return self.heard - self.since

    def silent_s(self, now: float) -> float:
        """For how long it has owed an answer."""
        return 0.0 if self.asked is None else now - self.asked


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the pulses tell."""

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
) -> Verdict:
    """Who has hung. `inside` are the members of the present generation; `hang_s` is `elastic.hang_timeout_s`.

    `holders` are, for each stage, the workers that may have its newest state: they are not given up all at once before
    `LAST_S` more.
    """
    wrong = {name: found for name, pulse in pulses.items() if (found := _wrong(pulse, hang_s, now))}
    lost = _given_up({name: over_s for name, (over_s, _) in wrong.items()}, holders)
    if lost or not inside:
        return Verdict({name: wrong[name][1] for name in lost})
    stuck = all(
        name in pulses and pulses[name].doing in ("collective", "leaving") and pulses[name].lasted_s > hang_s
        for name in inside
    )
    return Verdict({}, stuck)


def _given_up(late_s: Mapping[str, float], holders: Collection[Collection[str]]) -> list[str]:
    """Of those that are late by so many seconds, who is lost.

    Where all `holders` of a stage are late, they are only after `LAST_S`; where those of all stages are, nobody is
    before.
    """
    wholly = [set(of_stage) for of_stage in holders if of_stage and set(of_stage) <= late_s.keys()]
    last = late_s.keys() if wholly and len(wholly) == len(holders) else {name for one in wholly for name in one}
    return [name for name, since_s in late_s.items() if name not in last or since_s > LAST_S]


def silent(pulses: Mapping[str, Pulse], holders: Collection[Collection[str]], limit_s: float, now: float) -> list[str]:
    """Who has owed an answer for longer than `limit_s`.

    Where all `holders` of a stage have, it may be our own network that is gone, and they have `LAST_S` more.
    """
    late_s = {name: pulse.silent_s(now) - limit_s for name, pulse in pulses.items() if pulse.silent_s(now) > limit_s}
    return _given_up(late_s, holders)


def _wrong(pulse: Pulse, hang_s: float, now: float) -> tuple[float, str] | None:
    """By how many seconds a worker is over its limit, and what is wrong with it."""
    works = pulse.doing not in WAITING and pulse.doing != "idle"
    # Whoever may take longer for what it does (a first step, an import) may say nothing for as long.
    over_s = pulse.silent_s(now) - (max(hang_s, pulse.limit_s) if works else hang_s)
    if over_s > 0:
        return over_s, f"hung: its process has not answered for {pulse.silent_s(now):.0f} s"
    if works and pulse.lasted_s > pulse.limit_s:
        what = _SPELLED.get(pulse.doing, pulse.doing)
        return pulse.lasted_s - pulse.limit_s, f"hung: no progress for {pulse.lasted_s:.0f} s while {what}"
    return None


def overdue(pulses: Mapping[str, Pulse], now: float, holders: Collection[Collection[str]]) -> list[str]:
    """Who was told to leave its world, and is known to be inside a collective still, or says nothing from there.

    `holders` are, for each stage, the workers that may have its newest state: they are not given up all at once before
    `LAST_S`.
    """
    late = {}
    for name, pulse in pulses.items():
        if pulse.told is None or pulse.doing not in WAITING:
            continue
        limit_s = LEAVE_JOINING_S if pulse.doing == "joining" else LEAVE_S
        # Who computed until a moment ago has had that moment only.
        began = max(pulse.told, pulse.since)
        if pulse.heard - began > limit_s or (now - began > max(limit_s, LEAVE_SILENT_S) and pulse.asked is not None):
            late[name] = now - began
    return _given_up(late, holders)


class Pulses:
    """The pulses of all workers, as questions go out and answers come in."""

    def __init__(self) -> None:
        self.all: dict[str, Pulse] = {}

    def add(self, worker: str, now: float) -> None:
        """A worker's process is there."""
        self.all[worker] = Pulse(since=now, heard=now)

    def drop(self, worker: str) -> None:
        """A worker is gone."""
        self.all.pop(worker, None)

    def asked(self, worker: str, now: float) -> None:
        """A question has gone out."""
        pulse = self.all[worker]
        if pulse.asked is None:
            self.all[worker] = replace(pulse, asked=now)

    def heard(self, worker: str, doing: str, since_s: float, limit_s: float, now: float) -> None:
        """An answer has come: it has done so for `since_s`, and may for `limit_s`."""
        if worker in self.all:
            told = self.all[worker].told
            self.all[worker] = Pulse(doing=doing, since=now - since_s, limit_s=limit_s, heard=now, told=told)

    def told(self, worker: str, now: float) -> None:
        """A member was told to leave its world."""
        if worker in self.all:
            self.all[worker] = replace(self.all[worker], told=now)

    def left(self, worker: str, now: float) -> None:
        """A member has left its world."""
        if worker in self.all:
            self.all[worker] = replace(self.all[worker], told=None, doing="idle", since=now, limit_s=float("inf"))

    def due(self, workers: Collection[str], every_s: float, now: float) -> list[str]:
        """Who is to be asked again: whose last answer is old, and who owes none."""
        return [name for name in workers if (p := self.all.get(name)) and p.asked is None and now - p.heard >= every_s]

    def forgive(self, gap_s: float) -> None:
        """We ourselves stood still for so long: nobody else is to blame for that."""
        for name, pulse in self.all.items():
            self.all[name] = replace(
                pulse,
                asked=None if pulse.asked is None else pulse.asked + gap_s,
                told=None if pulse.told is None else pulse.told + gap_s,
            )
