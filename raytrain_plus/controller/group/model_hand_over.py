"""Hand the trained model over: export it into the run's folder, from the workers that hold its stages.

The export runs on a thread. The model arrives a few tensors at a time, so that neither a worker nor the controller has
to hold a whole model of several stages.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from raytrain_plus.controller.checkpoints.checkpointing import Checkpoints
from raytrain_plus.controller.checkpoints.restoring import Restoring
from raytrain_plus.controller.group.members import Members
from raytrain_plus.controller.group.state_copies import Replication
from raytrain_plus.controller.run import Handlers, Run
from raytrain_plus.errors import DamagedError, Interrupted, RaytrainError, RunError, StorageError, WorkerLost
from raytrain_plus.job.settings import EarlyStop
from raytrain_plus.membership import events as e
from raytrain_plus.membership.group_state import Phase
from raytrain_plus.membership.mesh import Donor
from raytrain_plus.membership.pieces import Piece, Pieces
from raytrain_plus.membership.timeouts import EXPORT_S
from raytrain_plus.runs.folder import MODEL
from raytrain_plus.state.stored.checkpoint import chunked
from raytrain_plus.state.stored.digest import model_file
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import Outages
from raytrain_plus.storage.retry import LAST_PAUSES_S, retry
from raytrain_plus.training.exchange.early_stop import verdict
from raytrain_plus.workers.messages import Export

ENDS_KEPT = 2
"""Maximum number of attempts to save the state that a run ends with."""
EXPORT_TRIES = 3
"""Number of retries of the export after a failure."""
EXPORT_AGAIN_S = 1.0
"""Seconds after which the export is retried."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Exported:
    """The end of an export."""

    leads: tuple[Donor, ...]
    """The workers that provided the model."""
    step: int
    outcome: str | RaytrainError
    """The hash of the whole state, or the error."""


class Exporter:
    """Writes the model's file on a thread, from the workers that hold its stages; one export at a time."""

    def __init__(
        self,
        run: Folder,
        begin: Callable[..., Callable[[float], Any]],
        ours: Callable[[], None],
        done: Callable[[Exported], None],
        outages: Outages | None = None,
    ) -> None:
        """Prepare exports into the run's folder.

        `begin` starts a worker's method and returns a function that waits for the answer. That function takes the
        maximum seconds and raises `WorkerLost`, `Interrupted`, or what the method raised. `ours` raises if another
        controller owns the run by now. `done` gets the end of each export, on the thread. `outages` records whether the
        storage takes the model.
        """
        self._outages = outages or Outages()
        self._run = run
        self._begin = begin
        self._ours = ours
        self._done = done
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="exporter")
        self._wanted = 0
        self._written_bytes = self._all_bytes = 0

    @property
    def written(self) -> tuple[int, int]:
        """Bytes of the model that the storage has taken, and all of them: see `Saver.writing`."""
        return self._written_bytes, self._all_bytes

    def export(self, holders: tuple[Donor, ...], step: int) -> None:
        """Export the model after `step`, whose stages the `holders` have; return at once.

        An earlier export is cancelled.
        """
        self.stop()
        self._thread.submit(self._export, self._wanted, holders, step)

    def stop(self) -> None:
        """Cancel the export in progress; it ends as interrupted."""
        self._wanted += 1

    def close(self) -> None:
        """Cancel the export in progress, and end the thread without waiting for it."""
        self.stop()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _export(self, number: int, holders: tuple[Donor, ...], step: int) -> None:
        outcome: str | RaytrainError
        try:
            outcome = retry(lambda: self._written(number, holders, step), LAST_PAUSES_S, self._failed)
        except StorageError as failure:
            outcome = RunError(f"the model cannot be written to {self._run.where}: {failure}")
        except RaytrainError as failure:
            outcome = failure
        except Exception as failure:
            log.exception("the model could not be exported")
            what = f"{type(failure).__name__}: {failure}"
            outcome = RunError(f"the model could not be exported: {what}; please report this")
        self._done(Exported(holders, step, outcome))

    def _failed(self, error: OSError) -> None:
        # The next attempt begins at the first byte.
        self._written_bytes = 0

    def _written(self, number: int, holders: tuple[Donor, ...], step: int) -> str:
        """Write the file and return the hash of the state. Raises `OSError` if the storage fails."""
        self._ours()
        waiting = [self._begin(worker, "inventory", step, stage) for worker, stage in holders]
        inventories = [wait(EXPORT_S) for wait in waiting]

        def begin(holder: int, pieces: tuple[Piece, ...]) -> Callable[[], Sequence[Any]]:
            worker, stage = holders[holder]
            wait = self._begin(worker, "tensors", step, stage, pieces)
            return lambda: wait(EXPORT_S)

        digest = hashlib.sha256()

        def pieces() -> Generator[Any, None, None]:
            self._written_bytes = 0
            for piece in model_file(inventories, begin, digest):
                for chunk in chunked(piece):
                    if number != self._wanted:
                        raise Interrupted("the export was cancelled")
                    yield chunk
                    self._written_bytes += len(chunk)
            # Writing took a while: check the claim again before the file gets its name.
            self._ours()

        # Closed here, so that no worker's memory stays referenced.
        model = {entry.name: entry for inventory in inventories for entry in inventory if entry.of_model}
        size = self._all_bytes = sum(entry.size * (1 + len(entry.also)) for entry in model.values())
        with contextlib.closing(pieces()) as file, self._outages.watching("model", self._run, lambda: size):
            self._run.write(MODEL, file)
        return digest.hexdigest()


