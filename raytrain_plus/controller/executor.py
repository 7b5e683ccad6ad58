"""Carry out the state machine's commands, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raytrain_plus.membership import events as e
from raytrain_plus.membership import state_machine
from raytrain_plus.membership.group_state import Group, Limits


class Executor:
    """Holds the group: feeds events to the machine, and passes its commands to their handlers."""

    def __init__(self, limits: Limits, durable: int) -> None:
        """Begin the group; `durable`: the step of the newest checkpoint, -1 if there is none."""
        self.group, self._first = state_machine.begin(limits, durable)
        self._handlers: Mapping[type[Any], Callable[[Any], None]] = {}
        self._look: Callable[[], None] = lambda: None
        self._waiting: deque[e.Event | None] = deque()
        """What the machine is to hear yet; the first is being carried out. None stands for the beginning."""

    def serve(self, handlers: Mapping[type[Any], Callable[[Any], None]], look: Callable[[], None]) -> None:
        """Carry out commands by these handlers from now on, and `look` at the group after each event."""
        self._handlers, self._look = handlers, look

    @property
    def handles(self) -> Mapping[type[Any], Callable[[Any], None]]:
        """The requests that only the machine handles."""
        return {e.Rescale: self.feed}

    def take_over(self, group: Group, commands: Sequence[e.Command]) -> None:
        """Replace the group by one that another controller has left; `begin` carries out these commands."""
        self.group, self._first = group, [*commands]

    def begin(self) -> None:
        """Carry out the first commands."""
        self._waiting.append(None)
        self._go_on()

    def feed(self, event: e.Event) -> None:
        """Give the machine an event, and carry out its commands.

        An event that arises while a command is carried out waits until all commands of the event before it are: it must
        see the group that these commands make.
        """
        self._waiting.append(event)
        if len(self._waiting) == 1:
            self._go_on()

    def _go_on(self) -> None:
        try:
            while self._waiting:
                event, commands = self._waiting[0], self._first
                if event is not None:
                    self.group, commands = state_machine.step(self.group, event)
                for command in commands:
                    self._do(command)
                self._look()
                self._waiting.popleft()
        finally:
            self._waiting.clear()

    def _do(self, command: e.Command) -> None:
        self._handlers[type(command)](command)
