"""Carry out the state machine's commands, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from raytrain_plus.membership import events as e
from raytrain_plus.membership import state_machine
from raytrain_plus.membership.group_state import Limits


class Executor:
    """Holds the group: feeds events to the machine, and passes its commands to their handlers."""

    def __init__(self, limits: Limits, durable: int) -> None:
        """Begin the group; `durable`: the step of the newest checkpoint, -1 if there is none."""
        self.group, self._first = state_machine.begin(limits, durable)
        self._handlers: Mapping[type[Any], Callable[[Any], None]] = {}
        self._look: Callable[[], None] = lambda: None
        self._events: deque[e.Event] = deque()
        """What the machine is to hear yet; not empty while the commands of an event are carried out."""

    def serve(self, handlers: Mapping[type[Any], Callable[[Any], None]], look: Callable[[], None]) -> None:
        """Carry out commands by these handlers from now on, and `look` at the group after each event."""
        self._handlers, self._look = handlers, look

    @property
    def handles(self) -> Mapping[type[Any], Callable[[Any], None]]:
        """The requests that only the machine handles."""
        return {e.Rescale: self.feed}

    def begin(self) -> None:
        """Carry out the first commands."""
        for command in self._first:
            self._do(command)

    def feed(self, event: e.Event) -> None:
        """Give the machine an event, and carry out its commands.

        An event that arises while a command is carried out waits until all commands of the event before it are: it must
        see the group that these commands make.
        """
        self._events.append(event)
        if len(self._events) > 1:
            return
        try:
            while self._events:
                self.group, commands = state_machine.step(self.group, self._events[0])
                for command in commands:
                    self._do(command)
                self._look()
                self._events.popleft()
        finally:
            self._events.clear()

    def _do(self, command: e.Command) -> None:
        self._handlers[type(command)](command)
