"""What a run tells: its events, in its folder and for who follows it, and what they add up to."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from raytrain_plus.controller.bubble import Bubble, Drawing
from raytrain_plus.controller.incidents import Incidents, Recovery
from raytrain_plus.controller.totals import Totals
from raytrain_plus.credentials import hide_credentials, without_credentials
from raytrain_plus.data.parts import Parts
from raytrain_plus.errors import FolderGone, RunError, StorageError
from raytrain_plus.membership.commits import Commits
from raytrain_plus.membership.view import View
from raytrain_plus.observe.events import EventLog
from raytrain_plus.observe.gauges import Gauges
from raytrain_plus.observe.picture import svg, trace
from raytrain_plus.observe.trackers import Relay, Trackers
from raytrain_plus.result import RESULT, Result
from raytrain_plus.runs.folder import (
    CHANGED,
    DATASET,
    JOB,
    LEASE_BYTES,
    PICTURE,
    TRACE,
    Fence,
    Lease,
    resume_command,
)
from raytrain_plus.runs.history import Past
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import Outage, Outages, outage_of
from raytrain_plus.storage.retry import LAST_PAUSES_S, tried
from raytrain_plus.training.records import Evaluated, StepRecord
from raytrain_plus.workers.messages import Export, Place, Sent

log = logging.getLogger(__name__)

KEPT = 1_000
"""Events kept in memory, at least: 1 MB. Whoever follows from further back gets them out of the folder,"""
READ_BACK = 10_000
"""so many at a time."""


class Journal:
    """Written by the controller's loop; followed from other threads. Nothing is in the run's folder before `open`.

    While the run goes on, no storage holds the loop up: what takes a while is done on threads.
    """

    def __init__(self, run: Folder, batch_size: int, rows: int, end: tuple[int, int] | None, past: Past) -> None:
        """`run`: its folder; `batch_size`: rows of a step; `rows`: rows of the data, which tell the epoch.

        `end`: where a job is given in epochs, its steps and all their rows. `past`: what the run goes on from.
        """
        self.base = past.generation + 1
        """What is added to generations: earlier controllers of the run had some."""
        self._run = run
        self._end = end
        self._batch_size = batch_size
        self._rows = rows
        self._news = threading.Condition()
        self._told: list[dict[str, Any]] = []
        self._dropped = 0
        self._early: list[dict[str, Any]] = []
        self.outages = Outages()
        """What the storage does not take; every writer of the run reports here."""
        self._gave_up = False
        """Whether the storage was waited for at the end, in vain."""
        self._fence: Fence | None = None
        self._overtaken = ""
        self._newest = max((found.step for found in past.found if found.manifest is not None), default=-1)
        """The step of the newest complete checkpoint; -1 if there is none."""
        self._lease: Lease | None = None
        # The lease is renewed even while ledger and events are being written.
        self._aside = ThreadPoolExecutor(max_workers=2, thread_name_prefix="journal")
        self._renewing: Future[None] | None = None
        self._log: EventLog | None = None
        self._parts: Parts | None = None
        self._trackers: Trackers | None = None
        self._commits: Commits[StepRecord] = Commits(["nobody yet"], first_step=0)
        self._totals = Totals()
        self.gauges = Gauges(self._totals)
        self._incidents = Incidents()
        self._bubble = Bubble()
        self._waited: dict[int, float] = {}
        """Of steps that are not committed: the longest that any member waited for data."""
        self._figures: dict[int, Mapping[str, float]] = dict(past.figures)
        self._places: dict[str, Place] = {}
        self._offsets: dict[str, float] = {}
        self._members: tuple[str, ...] = ()
        self._waiting = ""
        self.generation = self.base
        self.evaluated = -2
        """The highest step whose evaluation has been heard of."""

    @property
    def committed(self) -> int:
        """The highest step that is committed; -1 before any."""
        return self._commits.next_step - 1

    def open(
        self,
        fence: Fence,
        job_yaml: str,
        versions: Mapping[str, str],
        address: str,
        dataset: Mapping[str, Any],
        controller: str = "",
        relays: Sequence[Relay] = (),
    ) -> None:
        """Begins in the run's folder. `dataset`: what the data is, as in `Index.to_json`; `controller`: its name on its
        cluster; `relays`: who is told of figures, beside TensorBoard."""
        run = self._run
        self._fence = fence
        self._lease = Lease(run, address, controller)
        self._lease.renew()
        run.remove(RESULT)
        run.write(JOB, [job_yaml.encode()])
        run.write(DATASET, [json.dumps(dataset, indent=1).encode() + b"\n"])
        self._log = EventLog(run, outages=self.outages)
        self._parts = Parts(run, self._before_entries, self.outages)
        self._trackers = Trackers(run, relays, self.outages)
        early, self._early = self._early, []
        self._tell("run_started", job=job_yaml, versions=dict(versions), address=address)
        for event in early:
            kind, moment = event.pop("kind"), event.pop("time")
            event.pop("generation")
            self._log.write(kind, generation=self.generation, time=moment, fields=event)

    @property
    def opened(self) -> bool:
        """Whether the run has a folder."""
        return self._log is not None

    def renew(self) -> None:
        """Says that the run is alive. Raises `RunError` where it belongs to somebody else by now."""
        if self._overtaken:
            raise RunError(self._overtaken)
        self._tell_of_outages()
        if self._lease is None or not self._lease.due or not (self._renewing is None or self._renewing.done()):
            return
        lease = self._lease

        def renewed() -> None:
            self.check_fence()
            with self.outages.watching("lease", self._run, lambda: LEASE_BYTES):
                lease.renew()

        self._renewing = self._later(renewed, "the run's lease cannot be renewed; trying again")

    def check_fence(self) -> None:
        """Raises `RunError` where another controller has taken the run over; nothing is written from then on."""
        self._look_for_another()
        if self._overtaken:
            for opened in (self._trackers, self._parts, self._log):
                if opened is not None:
                    opened.abandon()
            raise RunError(self._overtaken)

    def _look_for_another(self) -> None:
        holder = None if self._fence is None else self._fence.overtaken()
        if holder is not None:
            self._overtaken = self._gone() or (
                f"another controller has taken this run over ({holder}); this one stops and writes no more"
            )

    def _gone(self) -> str:
        """What is said if the run's folder is not where it was; empty if it is."""
        assert self._fence is not None
        was, now = self._run.path, None if self._log is None else self._log.place()
        moved = was is not None and now is not None and now.parent != Path(os.path.realpath(was))
        if not moved and not self._fence.gone:
            return ""
        kept = f"the checkpoint after step {self._newest + 1}" if self._newest >= 0 else "no checkpoint"
        stops = "the run stops and writes no more"
        if moved:
            assert now is not None
            return (
                f"the run's folder {was} was moved to {now.parent}: {stops}. It holds {kept}; to continue there: "
                f"{resume_command(now.parent)}"
            )
        return (
            f"the run's folder {self._run.where} was moved or removed: {stops}. It held {kept}; to continue, if it "
            "lies elsewhere now: raytrain resume FOLDER"
        )

    def _before_entries(self) -> None:
        """Comes before anything is entered into the ledger.

        A resumption is durable first: what it makes void and what takes its place would both count, otherwise. Raises
        `OSError` where it cannot be made so, `RunError` where the run belongs to somebody else.
        """
        self._look_for_another()
        if self._overtaken:
            # Who writes the ledger cannot be the one to end its writing.
            raise RunError(self._overtaken)
        assert self._log is not None
        self._log.sync()

    def _later(self, act: Callable[[], None], failing: str) -> Future[None]:
        """Does something on a thread. Where the storage fails - a full disk, say - the training goes on."""

        def done() -> None:
            try:
                act()
            except OSError as error:
                self._say_once(failing, error)
            except RunError as error:
                # The loop ends the run with it.
                log.info("%s", self._overtaken or error)
            except Exception:
                log.exception("%s", failing)

        return self._aside.submit(done)

    def _say_once(self, failing: str, error: OSError) -> None:
        """Logs a failure of the storage in one line, unless its cause is reported already."""
        if not self.outages.knows(outage_of(error, self._run)):
            log.warning("%s: %s", failing, error)

    def _tell_of_outages(self, last: bool = False) -> None:
        for kind, fields in self.outages.news(last):
            self._tell(kind, **fields)

    def follow(self, cursor: int, timeout_s: float) -> list[dict[str, Any]]:
        """The events from number `cursor` on; waits up to `timeout_s` for the first of them."""
        with self._news:
            self._news.wait_for(lambda: self._dropped + len(self._told) > cursor, timeout_s)
            if cursor >= self._dropped or self._log is None:
                return self._told[max(0, cursor - self._dropped) :]
            until = min(self._dropped, cursor + READ_BACK)
        try:
            events = list(itertools.islice(self._log.read(), cursor, until))
        except OSError as error:
            self._say_once("events cannot be read back; trying again", error)
            events = []
        if not events:
            # They are still to be written.
            time.sleep(timeout_s)
        return events

    def came(self, place: Place) -> None:
        """A worker is there."""
        self._places[place.worker] = place
        self._offsets[place.worker] = 0.0

    def clocked(self, worker: str, clock_s: float, asked: float, answered: float) -> None:
        """A worker, asked at one moment, said `clock_s`; its answer came at another. All in Unix seconds."""
        # On one machine the clocks are one; between machines this is right to the length of the call.
        offset = (asked + answered) / 2 - clock_s
        self._offsets[worker] = offset if abs(offset) > answered - asked else 0.0

    def gone(self, worker: str, cause: str) -> None:
        """A worker was lost."""
        self._incidents.gone(worker)
        place = self._places.get(worker)
        if place is not None:
            self._tell("worker_lost", **_who(place), cause=cause)

    def broke(self, now: float, cause: str) -> None:
        """The group's world is broken."""
        self._incidents.broke(now, cause)

    def report(self, worker: str, records: Iterable[StepRecord | Evaluated]) -> None:
        """Takes what a member of the present generation has applied and evaluated."""
        records = list(records)
        steps = [record for record in records if isinstance(record, StepRecord)]
        moved = [_on_our_clock(record, self._offsets[worker]) for record in steps]
        for record in steps:
            self.gauges.worked(worker, record)
            if record.step > self.committed:
                self._waited[record.step] = max(record.waited_s, self._waited.get(record.step, 0.0))
            drawing = self._bubble.report(worker, record, self._offsets[worker])
            if drawing is not None:
                self._draw(record.step, drawing)
        self._commit(self._commits.report(worker, moved))
        for told in records:
            if isinstance(told, Evaluated) and told.step > self.evaluated:
                self.evaluated = told.step
                self._figures[told.step] = dict(told.metrics)
                self._tell("evaluated", step=told.step, metrics=dict(told.metrics))

    def regroup(self, now: float, members: Sequence[str], held: int, generation: int) -> None:
        """All are out of the last generation; `held` is the step that goes on, in this one."""
        self._incidents.left(now, max(0, self._commits.applied - held))
        self._commit(self._commits.regroup(members, held))
        # What its members commit before all have joined is of the new one, too.
        self.generation = self.base + generation

    def go_back(self, step: int, generation: int, checkpoint: str | None, made: int, evaluated: int) -> None:
        """The run goes on, in this generation, from the state after `step`, though steps up to `made` were committed.

        `checkpoint`: its name; None where a worker still held that state, or it is the initial one.
        """
        self.generation = self.base + generation
        self._incidents.forgot(made - step)
        self._commits = Commits(["nobody yet"], first_step=step + 1)
        self._waited.clear()
        self._totals.back_to(step, self.samples(step), made)
        self.evaluated = evaluated
        self._figures = {at: figures for at, figures in self._figures.items() if at <= step}
        self._newest = min(self._newest, step)
        self._tell("resumed", step=step, checkpoint=checkpoint, voided_to=made)
        if self._log is not None:
            # The next checkpoint waits for it in any case.
            self._later(self._log.sync, "the resumption cannot be made durable yet")

    def copied(self, sent: Iterable[Sent]) -> None:
        """The state after a step is in memory twice: these are the copies."""
        self._totals.copied(list(sent))

    def settle(self) -> None:
        """Makes ledger and events durable, up to what is committed by now. Raises `OSError` where it cannot, and
        `RunError` where the run belongs to somebody else."""
        self.check_fence()
        parts, log = self._parts, self._log
        assert parts is not None
        assert log is not None
        parts.flush()
        log.sync()

    def saved(self, step: int, seconds: float, stall_s: float) -> None:
        """There is a complete checkpoint of `step`; it took so long, and held the training up for `stall_s`."""
        self._newest = step
        self._tell("checkpoint_saved", step=step, seconds=seconds, stall_s=stall_s)

    def not_saved(self, step: int, error: str) -> None:
        """There is none, or not one that can be used."""
        # The cause comes first: who follows does not show it again.
        self._tell_of_outages()
        self._tell("checkpoint_failed", step=step, error=error)

    def figures(self, step: int) -> Mapping[str, float]:
        """Held-out figures of the state after `step`; none where it was not evaluated."""
        return self._figures.get(step, {})

    def samples(self, step: int) -> int:
        """Rows in all steps up to `step`."""
        if self._end is not None and step == self._end[0] - 1:
            return self._end[1]
        return (step + 1) * self._batch_size

    def formed(
        self, now: float, view: View, params: Mapping[str, int], spares: Sequence[str], collective: str, form_s: float
    ) -> None:
        """All members of a new generation are in their worlds and have the state; `params`: how many each trains."""
        self.generation = self.base + view.generation
        self._waiting = ""
        self._bubble.formed(view)
        before, self._members = self._members, tuple(member.worker for member in view.members)
        if before:
            for name in self._members:
                if name not in before:
                    self._tell("worker_joined", **_who(self._places[name]))
            if len(before) != len(self._members):
                self._tell("rescaled", **{"from": len(before), "to": len(self._members)})
        self._tell(
            "view_formed",
            members=[
                {
                    **_who(self._places[member.worker]),
                    "cell": member.cell,
                    "stage": member.stage,
                    "params": params[member.worker],
                    "shards": list(member.shards),
                }
                for member in view.members
            ],
            spares=list(spares),
            collective=collective if len(view.members) > 1 else "none (one worker)",
        )
        self._incidents.joined(now, {name: _who(self._places[name]) for name in self._members}, form_s)

    def waits(self, what: str) -> None:
        """The run waits for something."""
        if what != self._waiting:
            self._waiting = what
            self._tell("waiting", **{"for": what})

    def will_leave(self, node: str, deadline: float | None) -> None:
        """A node that hosts workers will go; `deadline` in Unix seconds."""
        self._tell("drain_notice", node=node, deadline=deadline)

    def data_changed(self, first: Mapping[str, str | int]) -> None:
        """A data file's change ends the run; `first`: see `DataChanged`. Raises `RunError` if it cannot be written."""

        def write() -> None:
            self.check_fence()
            self._run.write(CHANGED, [json.dumps(first).encode() + b"\n"])

        self._at_last(write)

    def finish(self, name: str, status: str, error: str | None, export: Export | None, began: float) -> Result:
        """The run is over: its last event and its result, in its folder where it has one.

        The result is the last that is written: where it is, nothing of the run is missing, and nobody goes on with it.

        Raises `RunError` where that cannot be written, or belongs to somebody else by now.
        """
        error = error and without_credentials(error)
        if status == "finished":
            self._recovered(self._incidents.ended(time.time()))
        sha = export.state_sha256 if export else None
        result = self._totals.result(
            name=name,
            status=status,
            path=self._run.path or self._run.address,
            metrics=self._figures[max(self._figures)] if self._figures else {},
            state_sha256=sha,
            error=error,
            show=export.show if export else None,
            began=began,
            bubble=self._bubble.share,
        )
        told, parts = self._log, self._parts
        if told is None or parts is None:
            return result

        def made() -> None:
            self.check_fence()
            parts.flush()

        def over() -> None:
            self.check_fence()
            told.sync()
            result.save(self._run)

        self._at_last(made)
        self._tell_of_outages(last=True)
        self._tell(
            "run_finished",
            status=status,
            error=error,
            steps=self._totals.steps,
            samples=self._totals.samples,
            state_sha256=sha,
        )
        self._at_last(over)
        return result

    def _draw(self, step: int, drawing: Drawing) -> None:
        title = f"step {step + 1}, generation {self.generation}"

        def draw() -> None:
            self.check_fence()
            self._run.write(PICTURE, [svg(drawing, title).encode()])
            self._run.write(TRACE, [json.dumps(trace(drawing)).encode() + b"\n"])

        self._later(draw, "the picture of a step cannot be written")

    def _at_last(self, write: Callable[[], None]) -> None:
        """Writes a part of the end. The storage is waited for once, for half a minute.

        Raises `RunError` where it does not take it.
        """
        outages: list[Outage] = []

        def failed(error: OSError) -> None:
            outages[:] = [outage_of(error, self._run)]
            # Who follows hears it while this waits, and that the run is alive.
            self.outages.failed("end", outages[0])
            self._tell_of_outages()
            if self._lease is not None:
                with contextlib.suppress(OSError):
                    self._lease.renew()

        try:
            tried(write, () if self._gave_up else LAST_PAUSES_S, failed)
        except StorageError as failure:
            self._gave_up = True
            kept = f"the checkpoint after step {self._newest + 1} is" if self._newest >= 0 else "no checkpoint is"
            raise RunError(
                f"the end of the run cannot be written: {outages[0]}, tried for {sum(LAST_PAUSES_S):.0f} s. In "
                f"{self._run.where} {kept} kept; when there is room: "
                f"{resume_command(self._run)}"
            ) from failure
        self.outages.worked("end")

    def close(self) -> None:
        """Closes what is open. What the storage does not take by now is lost, and said so."""
        self._aside.shutdown()
        for opened in (self._parts, self._log, self._trackers):
            try:
                if opened is not None:
                    opened.close()
            except OSError as error:
                self._say_once(f"the end of {type(opened).__name__} cannot be written", error)
            except RunError as error:
                log.warning("the end of %s is not written: %s", type(opened).__name__, self._overtaken or error)
        try:
            if self._lease is not None and not self._overtaken:
                self._lease.release()
        except (OSError, FolderGone) as error:
            log.warning("the run's lease cannot be given up; it ends by itself: %s", error)

    def _commit(self, records: Iterable[StepRecord]) -> None:
        for record in records:
            # Where the model is in stages, those that read no data do not wait for it.
            record = replace(record, waited_s=self._waited.pop(record.step, record.waited_s))
            self._enter(record)
            self._totals.add(record)
            self._tell(
                "step_committed",
                record.time,
                step=record.step,
                epoch=record.step * self._batch_size // self._rows,
                samples=record.rows,
                loss=record.loss,
                grad_norm=record.grad_norm,
                seconds=record.seconds,
                **({"skipped": True} if record.skipped else {}),
            )
            self._recovered(self._incidents.committed(record.time))

    def _enter(self, record: StepRecord) -> None:
        """Enters a step into the ledger. Raises `RunError` where the run's folder is gone, or another's."""
        if self._parts is None:
            return
        try:
            self._parts.add(self.generation, record.step, record.notes)
        except FolderGone:
            # This says where it is.
            self.check_fence()
            raise

    def _recovered(self, recovery: Recovery | None) -> None:
        if recovery is None:
            return
        self._totals.recovered(recovery.stall_s)
        self._tell(
            "recovered",
            cause=recovery.cause,
            stall_s=recovery.stall_s,
            steps_lost=recovery.steps_lost,
            steps_recomputed=recovery.steps_recomputed,
            kept=list(recovery.kept),
            replaced=list(recovery.replaced),
            phases=dict(recovery.phases),
        )

    def _tell(self, kind: str, time_s: float | None = None, /, **fields: Any) -> None:
        # Words of Ray's and of the task's are among them, and followers see them as they are here.
        fields = hide_credentials(fields)
        if self._log is None or self._trackers is None or self._overtaken:
            event = {"time": time.time(), "generation": self.generation, "kind": kind, **fields}
            self._early.append(dict(event))
        else:
            event = self._log.write(kind, generation=self.generation, time=time_s, fields=fields)
            self._trackers.add(event)
        self.gauges.add(event)
        with self._news:
            self._told.append(event)
            if len(self._told) > 2 * KEPT:
                del self._told[:KEPT]
                self._dropped += KEPT
            self._news.notify_all()


def _on_our_clock(record: StepRecord, offset_s: float) -> StepRecord:
    """The record with its moment on the controller's clock."""
    return replace(record, time=record.time + offset_s) if offset_s else record


def _who(place: Place) -> dict[str, Any]:
    return {"worker": place.worker, "pid": place.pid, "node": place.node}
