"""Publish checkpoints whose shares are written: on a thread, in order, one at a time.

Ledger and events are made durable first, so that a checkpoint never knows more than they do; old checkpoints are
removed last.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from raytrain_plus.errors import RunError, StorageError
from raytrain_plus.job.settings import EarlyStop, KeepBest
from raytrain_plus.state.stored.checkpoint import Found, commit, discard, find_checkpoint_fault, sweep
from raytrain_plus.state.stored.manifest import Manifest, kept, manifest_bytes, newness, void
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.retry import retry

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """The outcome of a checkpoint whose shares are written."""

    manifest: Manifest
    error: str
    """Why it was not published; empty if it was."""


class Publisher:
    """Knows the complete checkpoints of a run."""

    def __init__(
        self,
        run: Folder,
        found: Sequence[Found],
        keep: int,
        keep_best: EarlyStop | KeepBest | None,
        settle: Callable[[], None],
        done: Callable[[Published], None],
        ours: Callable[[], None] = lambda: None,
        failed: Callable[[OSError, int], None] = lambda error, wanted: None,
    ) -> None:
        """Publish into the run's folder, in which these checkpoints were `found`.

        `settle` makes ledger and events durable. `done` gets each outcome, on the thread. `ours` raises if another
        controller owns the run by now: unlike `settle` it works on a full disk. Damaged ones are not removed during
        this run: a user with a copy of a file may repair them. `failed` gets each error of the storage and the number
        of bytes that were to be written.
        """
        complete = [one.manifest for one in found if one.manifest is not None]
        self._complete = sorted(complete, key=newness, reverse=True)
        self._resumptions: Sequence[tuple[int, int]] = ()
        self._changing = threading.Lock()
        self._run = run
        self._keep = keep
        self._best = None if keep_best is None else (keep_best.metric, str(keep_best.mode))
        self._settle = settle
        self._done = done
        self._ours = ours
        self._failed = failed
        self._damaged = {one.name for one in found if one.damaged}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publisher")

    @property
    def complete(self) -> Sequence[Manifest]:
        """The checkpoints that are complete and not void, newest first."""
        return tuple(self._complete)

    @property
    def newest(self) -> Manifest | None:
        """The newest complete checkpoint, or None."""
        return next(iter(self._complete), None)

    @property
    def durable(self) -> int:
        """The step of the newest complete checkpoint, or -1."""
        newest = self.newest
        return -1 if newest is None else newest.step

    def drop(self, manifest: Manifest) -> None:
        """Stop using this checkpoint, without removing it."""
        with self._changing:
            self._damaged.add(manifest.name)
            self._complete = [one for one in self._complete if one.name != manifest.name]

    def publish(self, manifest: Manifest) -> None:
        """Publish a checkpoint; return at once."""
        self._thread.submit(self._publish, manifest)

    def discard(self, name: str) -> None:
        """Remove the shares of an abandoned checkpoint; return at once.

        On a full disk they would take the room of the next one.
        """
        self._thread.submit(self._discard, name)

    def forget(self, resumptions: Sequence[tuple[int, int]]) -> None:
        """Drop the checkpoints that a resumption made void, including one being published; return at once."""
        with self._changing:
            self._resumptions = tuple(resumptions)
            self._complete = [one for one in self._complete if not void(one.name, resumptions)]

    def close(self) -> None:
        """Begin nothing more. A checkpoint in progress may complete or not: it is whole or does not count."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _publish(self, manifest: Manifest) -> None:
        try:
            size = len(manifest_bytes(manifest))
            error = retry(lambda: self._commit(manifest), failed=lambda failure: self._failed(failure, size))
        except StorageError as failure:
            error = str(failure)
        except Exception as failure:
            log.exception("the checkpoint of step %d could not be made", manifest.step)
            error = f"{type(failure).__name__}: {failure}"
        if error:
            self._discard(manifest.name)
        else:
            self._sweep(manifest)
        self._done(Published(manifest=manifest, error=error))

    def _commit(self, manifest: Manifest) -> str:
        """Return why the checkpoint cannot be published; empty if it was. Raises `OSError` if the storage fails."""
        self._settle()
        fault = find_checkpoint_fault(self._run, manifest)
        if fault:
            raise OSError(
                f"{fault}: the controller does not see what a worker has written. {self._run.where} is not shared by "
                "their machines; set storage to one that is"
            )
        gone_on = "the run has resumed from an earlier step meanwhile"
        if void(manifest.name, self._resumptions):
            return gone_on
        # No lock is held while the storage takes it. If it is void by then, its name shows that.
        commit(self._run, manifest)
        with self._changing:
            if void(manifest.name, self._resumptions):
                return gone_on
            self._complete = sorted([manifest, *self._complete], key=newness, reverse=True)
        return ""

    def _discard(self, name: str) -> None:
        try:
            self._ours()
            # Only without a manifest: an attempt that seemed to fail may have succeeded.
            discard(self._run, name)
        except (OSError, RunError) as error:
            log.warning("the remains of a checkpoint were not removed; the next checkpoint removes them: %s", error)
        except Exception:
            log.exception("the remains of a checkpoint were not removed; the next checkpoint removes them")

    def _sweep(self, newest: Manifest) -> None:
        """Remove the checkpoints that are no longer kept."""
        try:
            # Check that the run is still ours.
            self._settle()
            with self._changing:
                if void(newest.name, self._resumptions):
                    return
                self._complete, _ = kept(self._complete, self._keep, self._best)
                stay = {one.name for one in self._complete} | self._damaged
            sweep(self._run, stay, newest)
        except (OSError, RunError) as error:
            log.warning("old checkpoints were not removed; trying again after the next one: %s", error)
        except Exception:
            log.exception("old checkpoints were not removed; trying again after the next one")
