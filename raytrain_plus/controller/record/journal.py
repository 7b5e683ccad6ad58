"""Write a run to its folder, and serve its events to followers: the files, the claim and the lease.

What is written is decided by `run_record`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from raytrain_plus.controller.record.aside import Aside
from raytrain_plus.controller.record.event_feed import EventFeed
from raytrain_plus.controller.record.generation_numbers import GenerationNumbers
from raytrain_plus.controller.record.last_writes import LastWrites
from raytrain_plus.controller.record.listeners import Evaluations, Listeners
from raytrain_plus.controller.record.ownership import Ownership
from raytrain_plus.controller.record.run_writers import Newest, Outlets
from raytrain_plus.errors import FolderGone
from raytrain_plus.observe.gauges import Gauges
from raytrain_plus.result import RESULT, Result
from raytrain_plus.runs.folder import CHANGED, DATASET, JOB, PROFILE, Fence
from raytrain_plus.runs.history import Past
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import Outages
from raytrain_plus.training.exchange.step_records import StepRecord

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a run's folder says of its beginning."""

    job_yaml: str
    versions: Mapping[str, str]
    dataset: Mapping[str, Any]
    """The description of the data: see `Source.describe`."""
    address: str
    """That of the cluster."""
    controller: str = ""
    """The controller's name on it."""
    node: str = ""
    """The id of the controller's node."""