class ModelHandOver:
    """The end of a run's training: the model is exported, and the last state is kept in a checkpoint."""

    def __init__(
        self,
        run: Run,
        exporter: Exporter,
        replication: Replication,
        restoring: Restoring,
        checkpoints: Checkpoints,
        members: Members,
    ) -> None:
        self.loop, self.machine = run.loop, run.machine
        self.record, self.journal = run.record, run.journal
        self.clock, self.partitions, self.best = run.clock, run.partitions, run.best
        self.exporter, self.replication, self.restoring = exporter, replication, restoring
        self.checkpoints, self.members = checkpoints, members
        self.export: Export | None = None
        """The exported model; None until it is stored."""
        self.error: RaytrainError | None = None
        """Why the model could not be exported."""
        self._step = -1
        """The step that the run ends with."""
        self._exports = -1
        """The step whose model is being exported."""
        self._unread: set[str] = set()
        """The workers that have not read the best state yet, whose model is to be exported."""
        self._waits = False
        """Whether the best state is read once the last one is kept."""
        self._ends_kept = self._tries = 0

    @property
    def handles(self) -> Handlers:
        """See `Handling`."""
        return {e.HandOver: self.begin, Exported: self.exported}

    @property
    def written(self) -> tuple[int, int] | None:
        """Bytes of the model that the storage has taken, and all of them; None before they are known."""
        written, total = self.exporter.written
        return (min(written, total), total) if total else None

    @property
    def step(self) -> int:
        """The step that the run ends with."""
        return self._step

    @property
    def over(self) -> bool:
        """Whether the model is exported, or will not be."""
        return self.export is not None or self.error is not None

    @property
    def stopped_early(self) -> str | None:
        """Why the run ends before its last step, in words; None if it does not."""
        if self.best is None or (found := verdict(self.best, self.record.history)).over is None:
            return None
        since = "it was first evaluated" if found.best is None else f"step {found.best + 1}"
        return f"{self.best.metric} has not improved since {since}"

    def begin(self, command: e.HandOver) -> None:
        """Export the model from these workers, and keep the state that the run ends with."""
        self.export = self.error = None
        self._ends_kept = 0
        self._tries = EXPORT_TRIES
        self._step = command.step
        if self.journal.opened and command.step < self.record.committed:
            # Nobody holds what was committed, and nothing more will be computed.
            self.record.numbers.begin(self.machine.group.generation)
            self.restoring.go_back_to(command.step, self.machine.group.generation)
        best = self._best if isinstance(self.best, EarlyStop) else None
        self._exports, self._waits = command.step, best is not None and best < command.step
        if not self._waits:
            self._export(command.donors, command.step)
        if self.record.committed >= command.step and not self.checkpoints.busy:
            # At the same time as the export: a run that is stopped has little time.
            self._keeps_the_end()

    def exported(self, message: Exported) -> None:
        """Handle the end of an export."""
        leads, step, outcome = message.leads, message.step, message.outcome
        if not self._provide(leads, step) or isinstance(outcome, WorkerLost):
            # The loss of a holder is reported separately.
            return
        if isinstance(outcome, Interrupted) and self._tries:
            # A fault of a copy is reported separately too: then another worker provides the model.
            self._tries -= 1
            self.loop.later(EXPORT_AGAIN_S, partial(self._export, leads, step))
        elif isinstance(outcome, RaytrainError):
            self.error = outcome
            self._handed(leads)
        else:
            self.loop.ask(
                leads[0][0],
                "show",
                step,
                then=partial(self._showed, leads, step, outcome),
                failed=partial(self._not_shown, leads, step),
            )

    def look(self) -> None:
        """End the run once the model is exported and the last checkpoint is made or given up."""
        if self.machine.group.phase is not Phase.CLOSE or self.checkpoints.busy:
            return
        if self._waits and not self._keeps_the_end():
            self._waits = False
            self._read_the_best()
        if self.over and not self._keeps_the_end():
            self.machine.feed(e.Handed())

    def _read_the_best(self) -> None:
        """Have the workers that hold the last state, which is saved, read the best one, and export that."""
        leads = self.machine.group.leads
        best = self._best
        manifest = None if best is None else self.checkpoints.complete(best)
        why = ""
        if manifest is None:
            why = "could not be saved"
        elif self._step > self.checkpoints.durable:
            why = "cannot be read while the last one is not saved"
        elif len({name for name, _ in leads}) < len(leads):
            # A run that is stopped may end with several stages on one worker, in copies: it can read only one of them.
            why = "cannot be read by the workers that are left"
        if manifest is None or why:
            self.journal.note(f"the best state {why}: the model is the one after step {self._step + 1}")
            self._export(leads, self._step)
            return
        self._exports = manifest.step
        # From now on these workers do not hold the last state.
        self._ends_kept = ENDS_KEPT
        self._unread = {name for name, _ in leads}
        workers = self.machine.group.workers
        owned = {name: workers[name].owned for name, stage in leads if workers[name].stage == stage}
        for name, stage in leads:
            self.machine.feed(e.Overwritten(name))
            self.loop.ask(
                name,
                "restore",
                manifest,
                self.partitions.layers(stage),
                # One that has a copy of another stage reads all of that.
                owned.get(name),
                then=partial(self._has_read, leads, (name, stage), manifest.step, owned.get(name)),
                failed=partial(self._not_shown, leads, manifest.step),
                errors=(DamagedError, StorageError),
            )

    def _has_read(self, leads: tuple[Donor, ...], reader: Donor, step: int, owned: Pieces | None, _: object) -> None:
        name, stage = reader
        self._unread.discard(name)
        self.machine.feed(e.Ready(name, step, stage, owned))
        if self._provide(leads, step) and not self._unread:
            self.exporter.export(leads, step)

    def _export(self, leads: tuple[Donor, ...], step: int) -> None:
        """Export the model, unless other workers provide it by now."""
        if self._provide(leads, step):
            if step == self._step:
                self.replication.check(leads, step)
            self.exporter.export(leads, step)

    def _showed(self, leads: tuple[Donor, ...], step: int, sha: str, show: str | None) -> None:
        if self._provide(leads, step):
            self.export = Export(step=step, show=show, state_sha256=sha)
            self._handed(leads)

    def _not_shown(self, leads: tuple[Donor, ...], step: int, error: RaytrainError) -> None:
        if self._provide(leads, step):
            self.error = error
            self._handed(leads)

    def _provide(self, leads: tuple[Donor, ...], step: int) -> bool:
        """Return whether these workers still provide the model of that step."""
        group = self.machine.group
        return group.phase is Phase.CLOSE and (group.leads, self._exports) == (leads, step)

    def _handed(self, leads: tuple[Donor, ...]) -> None:
        # The state that these workers alone hold is committed, now that the model is stored.
        self.record.regroup(self.clock.unix(), [leads[0][0]], self._step, self.machine.group.generation)

    @property
    def _best(self) -> int | None:
        """The step with the best value so far; None before any."""
        return None if self.best is None else verdict(self.best, self.record.history).best

    @property
    def _kept(self) -> bool:
        """Whether a checkpoint has the state that the run ends with, with its metrics if it is the best."""
        if self._step > self.checkpoints.durable:
            return False
        return self.best is None or self.checkpoints.has(self._step, self.best.metric) or self._best != self._step

    def _keeps_the_end(self) -> bool:
        """Request a checkpoint of the state that the run ends with; return whether one is being made."""
        if self._kept or self._ends_kept == ENDS_KEPT or self.members.differ:
            return False
        self._ends_kept += 1
        return self.checkpoints.keep(self._step)
