"""Record a run: write its events to its folder, serve them to followers, and add them up to a result."""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from raytrain_plus.controller.record.aside import Aside
from raytrain_plus.controller.record.event_feed import EventFeed
from raytrain_plus.controller.record.incidents import Incidents, Recovery
from raytrain_plus.controller.record.last_writes import LastWrites
from raytrain_plus.controller.record.ownership import Ownership
from raytrain_plus.controller.record.pending_steps import PendingSteps, optional_fields
from raytrain_plus.controller.record.run_writers import Outlets
from raytrain_plus.controller.record.stage_idle import Bubble, Drawing
from raytrain_plus.controller.record.totals import Totals
from raytrain_plus.controller.roster.clocks import Clocks
from raytrain_plus.controller.roster.roster import seated, who
from raytrain_plus.credentials import without_credentials
from raytrain_plus.errors import FolderGone
from raytrain_plus.membership.commits import Commits
from raytrain_plus.membership.view import View
from raytrain_plus.observe.gauges import Gauges
from raytrain_plus.observe.gpu_use import GpuUse, GpuUses
from raytrain_plus.observe.step_profile import Profiled, StepProfile
from raytrain_plus.observe.trackers.callbacks import Callbacks
from raytrain_plus.observe.trackers.trackers import Relay
from raytrain_plus.observe.views.picture import svg, trace
from raytrain_plus.result import RESULT, Result
from raytrain_plus.runs.folder import CHANGED, DATASET, JOB, PICTURE, PROFILE, TRACE, Fence
from raytrain_plus.runs.history import Past
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import Outages
from raytrain_plus.training.exchange.step_records import Record, Remark, StepRecord, in_order
from raytrain_plus.workers.messages import Export, Sent, WorkerLocation

log = logging.getLogger(__name__)