class Journal:
    """Written by the controller's loop; followed from other threads. Nothing is in the run's folder before `open`.

    During the run, no storage delays the loop: slow work is done on threads.
    """

    def __init__(
        self,
        run: Folder,
        numbers: GenerationNumbers,
        gauges: Gauges,
        clock: Callable[[], float],
        newest: Callable[[], int],
    ) -> None:
        """Prepare the journal of the run in this folder.

        `clock`: Unix seconds. `newest` returns the step of the newest complete checkpoint, -1 if there is none.
        """
        self._run, self._numbers, self._newest = run, numbers, newest
        self.outages = Outages()
        """Open storage failures; every writer of the run reports here."""
        self._ownership = Ownership(run, self.outages)
        self._last_writes = LastWrites(run, self.outages, self._still_alive)
        self._aside = Aside(run, self._ownership, self.outages)
        self._followed = EventFeed(
            lambda error: self._aside.say_once("events cannot be read back; trying again", error)
        )
        self._outlets = Outlets(run, clock, self._ownership, self.outages, self._followed, gauges)
        self._renewing: Future[None] | None = None
        self._claim = 0
        """The number of this controller's claim."""

    def open(
        self,
        fence: Fence,
        beginning: Beginning,
        evaluated: Callable[[], Evaluations],
        listeners: Listeners | None = None,
    ) -> None:
        """Begin writing to the run's folder.

        `evaluated` returns the metrics of the evaluations up to now; `listeners` hear of all events.
        """
        run = self._run
        self._ownership.begin(fence, beginning.address, beginning.controller)
        run.remove(RESULT)
        run.write(JOB, [beginning.job_yaml.encode()])
        run.write(DATASET, [json.dumps(beginning.dataset, indent=1).encode() + b"\n"])
        job, versions = beginning.job_yaml, dict(beginning.versions)
        started = {"job": job, "versions": versions, "address": beginning.address}
        self._claim = fence.number
        controller = self._this_controller(beginning.node, [])
        self._outlets.open(self._numbers.now, started, controller, evaluated, listeners, self._before_entries)

    def adopt(
        self,
        fence: Fence,
        beginning: Beginning,
        past: Past,
        kept: tuple[Newest, Newest],
        evaluated: Callable[[], Evaluations],
        listeners: Listeners | None,
    ) -> None:
        """Continue what another controller of this run has written: see `Outlets.adopt`, for the others `open`."""
        self._ownership.begin(fence, beginning.address, beginning.controller)
        number, self._claim = self._numbers.now, fence.number
        self._outlets.adopt(number, past.behind, past.told, kept, evaluated, listeners, self._before_entries)

    def adopted(self, node: str, workers: Sequence[str]) -> None:
        """Record that this controller on this node has adopted these members."""
        self.tell("controller_started", **self._this_controller(node, workers))

    def _this_controller(self, node: str, adopted: Sequence[str]) -> dict[str, Any]:
        """Return the fields of a `controller_started`."""
        return {"pid": os.getpid(), "node": node, "adopted": list(adopted), "claim": self._claim}

    @property
    def generation(self) -> int:
        """The number that events carry now: see `GenerationNumbers`."""
        return self._numbers.now

    @property
    def kept(self) -> tuple[Newest, Newest]:
        """See `Outlets.kept`."""
        return self._outlets.kept

    @property
    def opened(self) -> bool:
        """Whether the run has a folder."""
        return self._outlets.opened

    @property
    def lost(self) -> bool:
        """Whether another controller was found to own the run."""
        return bool(self._ownership.lost)

    def renew(self) -> None:
        """Renew the lease that marks the run as alive. Raises `RunError` if another controller owns the run by now."""
        self._ownership.check()
        self._tell_news()
        if self._ownership.due and (self._renewing is None or self._renewing.done()):
            self._renewing = self._aside.later(self._renew, "the run's lease cannot be renewed; trying again")

    def _renew(self) -> None:
        self.check_fence()
        self._ownership.renew()

    def check_fence(self) -> None:
        """Raise `RunError` if another controller has taken over the run; nothing is written from then on."""
        self._look_for_another()
        if self._ownership.lost:
            self._outlets.abandon()
        self._ownership.check()

    def _look_for_another(self) -> None:
        self._ownership.look(self._outlets.place, self._newest())

    def _before_entries(self) -> None:
        """Run before anything is entered into the ledger.

        A resumption must be durable first: otherwise both what it makes void and what takes its place would count.
        Raises `OSError` if it cannot be made durable, `RunError` if another controller owns the run.
        """
        self._look_for_another()
        # The ledger's writer cannot be the one that ends its writing.
        self._ownership.check()
        self._outlets.sync()

    def _tell_news(self, last: bool = False) -> None:
        for kind, fields in self.outages.news(last):
            self.tell(kind, **fields)
        for text in self._outlets.news():
            self.note(text)

    def tell(self, kind: str, time_s: float | None = None, /, **fields: Any) -> None:
        """Record an event; `time_s` in Unix seconds, None for now."""
        self._outlets.tell(kind, self._numbers.now, time_s, fields)

    def tell_after_news(self, kind: str, /, **fields: Any) -> None:
        """Record an event after what is known of outages, which may be its cause: followers show that first."""
        self._tell_news()
        self.tell(kind, **fields)

    def note(self, text: str) -> None:
        """Record something that its user should know."""
        self.tell("noted", text=text)

    def follow(self, cursor: int, timeout_s: float) -> list[dict[str, Any]]:
        """Return the events from number `cursor` on; wait up to `timeout_s` for the first of them."""
        return self._followed.follow(cursor, timeout_s)

    def enter(self, record: StepRecord) -> None:
        """Enter a step into the ledger. Raises `RunError` if the run's folder is gone, or another controller's."""
        try:
            self._outlets.enter(self._numbers.now, record)
        except FolderGone:
            # This check reports where the folder is.
            self.check_fence()
            raise

    def later(self, act: Callable[[], None], failing: str) -> None:
        """Write something on a thread, and again if that fails; `failing` is what to say then."""

        def write() -> None:
            self.check_fence()
            act()

        self._aside.later(write, failing)

    def when_durable(self, act: Callable[[], object], failing: str) -> None:
        """Make the events durable, on a thread, and call `act` there then; at once if the run has no folder yet.

        `failing`: what to say if that cannot be done.
        """
        if not self.opened:
            act()
            return

        def done() -> None:
            self._outlets.sync()
            act()

        self._aside.later(done, failing)

    def sync_later(self) -> None:
        """Make the events durable, on a thread."""
        self.when_durable(lambda: None, "the resumption cannot be made durable yet")

    def settle(self) -> None:
        """Make ledger and events durable, up to what is committed by now.

        Raises `OSError` if that fails, and `RunError` if another controller owns the run.
        """
        self.check_fence()
        self._outlets.settle()

    def data_changed(self, first: Mapping[str, str | int]) -> None:
        """Record that a data file's change ends the run; `first`: see `DataChanged`.

        Raises `RunError` if it cannot be written.
        """

        def write() -> None:
            self.check_fence()
            self._run.write(CHANGED, [json.dumps(first).encode() + b"\n"])

        self._last_writes.write(write, self._newest())

    def write_made(self, profile: Mapping[str, Any] | None, status: str) -> None:
        """Write what the run has made, before its last event, and finish the listeners: it ends with this status.

        Raises `RunError` if that cannot be written.
        """

        def made() -> None:
            self.check_fence()
            if profile is not None:
                self._run.write(f"{PROFILE}/summary.json", [json.dumps(profile, indent=1).encode() + b"\n"])
            # The listeners read the events.
            self._outlets.settle()

        self._last_writes.write(made, self._newest())
        self._outlets.finish_listeners(status, self._still_alive)
        self._tell_news(last=True)

    def write_result(self, result: Result) -> None:
        """Write the result, after everything else. Raises `RunError` if it cannot be written."""

        def over() -> None:
            self.check_fence()
            self._outlets.sync()
            result.save(self._run)

        self._last_writes.write(over, self._newest())

    def _still_alive(self) -> None:
        """Tell followers what the end of the run waits for, and that the run is alive."""
        self._tell_news()
        with contextlib.suppress(OSError):
            self._ownership.renew_at_once()

    def close(self) -> None:
        """Close what is open. What the storage does not take by now is lost, and logged."""
        self._aside.close()
        self._outlets.close(self._aside.say_once)
        try:
            self._ownership.release()
        except (OSError, FolderGone) as error:
            log.warning("the run's lease cannot be released; it expires by itself: %s", error)
