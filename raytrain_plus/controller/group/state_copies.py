"""Keep copies of state that only one worker holds in the memory of another: its buddy."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from raytrain_plus.controller.event_loop import stale
from raytrain_plus.controller.run import Handlers, Run
from raytrain_plus.membership import events as e
from raytrain_plus.membership.copy_holders import buddies
from raytrain_plus.membership.group_state import Phase
from raytrain_plus.membership.mesh import Donor, Stage
from raytrain_plus.membership.view import View
from raytrain_plus.workers.messages import Buddy, Sent

log = logging.getLogger(__name__)


@dataclass
class _Copies:
    """The copies of one generation."""

    view: View
    buddies: dict[str, str] = field(default_factory=dict)
    """For each member whose state nobody else holds, the worker that keeps a copy of it."""
    sent: dict[int, dict[str, Sent]] = field(default_factory=dict)
    """The copies that arrived, by step and member, for each step whose copies are not all known to be in place."""
    settled: int = -1
    """The newest step whose copies were all in place."""


class Replication:
    """Assigns buddies, and confirms copies once they exist for every stage of a committed step."""

    def __init__(self, run: Run) -> None:
        """Begin without copies."""
        self._loop, self._machine, self._roster, self._record = run.loop, run.machine, run.roster, run.record
        self._overlaps = run.job.parallel.overlaps
        """Whether steps overlap: a loss then takes all members back to where those steps began."""
        self._now: _Copies | None = None
        self._kept = False
        """Whether any copies may be kept somewhere."""

    @property
    def handles(self) -> Handlers:
        """See `Handling`."""
        return {Sent: self.sent}

    def begin(self, view: View) -> None:
        """Assign the copies of a new generation."""
        self._now = _Copies(view)
        self._now.buddies = self._assigned(self._now)

    @property
    def copying(self) -> bool:
        """Whether the members' states are copied at all."""
        return self._overlaps or (self._now is not None and bool(self._now.buddies))

    def buddy(self, owner: str) -> Buddy | None:
        """Return the worker that keeps copies of a member's state; None if there is none."""
        name = None if self._now is None else self._now.buddies.get(owner)
        return None if name is None or name not in self._loop else Buddy(name, self._loop.actor(name))

    def formed(self) -> None:
        """Drop all copies if every state of the generation that has formed is held by two workers."""
        if self._kept and not self.copying:
            self._kept = False
            self._settle(self._machine.group.committed, {})

    def look(self) -> None:
        """Reassign the copies of workers that are gone, and assign those that had no keeper until now."""
        now, generation = self._now, self._machine.group.generation
        if now is None or self._machine.group.phase not in (Phase.JOIN, Phase.TRAIN, Phase.PAUSE):
            return
        before, now.buddies = now.buddies, self._assigned(now)
        for owner in now.buddies.keys() | before.keys():
            if before.get(owner) != now.buddies.get(owner):
                self._loop.tell(owner, "copy_to", generation, self.buddy(owner))

    def sent(self, sent: Sent) -> None:
        """Record that a copy of a worker's state is in its buddy's memory."""
        now, group = self._now, self._machine.group
        if now is None or stale(group, sent.generation, f"a copy from {sent.worker}") or sent.step <= now.settled:
            return
        now.sent.setdefault(sent.step, {})[sent.worker] = sent
        self.settle()

    def settle(self) -> None:
        """Settle the copies of a step once all are in place and the step is committed.

        The group could not go back to a step that was never announced.
        """
        now = self._now
        if now is None or self._machine.group.phase not in (Phase.JOIN, Phase.TRAIN, Phase.PAUSE, Phase.LEAVE):
            return
        members = [member.worker for member in now.view.members]
        for step in sorted(step for step in now.sent if step <= self._record.committed):
            told = now.sent[step]
            # A worker whose buddy has changed sends the copy to the new one.
            if any(name not in told or told[name].buddy != now.buddies.get(name, "") for name in members):
                continue
            del now.sent[step]
            now.settled = step
            copies: dict[str, tuple[Stage, ...]] = {}
            for seat, name in enumerate(members):
                for keeper in filter(None, (name, told[name].buddy)):
                    copies[keeper] = (*copies.get(keeper, ()), now.view.shape.stage(seat))
            self._record.copied(told.values())
            self._settle(step, copies)

    def check(self, donors: Sequence[Donor], step: int) -> None:
        """Ask the donors that only have a copy of the state after `step` whether it is intact."""
        for name, stage in donors:
            worker = self._machine.group.workers[name]
            if (worker.holds, worker.stage) != (step, stage):
                self._loop.ask(name, "has_copy", step, stage, then=partial(self._has_copy, name))

    def _assigned(self, now: _Copies) -> dict[str, str]:
        """Return, for each member whose state nobody else holds, the worker that keeps copies of it."""
        group = self._machine.group
        if now.view.shape.replicas > 1:
            return {}
        owners = [member.worker for member in now.view.members]
        spares = [
            name
            for name, worker in group.workers.items()
            # A worker about to run a warm-up step is busy for a while.
            if (worker.state, worker.holds) == ("idle", None) and not worker.leaving and name not in owners
        ]
        owners = [name for name in owners if name in group.workers]
        nodes = {name: self._roster.node(name) for name in (*owners, *spares)}
        found = buddies(owners, spares, nodes, now.buddies)
        self._kept = self._kept or bool(found) or self._overlaps
        return found

    def _settle(self, step: int, copies: Mapping[str, tuple[Stage, ...]]) -> None:
        """Announce that only these copies are needed from now on."""
        self._machine.feed(e.Copied(self._machine.group.generation, step, copies))
        for name in self._loop:
            self._loop.tell(name, "copied", self._machine.group.generation, step)

    def _has_copy(self, name: str, sound: bool) -> None:
        if not sound and name in self._machine.group.workers:
            log.error("%s: the copy that it should provide is missing or damaged; please report this", name)
            self._machine.feed(e.CopyMissing(name))
