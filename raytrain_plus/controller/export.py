"""Writes the trained model into the run's folder, out of what the holders of its stages give: on a thread of its own.

It comes a few tensors at a time, so that neither a worker nor the controller has to hold a model that is in stages.
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
        """`begin` starts a worker's method; what it returns waits for the answer, up to so many seconds, and raises
        `WorkerLost`, `Interrupted`, or what the method raised. `ours` raises where the run is somebody else's by now.
        `outages` hears whether the storage takes the model.
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
        """Writes the model after `step`, of which each of these holds that stage; returns at once.

        `done` gets the hash of the whole state, or what was in the way, on the thread. What was begun before ends.
        """
        self.stop()
        self._thread.submit(self._export, self._wanted, tuple(holders), step, done)

    def stop(self) -> None:
        """What is under way is not wanted any more; it is told as interrupted."""
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
            log.exception("the model could not be handed over")
            what = f"{type(failure).__name__}: {failure}"
            done(RunError(f"the model could not be handed over: {what}; please report this"))

    def _written(self, number: int, holders: Sequence[tuple[str, Stage]], step: int) -> str:
        """Writes the file; the hash of the state. Raises `OSError` where the storage fails."""
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
                    raise Interrupted("the model is not wanted any more")
                yield piece
            # That took a while: it gets its name now.
            self._ours()

        # Closed here, so that nothing of the workers' memory is held on to.
        size = sum(entry.size for inventory in inventories for entry in inventory if entry.of_model)
        with contextlib.closing(pieces()) as file, self._outages.watching("model", self._run, lambda: size):
            self._run.write(MODEL, file)
        return digest.hexdigest()
