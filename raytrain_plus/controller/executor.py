"""Carry out the state machine's commands: one handler for each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from raytrain_plus.controller.checkpoints.checkpointing import Checkpoints
from raytrain_plus.controller.checkpoints.restoring import Restoring
from raytrain_plus.controller.ending import Ending
from raytrain_plus.controller.group.arrivals import Arrivals
from raytrain_plus.controller.group.formation import Formation
from raytrain_plus.controller.group.lost_workers import Losses
from raytrain_plus.controller.group.members import Members
from raytrain_plus.controller.group.model_hand_over import ModelHandOver
from raytrain_plus.controller.group.monitor import Monitor
from raytrain_plus.controller.group.state_copies import Replication
from raytrain_plus.membership import events as e
from raytrain_plus.membership import state_machine
from raytrain_plus.membership.group_state import Limits, Phase


class Executor:
    """Holds the group: feeds events to the machine, and passes its commands to their handlers."""

    def __init__(self, limits: Limits, durable: int) -> None:
        """Begin the group; `durable`: the step of the newest checkpoint, -1 if there is none."""
        self.group, self._first = state_machine.begin(limits, durable)
        self.handlers: Mapping[type[Any], Callable[[Any], None]] = {}

    def connect(
        self,
        arrivals: Arrivals,
        formation: Formation,
        members: Members,
        monitor: Monitor,
        losses: Losses,
        replication: Replication,
        checkpoints: Checkpoints,
        restoring: Restoring,
        hand_over: ModelHandOver,
        ending: Ending,
    ) -> None:
        """Map each command to its handler."""
        self.handlers = {
            e.Start: arrivals.start,
            e.WarmUp: arrivals.warm_up,
            e.Join: formation.join,
            e.Pause: members.pause,
            e.Finish: members.finish,
            e.Recall: members.recall,
            e.Interrupt: monitor.interrupt,
            e.Wait: monitor.wait,
            e.Dismiss: losses.dismissed,
            e.Restore: restoring.restore,
            e.Keep: checkpoints.keep_for_drain,
            e.HandOver: hand_over.begin,
            e.End: ending.end,
        }
        self._formation, self._replication = formation, replication

    def begin(self) -> None:
        """Carry out the first commands."""
        for command in self._first:
            self._do(command)

    def feed(self, event: e.Event) -> None:
        """Give the machine an event, and carry out its commands."""
        before = self.group
        self.group, commands = state_machine.step(before, event)
        if before.phase is Phase.JOIN and self.group.phase in (Phase.TRAIN, Phase.PAUSE):
            self._formation.formed()
        for command in commands:
            self._do(command)
        self._replication.look()

    def _do(self, command: e.Command) -> None:
        self.handlers[type(command)](command)
