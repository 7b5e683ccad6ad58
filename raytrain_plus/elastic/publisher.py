"""Makes checkpoints out of shares that are written: on a thread of its own, in order, one after the other.

Ledger and events are made durable first, so that a checkpoint never knows more than they do; old checkpoints go last.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from raytrain_plus.job import KeepBest
from raytrain_plus.state.checkpoint import commit, sweep
from raytrain_plus.state.manifest import FOLDER, Manifest, kept, newness, void
from raytrain_plus.storage.folder import Folder

BACKOFF_S = (0.5, 1.0, 2.0, 4.0)
"""Seconds between the tries to create a manifest."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """What became of a checkpoint whose shares are written."""

    manifest: Manifest
    error: str
    """Why it is none; empty where it is one."""


class Publisher:
    """Knows the complete checkpoints of a run."""

    def __init__(
        self,
        run: Folder,
        complete: Sequence[Manifest],
        keep: int,
        keep_best: KeepBest | None,
        settle: Callable[[], None],
        done: Callable[[Published], None],
    ) -> None:
        """`settle` makes ledger and events durable; `done` is told on the thread what became of each."""
        self.complete = sorted(complete, key=newness, reverse=True)
        """Newest first."""
        self._run = run
        self._keep = keep
        self._best = None if keep_best is None else (keep_best.metric, str(keep_best.mode))
        self._settle = settle
        self._done = done
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publisher")

    def publish(self, manifest: Manifest) -> None:
        """Makes a checkpoint; returns at once."""
        self._thread.submit(self._publish, manifest)

    def forget(self, resumptions: Sequence[tuple[int, int]]) -> None:
        """Those that a resumption has made void count no more."""
        self.complete = [one for one in self.complete if not void(one.name, resumptions)]

    def close(self) -> None:
        """Nothing more is begun. What is under way may end or not: it is whole or none."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _publish(self, manifest: Manifest) -> None:
        try:
            error = self._tried(manifest)
        except Exception as failure:
            log.exception("the checkpoint of step %d could not be made", manifest.step)
            error = f"{type(failure).__name__}: {failure}"
        if not error:
            stay, _ = kept([manifest, *self.complete], self._keep, self._best)
            self.complete = stay
            try:
                sweep(self._run, [one.name for one in stay], before=newness(manifest))
            except OSError:
                log.warning("old checkpoints could not be removed; trying again after the next one", exc_info=True)
        self._done(Published(manifest=manifest, error=error))

    def _tried(self, manifest: Manifest) -> str:
        error = ""
        for wait_s in (*BACKOFF_S, 0.0):
            try:
                self._settle()
                missing = self._missing(manifest)
                if missing:
                    return missing
                commit(self._run, manifest)
                return ""
            except OSError as failure:
                error = f"{type(failure).__name__}: {failure}"
                time.sleep(wait_s)
        return f"{error} (tried {len(BACKOFF_S) + 1} times)"

    def _missing(self, manifest: Manifest) -> str:
        """What of the workers' files is not to be seen from here."""
        place = f"{FOLDER}/{manifest.name}"
        files = self._run.files(place)
        for file in manifest.files:
            stat = files.get(f"{place}/{file.name}")
            if stat is None or stat.bytes != file.bytes:
                return (
                    f"{file.name} was written by a worker and is not to be seen by the controller: the storage "
                    f"{self._run.where} is not shared by their machines; name a folder or an address that is"
                )
        return ""
