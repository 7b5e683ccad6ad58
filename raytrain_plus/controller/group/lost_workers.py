"""Handle workers that are lost, or are no longer needed."""

from __future__ import annotations

from raytrain_plus.controller.checkpoints.checkpointing import Checkpoints
from raytrain_plus.controller.event_loop import Died
from raytrain_plus.controller.group.model_hand_over import ModelHandOver
from raytrain_plus.controller.group.nodes import NodeLost
from raytrain_plus.controller.roster.devices import Devices
from raytrain_plus.controller.run import Handlers, Run
from raytrain_plus.membership import events as e
from raytrain_plus.workers.pool import OUT_OF_MEMORY, PROCESS_ONLY


class Losses:
    """Removes workers: from the loop, the pulses and the checkpoints in progress, and then from the group."""

    def __init__(self, run: Run, checkpoints: Checkpoints, hand_over: ModelHandOver) -> None:
        self.loop, self.machine = run.loop, run.machine
        self.record, self.journal = run.record, run.journal
        self.roster, self.pulses, self.clock = run.roster, run.pulses, run.clock
        self.checkpoints, self.hand_over = checkpoints, hand_over
        self.devices = Devices()

    @property
    def handles(self) -> Handlers:
        """See `Handling`."""
        return {e.Dismiss: self.dismissed, Died: self.died, NodeLost: self.node_lost}

    def lost(self, name: str, cause: str, *, vacate: bool = False, withhold: bool = False, fault: str = "") -> None:
        """Handle a worker that is gone or is considered gone; end its process in the latter case.

        `vacate`: only its process is gone, so a standby can take its place. `withhold`: nobody is to take it. `fault`:
        what its device has said, which ends the run if it recurs.
        """
        worker = self.machine.group.workers.get(name)
        if worker is not None:
            self.record.lost(name, cause)
            if worker.state == "in":
                self.record.broken(self.clock.unix(), f"{name} was lost: {cause}")
        self._dismiss(name, vacate=vacate, withhold=withhold)
        if self.hand_over.over:
            # If only this worker's share delayed the end, the run ends now, and nothing is computed again.
            self.hand_over.look()
        self.machine.feed(e.Lost(name, cause, starved=cause == OUT_OF_MEMORY, fault=fault))

    def died(self, message: Died) -> None:
        """Handle the death of a worker's process, or of its device."""
        broken = message.broken
        if broken is None:
            self.lost(message.worker, message.cause, vacate=message.cause in PROCESS_ONLY)
            return
        withhold, counts = self.devices.failed(broken.device, broken.fault)
        if withhold:
            self.journal.note(
                f"{broken.device} failed twice and is not used again in this run, at whose end its place is freed"
            )
        self.lost(message.worker, message.cause, withhold=withhold, fault=broken.fault if counts else "")

    def node_lost(self, message: NodeLost) -> None:
        """Handle a node that does not answer: its workers are lost."""
        for name in self.roster.on_node(message.node, self.machine.group.workers):
            self.lost(name, f"its node {message.node[:12]} does not answer")

    def dismissed(self, command: e.Dismiss) -> None:
        """End a worker that the machine no longer counts on."""
        self._dismiss(command.worker)

    def _dismiss(self, name: str, *, vacate: bool = False, withhold: bool = False) -> None:
        self.pulses.drop(name)
        self.loop.end(name, vacate=vacate, withhold=withhold)
        self.checkpoints.lost(self.machine.group.workers.keys() - {name})
