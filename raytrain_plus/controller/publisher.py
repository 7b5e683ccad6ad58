"""Makes checkpoints out of shares that are written: on a thread of its own, in order, one after the other.

Ledger and events are made durable first, so that a checkpoint never knows more than they do; old checkpoints go last.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from raytrain_plus.errors import RunError, StorageError
from raytrain_plus.job.settings import KeepBest
from raytrain_plus.state.checkpoint import amiss, commit, discard, sweep
from raytrain_plus.state.manifest import Manifest, kept, newness, to_bytes, void
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.retry import tried

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
        ours: Callable[[], None] = lambda: None,
        damaged: Iterable[str] = (),
        failed: Callable[[OSError, int], None] = lambda error, wanted: None,
    ) -> None:
        """`settle` makes ledger and events durable; `done` is told on the thread what became of each.

        `ours` raises where the run belongs to somebody else by now: unlike `settle` it works on a full disk. The
        `damaged` are not removed while this run goes on: who has a copy of a file may mend them.
        `failed` gets each error of the storage, and how many bytes were to be written.
        """
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
        self._damaged = set(damaged)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="publisher")

    @property
    def complete(self) -> Sequence[Manifest]:
        """Those that are complete and not void, newest first."""
        return tuple(self._complete)

    def drop(self, manifest: Manifest) -> None:
        """This one cannot be used; it is not removed either."""
        with self._changing:
            self._damaged.add(manifest.name)
            self._complete = [one for one in self._complete if one.name != manifest.name]

    def publish(self, manifest: Manifest) -> None:
        """Makes a checkpoint; returns at once."""
        self._thread.submit(self._publish, manifest)

    def discard(self, name: str) -> None:
        """Removes the shares of a checkpoint that will not be made; returns at once.

        On a disk that is full they would be in the way of the next one.
        """
        self._thread.submit(self._discard, name)

    def forget(self, resumptions: Sequence[tuple[int, int]]) -> None:
        """Those that a resumption has made void count no more, nor does one that is being made; returns at once."""
        with self._changing:
            self._resumptions = tuple(resumptions)
            self._complete = [one for one in self._complete if not void(one.name, resumptions)]

    def close(self) -> None:
        """Nothing more is begun. What is under way may end or not: it is whole or none."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _publish(self, manifest: Manifest) -> None:
        try:
            size = len(to_bytes(manifest))
            error = tried(lambda: self._commit(manifest), failed=lambda failure: self._failed(failure, size))
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
        """Why it is no checkpoint; empty where it is one. Raises `OSError` where the storage fails."""
        self._settle()
        fault = amiss(self._run, manifest)
        if fault:
            raise OSError(
                f"{fault}, as the controller sees what a worker has written: {self._run.where} is not shared by their "
                "machines; name a storage that is"
            )
        gone_on = "the run has gone on from an earlier step meanwhile"
        if void(manifest.name, self._resumptions):
            return gone_on
        # Nobody waits for the storage to take it. Where it is void by then its name says so.
        commit(self._run, manifest)
        with self._changing:
            if void(manifest.name, self._resumptions):
                return gone_on
            self._complete = sorted([manifest, *self._complete], key=newness, reverse=True)
        return ""

    def _discard(self, name: str) -> None:
        try:
            self._ours()
            # Only where there is no manifest: a try that failed may have been one that succeeded.
            discard(self._run, name)
        except (OSError, RunError) as error:
            log.warning("what is left of a checkpoint was not removed; the next one takes it along: %s", error)
        except Exception:
            log.exception("what is left of a checkpoint was not removed; the next one takes it along")

    def _sweep(self, newest: Manifest) -> None:
        """Removes what is not kept any more."""
        try:
            # Still ours to remove?
            self._settle()
            with self._changing:
                if void(newest.name, self._resumptions):
                    return
                self._complete, _ = kept(self._complete, self._keep, self._best)
                stay = {one.name for one in self._complete} | self._damaged
            sweep(self._run, stay, before=newness(newest))
        except (OSError, RunError) as error:
            log.warning("old checkpoints were not removed; trying again after the next one: %s", error)
        except Exception:
            log.exception("old checkpoints were not removed; trying again after the next one")
