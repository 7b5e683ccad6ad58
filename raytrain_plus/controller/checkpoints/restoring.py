"""Have workers read a checkpoint, and record that the run continues from an earlier state."""

from __future__ import annotations

import logging
from functools import partial

from raytrain_plus.controller.checkpoints.checkpointing import Checkpoints
from raytrain_plus.controller.event_loop import TICK_S
from raytrain_plus.controller.run import Handlers, Run
from raytrain_plus.errors import CheckpointError, DamagedError, InputError, StorageError
from raytrain_plus.membership import events as e
from raytrain_plus.state.stored.checkpoint import MISSING, find_checkpoint_fault
from raytrain_plus.state.stored.manifest import Manifest

RESTORE_AGAIN_S = 5.0
"""Seconds after which reading a checkpoint is retried."""

log = logging.getLogger(__name__)


class Restoring:
    """Has idle workers read the newest checkpoint that can be used, and reports where the run continues."""

    def __init__(self, run: Run, checkpoints: Checkpoints) -> None:
        """Prepare to read checkpoints."""
        self._fresh_rates = run.order.plan.fresh_rates
        self._folder, self._loop, self._machine, self._record = run.folder, run.loop, run.machine, run.record
        self._checkpoints, self._partitions = checkpoints, run.partitions
        self._past = run.order.past
        """What the run resumes from; None for a new run, and once it is recorded."""
        self._read: Manifest | None = None
        """The checkpoint that a worker has read last."""

    @property
    def handles(self) -> Handlers:
        """See `Handling`."""
        return {e.Restore: self.restore}

    def begun(self) -> None:
        """Record that the run goes on from where it is: it does not resume."""
        self._past = None

    def restore(self, command: e.Restore) -> None:
        """Have a worker read the newest checkpoint: a stage, and of a sharded state some rows."""
        if command.worker not in self._loop:
            return
        if self._checkpoints.publishing:
            # The one being published may be newer, and publishing may remove older ones.
            self._loop.later(TICK_S, partial(self.restore, command))
            return
        manifest = self._checkpoints.newest
        assert manifest is not None, "the machine restores nothing without a checkpoint"
        self._loop.ask(
            command.worker,
            "restore",
            manifest,
            self._partitions.layers(command.stage),
            command.owned,
            then=lambda _: self._restored(command, manifest),
            failed=partial(self._failed, command, manifest),
            errors=(DamagedError, StorageError),
        )

    def go_back_to(self, step: int, generation: int) -> None:
        """Record it if a generation continues after fewer steps than were committed, or is a controller's first."""
        past, self._past = self._past, None
        if past is not None:
            made, evaluated = max(past.committed, step), past.evaluated
        elif step < self._record.committed:
            made, evaluated = self._record.committed, self._record.evaluated
        else:
            return
        read = self._read
        checkpoint = read.name if read is not None and read.step == step else None
        fresh = self._fresh_rates and checkpoint is not None
        self._record.go_back(step, generation, checkpoint, made, min(evaluated, step), fresh_rates=fresh)
        self._checkpoints.go_back(self._record.numbers.now, step)

    def _restored(self, command: e.Restore, manifest: Manifest) -> None:
        if self._checkpoints.publishing:
            # One that is newer, of which the machine is to hear first; or this one is removed because of it.
            self._loop.later(TICK_S, partial(self._restored, command, manifest))
            return
        self._read = manifest
        self._machine.feed(e.Ready(command.worker, manifest.step, command.stage, command.owned))

    def _failed(self, command: e.Restore, manifest: Manifest, error: DamagedError | StorageError) -> None:
        newest = self._checkpoints.newest
        if newest is not None and newest.step > manifest.step:
            # It may have been removed because of a newer one, and that is to be read now.
            self.restore(command)
        elif isinstance(error, DamagedError):
            self._damaged(command, manifest, error)
        else:
            self._later(command, error)

    def _later(self, command: e.Restore, error: OSError) -> None:
        """Wait for a storage that is temporarily unavailable, as long as a worker may take to read a checkpoint."""
        self._record.waits(f"the checkpoint storage: {error}")
        self._loop.later(RESTORE_AGAIN_S, partial(self.restore, command))

    def _damaged(self, command: e.Restore, manifest: Manifest, error: DamagedError) -> None:
        try:
            hidden = error.what == MISSING and not find_checkpoint_fault(self._folder, manifest)
        except OSError as failure:
            self._later(command, failure)
            return
        if hidden:
            raise InputError(
                f"{command.worker} cannot see the checkpoint {manifest.name}, which the controller sees",
                where=f"run folder {self._folder.where}",
                expected="a storage that all nodes share",
            ) from error
        self._checkpoints.drop(manifest)
        if self._checkpoints.newest is None:
            raise CheckpointError(
                f"no checkpoint can be used; the last one tried: {error.what}",
                where=error.where,
                remedy="restore the file from a copy, or start over with --fresh, which keeps this run's folder",
            ) from error
        log.warning("%s", error)
        self._record.not_saved(manifest.step, f"{error.where}: {error.what}; the previous checkpoint is used")
        self._machine.feed(e.Unreadable(command.worker, self._checkpoints.durable))
