"""Which applied steps are committed, and what is told of them. Pure.

Step s is committed when every member of the generation has reported it applied, or when any member has applied a later
one: its sums could not be complete unless all had entered that step, and so had applied s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar


class _Step(Protocol):
    @property
    def step(self) -> int: ...


Record = TypeVar("Record", bound=_Step)


class Commits(Generic[Record]):
    """Turns the members' reports, in any order, into each committed step once and in order."""

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
        """A new generation begins, of these members and with the state after step `held`, which they all have or copy.

        The records of the steps that this commits, in order: a living member holds them. Later ones are forgotten: who
        applied them is gone, and they will be made again. What is committed stays so, though it may be made again, too.
        """
        committed = [self._records[step] for step in range(self.next_step, held + 1)]
        self._records.clear()
        self._applied = dict.fromkeys(members, held)
        self.next_step = max(self.next_step, held + 1)
        return committed

    def report(self, member: str, records: Sequence[Record]) -> list[Record]:
        """Takes one member's newly applied steps; the records of the steps that this commits, in order.

        Word of who is no member any more changes nothing. Where several members report a step, the record that came
        last stands: it is the one that completed it.
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
