"""Record what happens to a run: which steps are committed, what that adds up to, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from raytrain_plus.controller.record.generation_numbers import GenerationNumbers
from raytrain_plus.controller.record.journal import Beginning, Journal
from raytrain_plus.controller.record.listeners import Listeners
from raytrain_plus.controller.record.reports import Reports
from raytrain_plus.controller.record.sums.incidents import Incidents, Recovery
from raytrain_plus.controller.record.sums.lacking_steps import KeptRecords, LackingSteps, lacking_steps
from raytrain_plus.controller.record.sums.pending_steps import optional_fields
from raytrain_plus.controller.record.sums.totals import Totals
from raytrain_plus.controller.roster.roster import seated, who
from raytrain_plus.credentials import without_credentials
from raytrain_plus.membership.commits import Commits
from raytrain_plus.membership.view import View, form_view
from raytrain_plus.observe.gauges import Gauges
from raytrain_plus.result import Result
from raytrain_plus.runs.folder import Fence
from raytrain_plus.runs.history import Past, entered_to
from raytrain_plus.storage.interface import Folder
from raytrain_plus.training.exchange.step_records import Evaluated, Record, StepRecord, in_order
from raytrain_plus.workers.messages import Charter, Export, Sent


@dataclass(frozen=True, slots=True)
class FormedGroup:
    """A generation whose members are all in their worlds."""

    view: View
    spares: Sequence[str]
    collective: str
    params: Mapping[str, int]
    """How many parameters each member trains."""
    form_s: float
    """Seconds that the slowest member took to form its worlds."""
    moved_bytes: int
    """Of the state, what came from other workers."""
    repartitioned: bool = False
    """Whether `parallel.partition` is for more stages."""
    optimizer_bytes: Mapping[str, int] = field(default_factory=dict)
    """See `roster.seated`."""
    slices: int = 1
    """See `roster.seated`."""


class RunRecord:
    """Everything about a run that is reported in events, added up in its result, or asked for on the way."""

    def __init__(
        self,
        run: Folder,
        batch_size: int,
        rows: int,
        end: tuple[int, int] | None,
        past: Past,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begin the record of the run in this folder, to which nothing is written before `open`.

        `batch_size`: rows of a step; `rows`: rows of the data, which determine the epoch. `end`: if a job is given in
        epochs, its steps and all their rows. `past`: what the run resumes from. `clock`: Unix seconds.
        """
        self._run, self._end, self._past, self._clock = run, end, past, clock
        self._batch_size, self._rows = batch_size, rows
        self.numbers = GenerationNumbers(past.generation + 1)
        """What events, ledger and checkpoints carry."""
        self._totals = Totals(past.recoveries, past.stall_s, past.skipped, past.rows_skipped)
        self.gauges = Gauges(self._totals)
        self._newest = max((found.step for found in past.found if found.manifest is not None), default=-1)
        """The step of the newest complete checkpoint; -1 if there is none."""
        self.journal = Journal(run, self.numbers, self.gauges, clock, lambda: self._newest)
        self.reports = Reports(run, self.journal, self.gauges)
        self._commits: Commits[StepRecord] = Commits(["nobody yet"], first_step=0)
        self._incidents = Incidents()
        self._metrics: dict[int, Mapping[str, float]] = dict(past.metrics)
        self._members: tuple[str, ...] = ()
        self._waiting = ""
        self.evaluated = -2
        """The highest step whose evaluation was reported."""
        self._resumptions: list[tuple[int, int]] = []
        """(number, step) of each time that this controller's group has gone back."""
        self._told_to = self._entered_to = -1
        """The highest steps that a dead controller has told, and entered into the ledger, if the group goes on."""
        self._over = ""
        """The status of the `run_finished` that is told already."""

    def open(self, fence: Fence, beginning: Beginning, listeners: Listeners | None = None) -> None:
        """Begin writing to the run's folder: see `Journal.open`."""
        self.journal.open(fence, beginning, lambda: self.history, listeners)

    def adopt(
        self,
        fence: Fence,
        beginning: Beginning,
        listeners: Listeners | None,
        charter: Charter,
        records: KeptRecords,
    ) -> None:
        """Continue the record of a dead controller of the same start of the run, as if this one had written it.

        `charter`: that of the newest generation; `records`: what each worker that can say so has kept. `reports` knows
        the locations and clocks of these. If `Past.formed` is lower than the charter's number, `formed` is to be called
        once the members have joined; else it has been.
        Raises `StepsLost` before anything is written if neither the folder nor a worker has a committed step.
        """
        past, group = self._past, charter.group
        lacks = lacking_steps(past, entered_to(self._run, past), charter, records)
        self.numbers.adopt(group.generation, max(charter.number, past.generation))
        self._totals.adopt(past.sums, past.committed, self.samples)
        self._told_to, self._entered_to = lacks.told, lacks.entered
        self.evaluated, self.reports.noted, self._over = past.evaluated, past.noted, past.over
        if past.formed >= 0:
            formed = [{field: member[field] for field in ("worker", "pid", "node")} for member in past.members]
            self._members = tuple(member["worker"] for member in formed)
            self._incidents.adopt(dict(zip(self._members, formed, strict=True)), past.last_time or None)
            self.gauges.adopt(past.members, past.formed)
        kept = (charter.number, lacks.told), (charter.number, lacks.entered)
        self.journal.adopt(fence, beginning, past, kept, lambda: self.history, listeners)
        if lacks.back:
            self._went_back(charter)
        self._complete(lacks)
        self._commits = Commits(group.seats, first_step=lacks.to + 1)
        self.reports.formed(form_view(group.generation, group.seats, group.shape, group.limits.sizes.shards))
        for member in group.seats:
            self.report(member, lacks.further.get(member, ()))

    def take_up(self, fence: Fence, beginning: Beginning) -> None:
        """Open the record of a dead controller only to end the run: what it lacks stays missing."""
        past = self._past
        self.numbers.now = max(past.generation, 0)
        self._totals.adopt(past.sums, past.committed, self.samples)
        self.reports.noted, self._over = past.noted, past.over
        newest = past.recorded, past.committed
        self.journal.adopt(fence, beginning, past, (newest, newest), lambda: self.history, None)

    def _went_back(self, charter: Charter) -> None:
        """Record that the group went back when it formed this generation: the dead controller could not write it."""
        past, step = self._past, charter.first_step - 1
        found = (one.name for one in past.found if one.step == step and one.manifest is not None)
        evaluated = max((at for at in past.metrics if at <= step), default=-2)
        self.go_back(step, charter.group.generation, next(found, None), past.committed, evaluated)

    def _complete(self, lacks: LackingSteps) -> None:
        """Write the committed steps and the evaluations that the record lacks."""
        now, before = self.numbers.now, min(lacks.told, lacks.entered)
        for number, told in lacks.missing:
            self.numbers.now = number
            if isinstance(told, Evaluated):
                self._evaluate(told)
            else:
                self._commit([self.reports.take(worker, [told[worker]], before)[0] for worker in told][-1:])
        self.numbers.now = now

    @property
    def committed(self) -> int:
        """The highest step that is committed; -1 before any."""
        return max(self._commits.next_step - 1, self._told_to)

    @property
    def durable(self) -> int:
        """The highest step that is in events and ledger if this process is killed now; -1 without any.

        An evaluation of that step, which is reported later, may not be.
        """
        return min(
            min([step, *(start for later, start in self._resumptions if number < later)])
            for number, step in self.journal.kept
        )

    def lost(self, worker: str, cause: str) -> None:
        """Record that a worker was lost."""
        self._incidents.record_lost(worker)
        location = self.reports.locations.get(worker)
        if location is not None:
            self.journal.tell("worker_lost", **who(location), cause=cause)

    def broken(self, now: float, cause: str, follows: bool = False) -> None:
        """Record that the group's world broke: see `Incidents.broke`."""
        self._incidents.broke(now, cause, follows)

    def report(self, worker: str, records: Sequence[Record]) -> None:
        """Record what a member of the current generation has applied, evaluated and measured."""
        moved = self.reports.take(worker, records, self.committed)
        for told in in_order(self._commits.report(worker, moved), records):
            if isinstance(told, StepRecord):
                self._commit([told])
            elif told.step > self.evaluated:
                self._evaluate(told)
        for used in self.reports.experts.take(self.committed):
            self.journal.tell("experts", **used.fields())

    def regroup(self, now: float, members: Sequence[str], held: int, generation: int) -> None:
        """Begin a generation after all have left the last one; it continues from the state after step `held`."""
        self._incidents.left(now, max(0, self._commits.applied - held))
        self._commit(self._commits.regroup(members, held))
        # What its members commit before all have joined belongs to the new generation too.
        self.numbers.reach(generation)

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
        self.numbers.reach(generation)
        self._resumptions.append((self.numbers.now, step))
        self._told_to, self._entered_to = min(self._told_to, step), min(self._entered_to, step)
        self._incidents.forgot(made - step)
        self._commits = Commits(["nobody yet"], first_step=step + 1)
        self.reports.forget_pending()
        self._totals.back_to(step, self.samples(step), made)
        self.evaluated = evaluated
        self._metrics = {at: metrics for at, metrics in self._metrics.items() if at <= step}
        self._newest = min(self._newest, step)
        fresh = {"fresh_rates": True} if fresh_rates else {}
        self.journal.tell("resumed", step=step, checkpoint=checkpoint, voided_to=made, **fresh)
        # The next checkpoint waits for it in any case.
        self.journal.sync_later()

    def copied(self, sent: Iterable[Sent]) -> None:
        """Record that the state after a step is in memory twice: these are the copies."""
        self._totals.copied(list(sent))

    def saved(self, step: int, seconds: float, stall_s: float, name: str) -> None:
        """Record a complete checkpoint of `step`; it took `seconds`, and held the training up for `stall_s`."""
        self._newest = max(self._newest, step)
        self.journal.tell("checkpoint_saved", step=step, seconds=seconds, stall_s=stall_s, checkpoint=name)

    def not_saved(self, step: int, error: str) -> None:
        """Record that a checkpoint was not saved, or cannot be used."""
        self.journal.tell_after_news("checkpoint_failed", step=step, error=error)

    def saving(self, step: int, written: int, total: int, per_s: float | None) -> None:
        """Record how far the last writes of the run are, in bytes; the state is that after `step`."""
        self.journal.tell("saving", step=step, written=written, total=total, per_s=per_s)

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

    def formed(self, now: float, group: FormedGroup) -> None:
        """Record that all members of a new generation are in their worlds and have the state."""
        view, locations = group.view, self.reports.locations
        self.numbers.reach(view.generation)
        self._waiting = ""
        self.reports.formed(view)
        before, self._members = self._members, tuple(member.worker for member in view.members)
        if before:
            for name in self._members:
                if name not in before:
                    self.journal.tell("worker_joined", **who(locations[name]))
            if len(before) != len(self._members):
                self.journal.tell("rescaled", **{"from": len(before), "to": len(self._members)})
        self.journal.tell(
            "view_formed",
            members=seated(view, locations, group.params, group.optimizer_bytes, group.slices),
            spares=list(group.spares),
            collective=group.collective if len(view.members) > 1 else "none (one worker)",
            moved_bytes=group.moved_bytes,
            **({"cause": cause} if (cause := self._incidents.last_world) else {}),
            **({"repartitioned": True} if group.repartitioned else {}),
        )
        self._incidents.joined(now, {name: who(locations[name]) for name in self._members}, group.form_s)

    def waits(self, what: str) -> None:
        """Record that the run waits for something."""
        self._incidents.waits(self._clock())
        if what != self._waiting:
            self._waiting = what
            self.journal.tell("waiting", **{"for": what})

    def will_leave(self, node: str, deadline: float | None) -> None:
        """Record that a node that hosts workers will leave; `deadline` in Unix seconds."""
        self.journal.tell("drain_notice", node=node, deadline=deadline)

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
            bubble=self.reports.bubble,
            ended=self._clock(),
        )
        saved = None if self._newest < 0 else self._newest
        profile = self.reports.profile(self.committed)
        result = replace(result, saved_step=saved, unsaved=unsaved, stopped_early=stopped_early, profile=profile)
        if export is not None:
            result = replace(result, model_step=export.step, model_metrics=self.metrics(export.step))
        if self.journal.opened:
            self._write_end(result)
        return result

    def _write_end(self, result: Result) -> None:
        """Write what the run has made, then its last event, and then its result."""
        self.journal.write_made(result.profile, result.status)
        if result.status != self._over:
            self._tell_end(result)
        self.journal.write_result(result)

    def _tell_end(self, result: Result) -> None:
        self.journal.tell(
            "run_finished",
            status=result.status,
            error=result.error,
            steps=result.steps,
            samples=result.samples,
            state_sha256=result.state_sha256,
            saved_step=result.saved_step,
            unsaved=result.unsaved,
        )

    def _commit(self, records: Iterable[StepRecord]) -> None:
        for record in records:
            record = self.reports.whole(record)
            if record.step <= self._told_to:
                # A dead controller has told it, and could not enter it.
                self._enter(record)
                continue
            self._totals.add(record)
            self.journal.tell(
                "step_committed",
                record.time,
                step=record.step,
                epoch=record.step * self._batch_size // self._rows,
                samples=record.rows,
                loss=record.loss,
                grad_norm=record.grad_norm,
                seconds=record.seconds,
                **optional_fields(record),
                **self.reports.gpu_fields(self._members, self._clock()),
            )
            # After its event, which must not be missing if the step is in the ledger.
            self._enter(record)
            self._recovered(self._incidents.committed(record.time))

    def _enter(self, record: StepRecord) -> None:
        if record.step > self._entered_to:
            self.journal.enter(record)

    def _evaluate(self, told: Evaluated) -> None:
        self.evaluated = told.step
        self._metrics[told.step] = dict(told.metrics)
        self.journal.tell("evaluated", step=told.step, metrics=dict(told.metrics))

    def _recovered(self, recovery: Recovery | None) -> None:
        if recovery is None:
            return
        self._totals.recovered(recovery.stall_s)
        self.journal.tell("recovered", **asdict(recovery))
