"""Write the end of a run; wait for the storage with a time limit."""

from __future__ import annotations

from collections.abc import Callable

from raytrain_plus.errors import RunError, StorageError
from raytrain_plus.result import resume_command
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import Outage, Outages, outage_of
from raytrain_plus.storage.retry import LAST_PAUSES_S, retry


class LastWrites:
    """Writes the end of a run; waits for a failing storage once, for a limited time."""

    def __init__(self, run: Folder, outages: Outages, waiting: Callable[[], None]) -> None:
        """Prepare the last writes of a run; `waiting` is called after each failure, before the next attempt."""
        self._run = run
        self._outages = outages
        self._waiting = waiting
        self._gave_up = False
        """Whether that limit has passed."""

    def write(self, act: Callable[[], None], newest: int) -> None:
        """Write a part of the end. The storage is waited for once, for half a minute.

        `newest`: the step of the newest complete checkpoint; -1 if there is none. Raises `RunError` if the storage does
        not take it.
        """
        outages: list[Outage] = []

        def failed(error: OSError) -> None:
            outages[:] = [outage_of(error, self._run)]
            self._outages.failed("end", outages[0])
            self._waiting()

        try:
            retry(act, () if self._gave_up else LAST_PAUSES_S, failed)
        except StorageError as failure:
            self._gave_up = True
            kept = f"the checkpoint after step {newest + 1} is" if newest >= 0 else "no checkpoint is"
            raise RunError(
                f"the result cannot be written: {outages[0]} (retried for {sum(LAST_PAUSES_S):.0f} s). In "
                f"{self._run.where} {kept} kept. When the storage works again: "
                f"{resume_command(self._run)}"
            ) from failure
        self._outages.worked("end")
