"""Decide which applied steps are committed, and report each once. Pure.

Step s is committed when every member of the generation has reported it applied, or when any member has applied a later
step: the sums of a later step are complete only if all members entered it, and so had applied s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar


class _Step(Protocol):
    @property
    def step(self) -> int: ...


Record = TypeVar("Record", bound=_Step)


class Commits(Generic[Record]):
    """Turn the members' reports, which come in any order, into committed steps: each once and in order."""

    def __init__(self, members: Iterable[str], first_step: int) -> None:
        self._applied = dict.fromkeys(members, first_step - 1)
        self._records: dict[int, Record] = {}
        self.next_step = first_step
        """The lowest step that is not committed."""

    @property
    def applied(self) -> int:
        """The highest step that any member has reported."""
        return max(self._applied.values())

    def regroup(self, members: Iterable[str], held: int) -> list[Record]:
        """Begin a new generation of these members with the state after step `held`, which they all have or copy.

        Return the records of the steps that this commits, in order: a living member holds them. Later records are
        dropped: the workers that applied those steps are gone, and the steps are recomputed. Committed steps stay
        committed, though they may be recomputed too.
        """
        committed = [self._records[step] for step in range(self.next_step, held + 1)]
        self._records.clear()
        self._applied = dict.fromkeys(members, held)
        self.next_step = max(self.next_step, held + 1)
        return committed

    def report(self, member: str, records: Sequence[Record]) -> list[Record]:
        """Take one member's newly applied steps and return the records of the steps that this commits, in order.

        Reports of former members change nothing. If several members report a step, the last record counts: it completed
        the step.
        """
        if member not in self._applied:
            return []
        for record in records:
            self._applied[member] = max(self._applied[member], record.step)
            if record.step >= self.next_step:
                self._records[record.step] = record
        proven = max(min(self._applied.values()), max(self._applied.values()) - 1)
        committed = []
        while self.next_step <= proven and self.next_step in self._records:
            committed.append(self._records.pop(self.next_step))
            self.next_step += 1
        return committed
