"""Export the trained model into the run's folder, on a thread, from the workers that hold its stages.

It arrives a few tensors at a time, so that neither a worker nor the controller has to hold a whole model of several
stages.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raytrain_plus.errors import Interrupted, RaytrainError, RunError, StorageError
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.membership.timeouts import EXPORT_S
from raytrain_plus.runs.folder import MODEL
from raytrain_plus.state.whole import model_file
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import Outages
from raytrain_plus.storage.retry import LAST_PAUSES_S, tried

log = logging.getLogger(__name__)


class Exporter:
    def __init__(
        self,
        run: Folder,
        begin: Callable[..., Callable[[float], Any]],
        ours: Callable[[], None],
        outages: Outages | None = None,
    ) -> None:
        """`begin` starts a worker's method and returns a function that waits for the answer.

        That function takes the maximum seconds and raises `WorkerLost`, `Interrupted`, or what the method raised.
        `ours` raises if another controller owns the run by now. `outages` records whether the storage takes the model.
        """
        self._outages = outages or Outages()
        self._run = run
        self._begin = begin
        self._ours = ours
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="exporter")
        self._wanted = 0

    def export(
        self, holders: Sequence[tuple[str, Stage]], step: int, done: Callable[[str | RaytrainError], None]
    ) -> None:
        """Export the model after `step`, of which each of the `holders` has that stage; return at once.

        `done` gets the hash of the whole state, or the error, on the thread. An earlier export is cancelled.
        """
        self.stop()
        self._thread.submit(self._export, self._wanted, tuple(holders), step, done)

    def stop(self) -> None:
        """Cancel the export in progress; it ends as interrupted."""
        self._wanted += 1

    def close(self) -> None:
        self.stop()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _export(
        self,
        number: int,
        holders: Sequence[tuple[str, Stage]],
        step: int,
        done: Callable[[str | RaytrainError], None],
    ) -> None:
        try:
            done(tried(lambda: self._written(number, holders, step), LAST_PAUSES_S))
        except StorageError as failure:
            done(RunError(f"the model cannot be written to {self._run.where}: {failure}"))
        except RaytrainError as failure:
            done(failure)
        except Exception as failure:
            log.exception("the model could not be exported")
            what = f"{type(failure).__name__}: {failure}"
            done(RunError(f"the model could not be exported: {what}; please report this"))

    def _written(self, number: int, holders: Sequence[tuple[str, Stage]], step: int) -> str:
        """Write the file and return the hash of the state. Raises `OSError` if the storage fails."""
        self._ours()
        waiting = [self._begin(worker, "inventory", step, stage) for worker, stage in holders]
        inventories = [wait(EXPORT_S) for wait in waiting]

        def begin(holder: int, names: tuple[str, ...]) -> Callable[[], Sequence[Any]]:
            worker, stage = holders[holder]
            wait = self._begin(worker, "tensors", step, stage, names)
            return lambda: wait(EXPORT_S)

        digest = hashlib.sha256()

        def pieces() -> Generator[Any, None, None]:
            for piece in model_file(inventories, begin, digest):
                if number != self._wanted:
                    raise Interrupted("the export was cancelled")
                yield piece
            # Writing took a while: check the claim again before the file gets its name.
            self._ours()

        # Closed here, so that no worker's memory stays referenced.
        size = sum(entry.size for inventory in inventories for entry in inventory if entry.of_model)
        with contextlib.closing(pieces()) as file, self._outages.watching("model", self._run, lambda: size):
            self._run.write(MODEL, file)
        return digest.hexdigest()
