"""Watch the clock: how long each phase lasts, which workers hang, and which nodes will leave or do not answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from raytrain_plus.controller.checkpoints.checkpointing import Checkpoints
from raytrain_plus.controller.group.formation import Formation
from raytrain_plus.controller.group.last_progress import LastProgress
from raytrain_plus.controller.group.lost_workers import Losses
from raytrain_plus.controller.group.members import Members
from raytrain_plus.controller.group.model_hand_over import ModelHandOver
from raytrain_plus.controller.group.nodes import Draining
from raytrain_plus.controller.roster.awaited import awaited
from raytrain_plus.controller.run import Handlers, Run
from raytrain_plus.membership import events as e
from raytrain_plus.membership.group_state import Phase, holders, members_in
from raytrain_plus.membership.hang_detection import judge, overdue, unresponsive
from raytrain_plus.membership.timeouts import LEAVE_BEFORE_S, PAUSE_BEFORE_S, clock_of, limit_s, stop_limit_s
from raytrain_plus.observe.run_progress import plural
from raytrain_plus.training.exchange.step_records import Activity

PULSE_S = 0.5
"""Seconds between two questions to a worker."""
LEAVE_PULSE_S = 0.1
"""Seconds between two questions to a worker that leaves a world."""
PAUSED_S = 1.0
"""If the controller itself stood still for longer, no worker is blamed for it."""
NODE_UNRESPONSIVE_S = 2.0
"""Seconds after which a node counts as lost if its worker does not answer and nothing there accepts a connection.

In total that takes 3 to 4 s.
"""
EARLY_WAIT_S = 5.0
"""Seconds for which a starting run does not report that it waits for workers."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Requested:
    """Somebody has asked the run to `stop`, or to `rescale`."""

    what: str
    numbers: Mapping[str, int]
    noted: Callable[[], object]
    """Called once it is in the record."""


class NodeWatch(Protocol):
    """Interface to the node watcher: see `nodes.Nodes`."""

    def start(self, put: Callable[[object], None]) -> None: ...
    def suspect(self, nodes: Set[str]) -> None: ...
    def close(self) -> None: ...


