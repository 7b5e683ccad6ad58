"""Keep how far a listener is in a run's log, and what a tracker calls the run, in a file of the run's folder.

trackers/callbacks.json    {"at": 4711, "events": 0, "behind": 0}
trackers/mlflow.json       the same, and {"run": the id of the tracker's run}; older versions wrote only that
"""

from __future__ import annotations

import json
from typing import Any

from raytrain_plus.storage import json_shape as has
from raytrain_plus.storage.document import read_object
from raytrain_plus.storage.interface import Folder

FOLDER = "trackers"
"""The folder in a run's folder that holds a file for each listener."""
_PLACE = has.object_of(at=has.whole(0), events=has.whole(0))
_RUN = has.object_of(run=has.text)


def _misfit(kept: dict[str, Any]) -> str:
    return (_PLACE(kept) if "at" in kept else "") or (_RUN(kept) if "run" in kept or "at" not in kept else "")


class Bookmark:
    """A place in a run's log, as `run_events.Tail` has it, that outlives the process of the listeners."""

    def __init__(self, run: Folder, name: str, behind: int) -> None:
        """Begin at the place `behind`, where the log of this controller begins; nothing is read before `load`."""
        self._run = run
        self.file = f"{FOLDER}/{name}.json"
        self._behind = behind
        self.place: tuple[int, int] = (behind, 0)
        self.run: str | None = None
        """The id of the tracker's run; None if it has none yet."""
        self._stored: dict[str, Any] = {}

    @property
    def in_earlier_log(self) -> bool:
        """Whether it is before the place where the log of this controller begins."""
        return self.place < (self._behind, 0)

    def load(self) -> None:
        """Take what the file holds, if it exists. Raises `OSError`, and `InputError` if the file is damaged."""
        try:
            kept = read_object(self._run, self.file, "", _misfit)
        except FileNotFoundError:
            return
        self.run = kept.get("run")
        if "at" in kept:
            place = kept["at"], kept["events"]
            # A log that a machine lost the end of is shorter than the place that an earlier controller's listener has.
            self.place = place if kept.get("behind") == self._behind else min(place, self.place)

    def store(self) -> None:
        """Write the file, if anything has changed. Raises `OSError`, and `FolderGone` if the run is another's."""
        at, events = self.place
        now = {"at": at, "events": events, "behind": self._behind, **({"run": self.run} if self.run else {})}
        if now != self._stored:
            self._run.write(self.file, [json.dumps(now).encode() + b"\n"])
            self._stored = now
