"""What all parts of the controller have in common: one run, on the controller's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from raytrain_plus.controller.event_loop import Clock, EventLoop, Host, Machine
from raytrain_plus.controller.record.journal import Journal
from raytrain_plus.controller.record.run_record import RunRecord
from raytrain_plus.controller.roster.partitions import Partitions
from raytrain_plus.controller.roster.roster import Roster
from raytrain_plus.controller.run_order import RunOrder
from raytrain_plus.job.settings import EarlyStop, Job, KeepBest
from raytrain_plus.membership.hang_detection import Pulses
from raytrain_plus.storage.folders.claimed import Claimed

Handlers = Mapping[type[Any], Callable[[Any], None]]
"""What handles a command of the state machine, or a message in the inbox, by its type."""


@dataclass(frozen=True, slots=True)
class Run:
    """The run that the controller controls, as its parts see it."""

    order: RunOrder
    folder: Claimed
    loop: EventLoop
    machine: Machine
    record: RunRecord
    partitions: Partitions
    roster: Roster
    clock: Clock
    host: Host
    pulses: Pulses = field(default_factory=Pulses)

    @property
    def journal(self) -> Journal:
        """Where it is written."""
        return self.record.journal

    @property
    def job(self) -> Job:
        """The job that it runs."""
        return self.order.plan.job

    @property
    def best(self) -> EarlyStop | KeepBest | None:
        """The setting whose metric decides the best state."""
        return self.job.best


class Handling(Protocol):
    """A part of the controller that handles commands or messages."""

    @property
    def handles(self) -> Handlers:
        """Its handlers. All parts together have one for each type: see `merged`."""


def merged(parts: Iterable[Handling]) -> Handlers:
    """Return the handlers of all parts. Raises `ValueError` if two of them handle one type."""
    found: dict[type[Any], Callable[[Any], None]] = {}
    for part in parts:
        for kind, handler in part.handles.items():
            if kind in found:
                raise ValueError(f"two parts of the controller handle {kind.__name__}")
            found[kind] = handler
    return found