class Journal:
    """Written by the controller's loop; followed from other threads. Nothing is in the run's folder before `open`.

    During the run, no storage delays the loop: slow work is done on threads.
    """

    def __init__(
        self,
        run: Folder,
        batch_size: int,
        rows: int,
        end: tuple[int, int] | None,
        past: Past,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Prepare the journal of the run in this folder; nothing is written before `open`.

        `batch_size`: rows of a step; `rows`: rows of the data, which determine the epoch. `end`: if a job is given in
        epochs, its steps and all their rows. `past`: what the run resumes from. `clock`: Unix seconds.
        """
        self._base = past.generation + 1
        """The offset added to generations: earlier controllers of the run had some."""
        self._run = run
        self._end = end
        self._clock = clock
        self._batch_size = batch_size
        self._rows = rows
        self.outages = Outages()
        """Open storage failures; every writer of the run reports here."""
        self._ownership = Ownership(run, self.outages)
        self._last_writes = LastWrites(run, self.outages, self._still_alive)
        self._aside = Aside(run, self._ownership, self.outages)
        self._followed = EventFeed(
            lambda error: self._aside.say_once("events cannot be read back; trying again", error)
        )
        self._newest = max((found.step for found in past.found if found.manifest is not None), default=-1)
        """The step of the newest complete checkpoint; -1 if there is none."""
        self._renewing: Future[None] | None = None
        self._commits: Commits[StepRecord] = Commits(["nobody yet"], first_step=0)
        self._totals = Totals(past.recoveries, past.stall_s, past.skipped, past.rows_skipped)
        self.gauges = Gauges(self._totals)
        self._outlets = Outlets(run, clock, self._ownership, self.outages, self._followed, self.gauges)
        self._incidents = Incidents()
        self._bubble = Bubble()
        self._gathered = PendingSteps()
        self._gpus = GpuUses()
        self._profile = StepProfile()
        self._remarked: set[str] = set()
        """The keys of the remarks that are reported."""
        self._metrics: dict[int, Mapping[str, float]] = dict(past.metrics)
        self._locations: dict[str, WorkerLocation] = {}
        self._clocks = Clocks()
        self._members: tuple[str, ...] = ()
        self._waiting = ""
        self._generation = self._base
        self.evaluated = -2
        """The highest step whose evaluation was reported."""

    @property
    def generation(self) -> int:
        """The number that events, ledger and checkpoints carry now; it rises through all controllers of the run."""
        return self._generation

    def number(self, generation: int) -> int:
        """Return the number of one of this controller's generations."""
        return self._base + generation

    def begin_number(self, generation: int) -> int:
        """Begin a new number while the group's generation stays the same; return it.

        The group's later generations have higher ones.
        """
        self._base += 1
        self._generation = self.number(generation)
        return self._generation

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
        callbacks: Callbacks | None = None,
    ) -> None:
        """Begin writing to the run's folder.

        `dataset`: the description of the data (`Source.describe`); `controller`: its name on its cluster; `relays`: the
        receivers of metrics, in addition to TensorBoard; `callbacks`: call the task's methods that hear of the run.
        """
        run = self._run
        self._ownership.begin(fence, address, controller)
        run.remove(RESULT)
        run.write(JOB, [job_yaml.encode()])
        run.write(DATASET, [json.dumps(dataset, indent=1).encode() + b"\n"])
        started = {"job": job_yaml, "versions": dict(versions), "address": address}
        self._outlets.open(self._generation, started, relays, self.metrics, callbacks, self._before_entries)

    @property
    def opened(self) -> bool:
        """Whether the run has a folder."""
        return self._outlets.opened

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
        self._ownership.look(self._outlets.place, self._newest)

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
            self._tell(kind, **fields)
        for text in self._outlets.news():
            self.note(text)

    def follow(self, cursor: int, timeout_s: float) -> list[dict[str, Any]]:
        """Return the events from number `cursor` on; wait up to `timeout_s` for the first of them."""
        return self._followed.follow(cursor, timeout_s)

    def record_joined(self, location: WorkerLocation) -> None:
        """Record that a worker's process has started."""
        self._locations[location.worker] = location
        self._clocks.record_start(location.worker)

    def record_clock(self, worker: str, clock_s: float, asked: float, answered: float) -> None:
        """Record a worker's clock: see `Clocks.read`."""
        self._clocks.read(worker, clock_s, asked, answered)

    def on_our_clock(self, worker: str, time: float) -> float:
        """Return a time of that worker, in Unix seconds, by the controller's clock."""
        return time + self._clocks.offset(worker)

    def record_lost(self, worker: str, cause: str) -> None:
        """Record that a worker was lost."""
        self._incidents.record_lost(worker)
        location = self._locations.get(worker)
        if location is not None:
            self._tell("worker_lost", **who(location), cause=cause)

    def record_broken(self, now: float, cause: str, follows: bool = False) -> None:
        """Record that the group's world broke: see `Incidents.broke`."""
        self._incidents.broke(now, cause, follows)

    def report(self, worker: str, records: Sequence[Record]) -> None:
        """Record what a member of the current generation has applied, evaluated and measured."""
        steps = [record for record in records if isinstance(record, StepRecord)]
        moved = [self._clocks.ours(worker, record) for record in steps]
        for one in records:
            if isinstance(one, Profiled):
                self._profile.add(worker, one)
            elif isinstance(one, Remark):
                self._remark(one)
            elif isinstance(one, GpuUse):
                self.gauges.gpu(worker, one)
                self._gpus.add(worker, one)
        for record in steps:
            self.gauges.worked(worker, record)
            for remark in record.remarks:
                self._remark(remark)
            if record.step > self.committed:
                self._gathered.add(record)
            drawing = self._bubble.report(worker, record, self._clocks.offset(worker))
            if drawing is not None:
                self._draw(record.step, drawing)
        for told in in_order(self._commits.report(worker, moved), records):
            if isinstance(told, StepRecord):
                self._commit([told])
            elif told.step > self.evaluated:
                self.evaluated = told.step
                self._metrics[told.step] = dict(told.metrics)
                self._tell("evaluated", step=told.step, metrics=dict(told.metrics))

    def _remark(self, remark: Remark) -> None:
        """Report a remark, once."""
        if remark.key not in self._remarked:
            self._remarked.add(remark.key)
            self.note(remark.text)

    def regroup(self, now: float, members: Sequence[str], held: int, generation: int) -> None:
        """Begin a generation after all have left the last one; it continues from the state after step `held`."""
        self._incidents.left(now, max(0, self._commits.applied - held))
        self._commit(self._commits.regroup(members, held))
        # What its members commit before all have joined belongs to the new generation too.
        self._generation = self.number(generation)

    def go_back(
        self,
        step: int,
        generation: int,
        checkpoint: str | None,
        made: int,
        evaluated: int,
        *,
        fresh_rates: bool = False,
    ) -> None:
        """Continue in this generation from the state after `step`, though steps up to `made` were committed.

        `checkpoint`: its name; None if a worker still held that state, or if it is the initial one. `fresh_rates`: see
        `Plan`.
        """
        self._generation = self.number(generation)
        self._incidents.forgot(made - step)
        self._commits = Commits(["nobody yet"], first_step=step + 1)
        self._gathered.clear()
        self._totals.back_to(step, self.samples(step), made)
        self.evaluated = evaluated
        self._metrics = {at: metrics for at, metrics in self._metrics.items() if at <= step}
        self._newest = min(self._newest, step)
        fresh = {"fresh_rates": True} if fresh_rates else {}
        self._tell("resumed", step=step, checkpoint=checkpoint, voided_to=made, **fresh)
        if self.opened:
            # The next checkpoint waits for it in any case.
            self._aside.later(self._outlets.sync, "the resumption cannot be made durable yet")

    def record_copies(self, sent: Iterable[Sent]) -> None:
        """Record that the state after a step is in memory twice: these are the copies."""
        self._totals.copied(list(sent))

    def settle(self) -> None:
        """Make ledger and events durable, up to what is committed by now.

        Raises `OSError` if that fails, and `RunError` if another controller owns the run.
        """
        self.check_fence()
        self._outlets.settle()

    def record_saved(self, step: int, seconds: float, stall_s: float, name: str) -> None:
        """Record a complete checkpoint of `step`; it took `seconds`, and held the training up for `stall_s`."""
        self._newest = max(self._newest, step)
        self._tell("checkpoint_saved", step=step, seconds=seconds, stall_s=stall_s, checkpoint=name)

    def not_saved(self, step: int, error: str) -> None:
        """Record that a checkpoint was not saved, or cannot be used."""
        # The cause comes first: followers do not show it again.
        self._tell_news()
        self._tell("checkpoint_failed", step=step, error=error)

    def record_saving(self, step: int, written: int, total: int, per_s: float | None) -> None:
        """Record how far the last writes of the run are, in bytes; the state is that after `step`."""
        self._tell("saving", step=step, written=written, total=total, per_s=per_s)

    def metrics(self, step: int) -> Mapping[str, float]:
        """Return the evaluation metrics of the state after `step`; empty if it was not evaluated."""
        return self._metrics.get(step, {})

    @property
    def history(self) -> Mapping[int, Mapping[str, float]]:
        """The metrics of all evaluations that count, by step."""
        return dict(self._metrics)

    def samples(self, step: int) -> int:
        """Return the number of rows in all steps up to `step`."""
        if self._end is not None and step == self._end[0] - 1:
            return self._end[1]
        return (step + 1) * self._batch_size

    def record_formed(
        self, now: float, view: View, params: Mapping[str, int], spares: Sequence[str], collective: str, form_s: float,
        moved_bytes: int, repartitioned: bool = False, optimizer_bytes: Mapping[str, int] = MappingProxyType({}),
        slices: int = 1,
    ) -> None:  # fmt: skip
        """Record that all members of a new generation are in their worlds and have the state.

        `params`: how many parameters each member trains. `moved_bytes`: of the state, what came from other workers.
        `repartitioned`: `parallel.partition` is for more stages. `optimizer_bytes`, `slices`: see
        `roster.seated`.
        """
        self._generation = self.number(view.generation)
        self._waiting = ""
        self._bubble.formed(view)
        before, self._members = self._members, tuple(member.worker for member in view.members)
        if before:
            for name in self._members:
                if name not in before:
                    self._tell("worker_joined", **who(self._locations[name]))
            if len(before) != len(self._members):
                self._tell("rescaled", **{"from": len(before), "to": len(self._members)})
        self._tell(
            "view_formed",
            members=seated(view, self._locations, params, optimizer_bytes, slices),
            spares=list(spares),
            collective=collective if len(view.members) > 1 else "none (one worker)",
            moved_bytes=moved_bytes,
            **({"cause": cause} if (cause := self._incidents.last_world) else {}),
            **({"repartitioned": True} if repartitioned else {}),
        )
        self._incidents.joined(now, {name: who(self._locations[name]) for name in self._members}, form_s)

    def record_wait(self, what: str) -> None:
        """Record that the run waits for something."""
        self._incidents.waits(self._clock())
        if what != self._waiting:
            self._waiting = what
            self._tell("waiting", **{"for": what})

    def note(self, text: str) -> None:
        """Record something that its user should know."""
        self._tell("noted", text=text)

    def will_leave(self, node: str, deadline: float | None) -> None:
        """Record that a node that hosts workers will leave; `deadline` in Unix seconds."""
        self._tell("drain_notice", node=node, deadline=deadline)

    def data_changed(self, first: Mapping[str, str | int]) -> None:
        """Record that a data file's change ends the run; `first`: see `DataChanged`.

        Raises `RunError` if it cannot be written.
        """

        def write() -> None:
            self.check_fence()
            self._run.write(CHANGED, [json.dumps(first).encode() + b"\n"])

        self._last_writes.write(write, self._newest)

    def finish(
        self,
        name: str,
        status: str,
        error: str | None,
        export: Export | None,
        began: float,
        unsaved: str | None = None,
        stopped_early: str | None = None,
    ) -> Result:
        """End the run: write its last event and its result, if it has a folder, and return the result.

        `unsaved`: why the state that a stopped run ends with was not saved, if it was not. `stopped_early`: why a
        finished run ends before its last step, if it does.

        The result is written last: if it exists, nothing of the run is missing, and nobody continues the run.

        Raises `RunError` if the result cannot be written, or if another controller owns the run by now.
        """
        error = error and without_credentials(error)
        if status == "finished":
            self._recovered(self._incidents.ended(self._clock()))
        result = self._totals.result(
            name=name,
            status=status,
            path=self._run.path or self._run.address,
            metrics=self._metrics[max(self._metrics)] if self._metrics else {},
            state_sha256=export.state_sha256 if export else None,
            error=error,
            show=export.show if export else None,
            began=began,
            bubble=self._bubble.share,
            ended=self._clock(),
        )
        saved = None if self._newest < 0 else self._newest
        profile = self._profile.to_json(self.committed)
        result = replace(result, saved_step=saved, unsaved=unsaved, stopped_early=stopped_early, profile=profile)
        if export is not None:
            result = replace(result, model_step=export.step, model_metrics=self.metrics(export.step))
        if self.opened:
            self._write_end(result)
        return result

    def _write_end(self, result: Result) -> None:
        """Write what the run has made, then its last event, and then its result."""

        def made() -> None:
            self.check_fence()
            if result.profile is not None:
                self._run.write(f"{PROFILE}/summary.json", [json.dumps(result.profile, indent=1).encode() + b"\n"])
            # The task's callbacks read the events.
            self._outlets.settle()

        def over() -> None:
            self.check_fence()
            self._outlets.sync()
            result.save(self._run)

        self._last_writes.write(made, self._newest)
        self._outlets.finish_callbacks(self._still_alive)
        self._tell_news(last=True)
        self._tell(
            "run_finished",
            status=result.status,
            error=result.error,
            steps=result.steps,
            samples=result.samples,
            state_sha256=result.state_sha256,
            saved_step=result.saved_step,
            unsaved=result.unsaved,
        )
        self._last_writes.write(over, self._newest)

    def _draw(self, step: int, drawing: Drawing) -> None:
        title = f"step {step + 1}, generation {self._generation}"

        def draw() -> None:
            self.check_fence()
            self._run.write(PICTURE, [svg(drawing, title).encode()])
            self._run.write(TRACE, [json.dumps(trace(drawing)).encode() + b"\n"])

        self._aside.later(draw, "the picture of a step cannot be written")

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

    def _commit(self, records: Iterable[StepRecord]) -> None:
        for record in records:
            record = self._gathered.whole(record)
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
                **optional_fields(record),
                **self._gpus.fields(self._members, self._clock()),
            )
            self._recovered(self._incidents.committed(record.time))

    def _enter(self, record: StepRecord) -> None:
        """Enter a step into the ledger. Raises `RunError` if the run's folder is gone, or another controller's."""
        try:
            self._outlets.enter(self._generation, record)
        except FolderGone:
            # This check reports where the folder is.
            self.check_fence()
            raise

    def _recovered(self, recovery: Recovery | None) -> None:
        if recovery is None:
            return
        self._totals.recovered(recovery.stall_s)
        self._tell("recovered", **asdict(recovery))

    def _tell(self, kind: str, time_s: float | None = None, /, **fields: Any) -> None:
        self._outlets.tell(kind, self._generation, time_s, fields)
