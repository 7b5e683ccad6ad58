"""Keep a run owned by one controller: its claim, and the lease that shows that this controller is alive."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from raytrain_plus.errors import RunError
from raytrain_plus.result import resume_command
from raytrain_plus.runs.folder import LEASE_BYTES, Fence, Lease
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import Outages


class Ownership:
    """A controller's hold on a run: renews its lease, and notices when another controller takes the run over."""

    def __init__(self, run: Folder, outages: Outages) -> None:
        self._run = run
        self._outages = outages
        self._fence: Fence | None = None
        self._lease: Lease | None = None
        self.lost = ""
        """Why this controller does not own the run any more; empty while it does."""

    def begin(self, fence: Fence, address: str, controller: str) -> None:
        """Hold the run under this claim, and write the lease.

        `address`: of the cluster; `controller`: its name there.
        """
        self._fence = fence
        self._lease = Lease(self._run, address, controller)
        self._lease.renew()

    @property
    def due(self) -> bool:
        """Whether the lease must be renewed."""
        return self._lease is not None and self._lease.due

    def renew(self) -> None:
        """Renew the lease. Raises `OSError` if the storage does not take it."""
        if self._lease is not None:
            with self._outages.watching("lease", self._run, lambda: LEASE_BYTES):
                self._lease.renew()

    def renew_at_once(self) -> None:
        """Renew the lease while the storage fails: only whether it works matters, which others report."""
        if self._lease is not None:
            self._lease.renew()

    def release(self) -> None:
        """Give the lease up, unless it is another controller's by now."""
        if self._lease is not None and not self.lost:
            self._lease.release()

    def look(self, events: Callable[[], Path | None], newest: int) -> None:
        """Find out whether another controller owns the run.

        `events` returns where the file of the run's events is now, if that is known; `newest`: the step of the newest
        checkpoint, -1 if there is none.
        """
        fence = self._fence
        holder = None if fence is None else fence.overtaken()
        if fence is not None and holder is not None:
            self.lost = self._gone(fence, events(), newest) or (
                f"another controller has taken this run over ({holder}); this one stops and writes no more"
            )

    def check(self) -> None:
        """Raise `RunError` if another controller was found to own the run."""
        if self.lost:
            raise RunError(self.lost)

    def _gone(self, fence: Fence, events: Path | None, newest: int) -> str:
        """Return the message if the run's folder is not where it was; empty if it is."""
        kept = f"the checkpoint after step {newest + 1}" if newest >= 0 else "no checkpoint"
        stops = "the run stops and writes no more"
        was = self._run.path
        if was is not None and events is not None and events.parent != Path(os.path.realpath(was)):
            return (
                f"the run's folder {was} was moved to {events.parent}: {stops}. It holds {kept}; to continue there: "
                f"{resume_command(events.parent)}"
            )
        if not fence.gone:
            return ""
        return (
            f"the run's folder {self._run.where} was moved or removed: {stops}. It held {kept}; to continue, if it "
            "lies elsewhere now: raytrain resume FOLDER"
        )
