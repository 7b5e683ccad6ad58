"""Measure the cost of a loss: from the last commit before it to the first after it, by phase. Pure; times are given.

last commit |-- detect --| known |-- interrupt --| all out |-- form --|-- transfer --| joined |-- resume --| commit

If a group cannot form without more workers, the time from when that is known until it can is `wait`, before `form`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Members = Mapping[str, Mapping[str, object]]
"""Worker -> its fields in events (worker, pid, node)."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """One completed recovery from a loss."""

    cause: str
    stall_s: float
    steps_lost: int
    """Committed steps that nobody held any more."""
    steps_recomputed: int
    kept: Sequence[Mapping[str, object]]
    replaced: Sequence[Mapping[str, object]]
    phases: Mapping[str, float]


class _Causes:
    """Why one or several worlds broke, each cause once."""

    def __init__(self) -> None:
        self._causes: list[str] = []
        self._effect = ""

    def add(self, cause: str, follows: bool) -> None:
        """Add a cause. One that probably `follows` from another counts only without others, and only the first."""
        if follows:
            self._effect = self._effect or cause
        elif cause and cause not in self._causes:
            self._causes.append(cause)

    def __str__(self) -> str:
        return "; ".join(self._causes) or self._effect


class Incidents:
    """Tracks the open incident, if there is one. A loss during a recovery is part of it."""

    def __init__(self) -> None:
        self._last_commit: float | None = None
        self._members: Members = {}
        self._before: Members = {}
        self._open = self._together = False
        self._causes = _Causes()
        self._last_world = _Causes()
        self._dead: set[str] = set()
        self._recomputed = self._lost = 0
        self._began = self._known = self._out = self._joined = 0.0
        self._form_s = 0.0
        self._waits: float | None = None
        """Since when the open incident waits for workers, or for the storage."""

    @property
    def last_world(self) -> str:
        """Why worlds broke since the last one in which all were together; empty if none did."""
        return str(self._last_world)

    def adopt(self, members: Members, last_commit: float | None) -> None:
        """Begin with these members together, and the time of the last commit, if there was one."""
        self._members, self._together, self._last_commit = members, True, last_commit

    def broke(self, now: float, cause: str, follows: bool = False) -> None:
        """Record that a world broke; `cause` is empty if not known yet.

        `follows`: the cause is what a member saw, which probably follows from the loss or the failure of another.
        """
        if not self._open:
            self._open = True
            self._began = now if self._last_commit is None else self._last_commit
            self._known = now
            self._before = self._members
            self._causes = _Causes()
            self._recomputed = self._lost = 0
            self._out = now
            self._waits = None
        self._together = False
        self._causes.add(cause, follows)
        self._last_world.add(cause, follows)

    def waits(self, now: float) -> None:
        """Record that a group cannot form yet."""
        if self._open and not self._together and self._waits is None:
            self._waits = now

    def record_lost(self, worker: str) -> None:
        """Record that a worker's process is gone."""
        self._dead.add(worker)

    def left(self, now: float, recomputed: int) -> None:
        """Record that all survivors are out and the next world is requested; `recomputed` steps will be recomputed."""
        self._out = now
        self._recomputed += recomputed

    def forgot(self, steps: int) -> None:
        """Record that `steps` committed steps are lost, and will be recomputed."""
        self._lost += steps

    def joined(self, now: float, members: Members, form_s: float) -> None:
        """Record that all members are in their world and have the state; the slowest took `form_s` to form it."""
        self._together = True
        self._last_world = _Causes()
        self._joined = now
        self._members = members
        self._form_s = form_s

    def committed(self, time: float) -> Recovery | None:
        """Record a committed step; return the recovery that it completes, if any."""
        self._last_commit = time
        if not self._open:
            return None
        if not self._together:
            # The step was applied before the loss; its report came after.
            self._began = time
            self._known = max(self._known, time)
            return None
        return self._closed(time)

    def ended(self, now: float) -> Recovery | None:
        """Record the end of the run; return the recovery from a loss after the last step, if any."""
        if not self._open:
            return None
        if not self._together:
            # No further world was needed.
            self._members = {name: what for name, what in self._members.items() if name not in self._dead}
            self._joined, self._form_s = self._out, 0.0
        return self._closed(now)

    def _closed(self, time: float) -> Recovery:
        self._open = False
        form_s = min(self._form_s, max(0.0, self._joined - self._out))
        interrupted = self._out if self._waits is None else min(max(self._waits, self._known), self._out)
        phases = {
            "detect": self._known - self._began,
            "interrupt": interrupted - self._known,
            **({} if self._waits is None else {"wait": self._out - interrupted}),
            "form": form_s,
            "transfer": self._joined - self._out - form_s,
            "resume": time - self._joined,
        }
        return Recovery(
            cause=str(self._causes) or "a collective broke",
            stall_s=time - self._began,
            steps_lost=self._lost,
            steps_recomputed=self._recomputed,
            kept=[what for name, what in self._members.items() if name in self._before],
            replaced=[what for name, what in self._members.items() if name not in self._before],
            phases={name: round(max(0.0, seconds), 6) for name, seconds in phases.items()},
        )