class Monitor:
    """Finds phases and workers that take too long, and nodes that are draining or unresponsive."""

    def __init__(
        self,
        run: Run,
        formation: Formation,
        members: Members,
        losses: Losses,
        checkpoints: Checkpoints,
        hand_over: ModelHandOver,
        nodes: NodeWatch,
    ) -> None:
        self.loop, self.machine, self.record = run.loop, run.machine, run.record
        self.roster, self.pulses, self.clock = run.roster, run.pulses, run.clock
        self.elastic, self.here, self.host = run.job.elastic, run.host.node, run.host
        self.formation, self.members, self.losses, self.nodes = formation, members, losses, nodes
        self.checkpoints, self.hand_over = checkpoints, hand_over
        self.last_progress = LastProgress(run.loop, checkpoints, hand_over, run.record)
        now = self.clock.now()
        self._phase: tuple[object, float] = (clock_of(self.machine.group), now)
        """What the current phase's clock measures, and since when."""
        self._looked = now
        self._draining: Mapping[str, float | None] = {}
        """The draining nodes, each with its deadline in Unix seconds, if known."""
        self._moves = False
        """Whether the controller is to move, because its own node will leave."""
        self._stopping_since: float | None = None
        self._asked_aside = False

    @property
    def handles(self) -> Handlers:
        """See `Handling`."""
        return {
            e.Interrupt: self.interrupt,
            e.Wait: self.wait,
            e.Stop: self.stop,
            Draining: self.drains,
            Requested: self.requested,
        }

    def begin(self) -> None:
        """Start the clock of the first phase."""
        self._looked = self.clock.now()

    def look(self, now: float) -> None:
        """Ask the workers that are due, and act on the limits that have passed."""
        if now - self._looked > PAUSED_S:
            self.pulses.forgive(now - self._looked)
        self._looked = now
        self._ask(now)
        for name in overdue(self.pulses.all, now, holders(self.machine.group)):
            self.losses.lost(name, "it did not leave a broken collective in time")
        group = self.machine.group
        verdict = judge(self.pulses.all, members_in(group), holders(group), self.elastic.hang_timeout_s, now)
        for name, what in verdict.hung.items():
            self.losses.lost(name, what)
        generation = self.machine.group.generation
        if verdict.stuck and self.machine.group.phase in (Phase.TRAIN, Phase.PAUSE):
            self.record.broken(self.clock.unix(), "all workers waited for one another")
            self.machine.feed(e.Stuck(generation))
        owing = unresponsive(self.pulses.all, holders(self.machine.group), NODE_UNRESPONSIVE_S, now)
        self.nodes.suspect(self.roster.nodes(owing))
        self._look_at_limits(now)
        if self._moves and self.machine.group.phase is Phase.TRAIN and not self.checkpoints.busy:
            # Now its absence delays nothing.
            self._moves = False
            self.record.journal.when_durable(self.host.move, "the controller cannot move before its record is durable")

    def interrupt(self, command: e.Interrupt) -> None:
        """Have members leave their world at once."""
        self.formation.cancel()
        now = self.clock.now()
        for name in command.workers:
            self.pulses.on_pulse(name, now)
            self._tell_to_leave(name, now)

    def requested(self, message: Requested) -> None:
        """Enter a request into the record, from which another controller learns of it."""
        if message.what != "stop" or self._stopping_since is None:
            self.record.journal.tell("requested", what=message.what, **message.numbers)
        self.record.journal.when_durable(message.noted, "a request cannot be made durable yet")

    def stop(self, message: e.Stop) -> None:
        """Have the run stop at the next step boundary."""
        if self._stopping_since is None and self.machine.group.phase is not Phase.CLOSE:
            self._stopping_since = self.clock.now()
            if self.machine.group.phase in (Phase.TRAIN, Phase.PAUSE):
                self.record.waits(f"the end of this step, for at most {self.elastic.stop_grace_s:g} s")
        self.machine.feed(message)

    def drains(self, message: Draining) -> None:
        """Have the workers of nodes that will leave do so before."""
        before, self._draining = self._draining, dict(message.nodes)
        self._moves = self._moves or (self.here in message.nodes and self.here not in before)
        for node, deadline in message.nodes.items():
            if node in before:
                continue
            hosted = self.roster.on_node(node, self.machine.group.workers)
            if not hosted:
                log.warning("node %s will leave; it hosts no worker of this run", node)
                continue
            self.record.will_leave(node, deadline)
            for name in hosted:
                self.machine.feed(e.Notice(name))

    def is_draining(self, node: str) -> bool:
        """Return whether that node will leave."""
        return node in self._draining

    def wait(self, command: e.Wait) -> None:
        """Report that there are too few workers; a run that starts reports it only after a while."""
        if self.machine.group.generation >= 0:
            self._waits(command.have)

    def _waits(self, have: int) -> None:
        need = self.machine.group.limits.sizes.fewest
        if have >= need:
            # All of them have started, and are preparing.
            return
        self.record.waits(f"{need - have} more of at least {plural(need, 'worker')} (each needs {self.loop.need})")

    def _ask(self, now: float) -> None:
        """Ask the workers what they do; remind those that should leave, with the addresses published so far."""
        leaving = members_in(self.machine.group) if self.machine.group.phase is Phase.LEAVE else ()
        for name in self.pulses.due(leaving, LEAVE_PULSE_S, now):
            self._tell_to_leave(name, now)
        for name in self.pulses.due(self.pulses.all.keys(), PULSE_S, now):
            self.pulses.asked(name, now)
            self._question(name, "activity")

    def _tell_to_leave(self, name: str, now: float) -> None:
        if name in self.pulses.all:
            self.pulses.asked(name, now)
        self._question(name, "interrupt", self.machine.group.generation, *self.formation.published())

    def _question(self, name: str, method: str, *arguments: Any) -> None:
        then, failed = partial(self._heard, name), partial(self._unheard, name)
        self.loop.ask(name, method, *arguments, then=then, failed=failed, errors=Exception)

    def _heard(self, name: str, activity: Activity) -> None:
        self.pulses.heard(name, activity.doing, activity.since_s, activity.limit_s, self.clock.now())

    def _unheard(self, name: str, error: Exception) -> None:
        # The worker still owes an answer, and is lost if it owes it for too long.
        log.warning("%s cannot report its activity", name, exc_info=error)

    def _look_at_limits(self, now: float) -> None:
        group = self.machine.group
        if clock_of(group) != self._phase[0]:
            self._phase = (clock_of(group), now)
            self.last_progress.begin(now)
        since = now - (self.last_progress.look(now) if group.phase is Phase.CLOSE else self._phase[1])
        if group.phase is Phase.GATHER and group.generation < 0 and since > EARLY_WAIT_S:
            self._waits(len([worker for worker in group.workers.values() if worker.state != "coming"]))
        if not self._late(now, since):
            return
        if group.phase is Phase.LEAVE and self._stopping_since is not None and not self._asked_aside:
            self._asked_aside = True
            self.members.stand_aside()
            return
        if group.phase in (Phase.JOIN, Phase.PAUSE):
            self.record.broken(self.clock.unix(), f"{group.phase.value} took too long")
        for name in members_in(group) if group.phase is Phase.LEAVE else ():
            self.record.lost(name, "it did not leave its world in time")
        if group.phase is Phase.CLOSE:
            leaves = self._goes_within(LEAVE_BEFORE_S, self._last_writers(), untold=False)
            self.checkpoints.wait_no_longer(
                "a machine that writes it leaves now" if leaves else f"nothing of it was written for {since:.0f} s"
            )
            if self.hand_over.over:
                # The model is exported; only the last checkpoint is late.
                self.machine.feed(e.Handed())
                return
        homeless = frozenset(name for name in group.workers if name in self.loop and self.loop.lacks_room(name))
        self.machine.feed(e.Late(group.generation, *awaited(group, homeless)))

    def _late(self, now: float, since: float) -> bool:
        """Return whether the phase has reached its limit, having lasted for `since` seconds."""
        group = self.machine.group
        limit = limit_s(group, self.elastic.wait_s, self.roster.state_bytes)
        if limit is not None and since > limit:
            return True
        if self._stopping_since is not None:
            rest = stop_limit_s(group, self.elastic.stop_grace_s, self._asked_aside)
            if rest is not None and now - self._stopping_since > rest:
                return True
        if group.phase is Phase.CLOSE:
            return self._goes_within(LEAVE_BEFORE_S, self._last_writers(), untold=False)
        if group.phase is Phase.PAUSE:
            return self._goes_within(LEAVE_BEFORE_S, self.roster.nodes(members_in(group)), untold=False)
        if group.phase is not Phase.TRAIN:
            return False
        return self._goes_within(PAUSE_BEFORE_S, self.roster.nodes(members_in(group)), untold=True)

    def _last_writers(self) -> Set[str]:
        """Return the nodes that write the end of the run."""
        leads = () if self.hand_over.over else dict(self.machine.group.leads)
        return {*self.roster.nodes([*self.checkpoints.writers, *leads]), self.here}

    def _goes_within(self, seconds: float, nodes: Set[str], untold: bool) -> bool:
        """Return whether one of these nodes leaves so soon; `untold` is the answer without a known deadline."""
        deadlines = [deadline for node, deadline in self._draining.items() if node in nodes]
        return any(untold if deadline is None else self.clock.unix() > deadline - seconds for deadline in deadlines)
