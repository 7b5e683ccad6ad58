"""Run the controller: one Ray actor that executes the state machine's commands and feeds it events.

Every answer, death, report and request goes through one inbox and is handled by one thread, in order. The controller
never delays a step: workers report in batches, and one never-answering call to each worker reveals a death at once.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray

from raytrain_plus.collective.credentials import Credentials
from raytrain_plus.collective.formation import Formation
from raytrain_plus.collective.rendezvous import RendezvousServer
from raytrain_plus.controller.checkpointing import Checkpoints
from raytrain_plus.controller.export import Exporter
from raytrain_plus.controller.journal import Journal
from raytrain_plus.controller.metrics import Metrics
from raytrain_plus.controller.nodes import Nodes
from raytrain_plus.controller.order import Closing, Order
from raytrain_plus.data.sight import Sight
from raytrain_plus.errors import (
    CheckpointError,
    DamagedError,
    DataChanged,
    InputError,
    Interrupted,
    RaytrainError,
    RunError,
    StorageError,
    WorkerLost,
)
from raytrain_plus.membership import events as e
from raytrain_plus.membership import machine
from raytrain_plus.membership.buddies import buddies
from raytrain_plus.membership.group import Limits, Phase, holders, members_in, standing
from raytrain_plus.membership.hang_detection import Pulses, judge, overdue, silent
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.membership.timeouts import LEAVE_BEFORE_S, PAUSE_BEFORE_S, PREPARE_S, clock_of, limit_s, stop_limit_s
from raytrain_plus.membership.view import View
from raytrain_plus.observe.trackers import begun, check_installed
from raytrain_plus.parallel.pipeline.layout import Chunks
from raytrain_plus.parallel.pipeline.memory import Misfit, within
from raytrain_plus.parallel.sizing import cuts_of, most_shards
from raytrain_plus.result import Result
from raytrain_plus.runs.folder import check_writable, claim
from raytrain_plus.runs.history import Past
from raytrain_plus.state.checkpoint import MISSING, amiss
from raytrain_plus.state.manifest import Manifest
from raytrain_plus.storage.address import split
from raytrain_plus.storage.claimed import Claimed
from raytrain_plus.storage.open import open_folder
from raytrain_plus.storage.outage import outage_of
from raytrain_plus.storage.probe import left
from raytrain_plus.training.records import Activity, Evaluated, StepRecord
from raytrain_plus.workers.messages import (
    WHOLE,
    Assignment,
    Buddy,
    Export,
    Layers,
    Outcome,
    Place,
    Ready,
    Sent,
    ShareOf,
    Written,
)
from raytrain_plus.workers.pool import Pool, answer

TICK_S = 0.05
"""Maximum seconds between two looks at the clock."""
PULSE_S = 0.5
"""Seconds between two questions to a worker."""
LEAVE_PULSE_S = 0.1
"""Seconds between two questions to a worker that leaves a world."""
PAUSED_S = 1.0
"""If the controller itself stood still for longer, no worker is blamed for it."""
NODE_SILENT_S = 2.0
"""Seconds after which a node counts as lost if its worker does not answer and nothing there accepts a connection.

In total that takes 3 to 4 s.
"""
COLLECTIVE_S = 3600.0
"""Maximum seconds of a collective in a worker that hears nothing; otherwise the controller decides, and much sooner."""
RESTORE_AGAIN_S = 5.0
"""Seconds after which reading a checkpoint is retried."""
ENDS_KEPT = 2
"""Maximum number of attempts to save the state that a run ends with."""
EXPORT_TRIES = 3
"""Number of retries of the export after a failure."""
EXPORT_AGAIN_S = 1.0
LINGER_S = 5.0
"""Seconds for which the controller of a detached run can still be asked how the run ended."""
EARLY_WAIT_S = 5.0
"""Seconds for which a starting run does not report that it waits for workers."""

log = logging.getLogger(__name__)


@dataclass
class _Round:
    """The current generation: its worlds' rendezvous servers, and what its members have reported."""

    view: View
    rings: list[RendezvousServer] = field(default_factory=list)
    replicas: list[RendezvousServer] = field(default_factory=list)
    buddies: dict[str, str] = field(default_factory=dict)
    """For each member whose state nobody else holds, the worker that keeps a copy of it."""
    sent: dict[int, dict[str, Sent]] = field(default_factory=dict)
    """The copies that arrived, by step and member, for each step whose copies are not all known to be in place."""
    settled: int = -1
    """The newest step whose copies were all in place."""
    slowest_s: float = 0.0
    """The longest time that a joined member took to form its worlds."""
    shas: dict[str, str] = field(default_factory=dict)
    squares: Mapping[str, float] = field(default_factory=dict)
    """The squares of the newest step that a returned member has applied: see `Stepper.squares`."""
    squares_of: int = -1

    @property
    def differ(self) -> bool:
        """Whether members that hold the same stage have ended with different states."""
        stages = {member.worker: member.stage for member in self.view.members}
        return len({(stages[name], sha) for name, sha in self.shas.items()}) > len({stages[name] for name in self.shas})

    def cancel(self) -> None:
        """Tell members that wait for others that these will not come."""
        for server in (*self.rings, *self.replicas):
            server.cancel()

    def close(self) -> None:
        """Close the rendezvous servers."""
        for server in (*self.rings, *self.replicas):
            server.close()


class Controller:
    """The class behind the actor; `cluster.begin` makes it one. Public methods may run at the same time as `run`."""

    def __init__(self, order: Order, limits: Limits, began: float) -> None:
        """`began`: Unix seconds at which Ray was available."""
        job = order.plan.job
        self._order = order
        self._plan = order.plan
        """The plan as workers get it."""
        self._began = began
        self._elastic = job.elastic
        self._overlaps = job.parallel.overlaps
        """Whether a loss while steps overlap takes all members back to where those steps began."""
        self._pool = Pool(job.workers.cpus, job.workers.gpus)
        past = order.past or Past()
        self._run = Claimed(open_folder(order.plan.folder))
        self._journal = Journal(
            self._run,
            job.data.batch_size,
            order.plan.index.rows,
            None if job.epochs is None else (order.plan.steps, job.epochs * order.plan.index.rows),
            past,
        )
        self._checkpoints = Checkpoints(
            self._run, order, self._journal, self._post, lambda step: self._feed(e.Saved(step)), self._settled
        )
        self._exporter = Exporter(self._run, self._pool.begin, self._journal.check_fence, self._journal.outages)
        self._metrics = Metrics(job.name)
        self._ends_kept = self._tries_to_export = 0
        self._handing = -1
        """The step whose model is being exported."""
        self._restored: Manifest | None = None
        self._going_on = order.past is not None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._pulses = Pulses()
        self._places: dict[str, Place] = {}
        self._ready: dict[str, Ready] = {}
        self._sights: dict[str, Mapping[str, tuple[Sight, ...]]] = {}
        """For each node, what its first worker saw of the data files: its replacements compare their view with it."""
        self._draining: dict[str, float | None] = {}
        self._round: _Round | None = None
        self._copies = False
        """Whether any copies may be kept somewhere."""
        self._cuts: dict[int, tuple[Chunks, ...]] = {}
        """For each number of stages, the layers of each stage."""
        self._errors: dict[str, RaytrainError] = {}
        self._export: Export | None = None
        self._closing: Closing | None = None
        self._over = True
        """Whether nobody runs the job: not yet, or no longer."""
        self._stopping_since: float | None = None
        self._asked_aside = False
        self._nodes = Nodes(
            self._silent_nodes,
            lambda draining: self._post(partial(self._noticed, draining)),
            lambda node: self._post(partial(self._node_lost, node)),
        )
        self._here = ray.util.get_node_ip_address()
        self._me: Any = None
        self._group, self._first = machine.begin(limits, self._checkpoints.durable)
        self._clock: tuple[object, float] = (clock_of(self._group), time.monotonic())

    def run(self, detached: bool = False) -> Closing:
        """Run the job to its end. Input errors that only a worker can see are raised before a folder is made.

        If `detached`, nobody else ends this actor: it exits `LINGER_S` seconds after the run, so that followers hear
        the end.
        """
        self._over = False
        self._me = ray.get_runtime_context().current_actor
        try:
            return self._run_to_the_end()
        finally:
            self._over = True
            if detached:
                threading.Timer(LINGER_S, ray.kill, [self._me]).start()

    def _run_to_the_end(self) -> Closing:
        # On a cluster this may be another machine than the one that checked the job.
        check_installed(self._order.plan.job.trackers)
        place, name = split(self._run.address)
        with left(check_writable(place), name) as probe:
            # Workers on nodes that come later run this check too.
            self._plan = replace(self._order.plan, probe=probe)
            return self._train()

    def _train(self) -> Closing:
        self._nodes.start()
        try:
            for command in self._first:
                self._do(command)
            last = time.monotonic()
            while self._closing is None:
                self._hear()
                now = time.monotonic()
                if now - last > PAUSED_S:
                    self._pulses.forgive(now - last)
                last = now
                self._look(now)
            return self._closing
        except Exception as failure:
            if self._journal.opened:
                ours = "" if isinstance(failure, RaytrainError) else f"\n{traceback.format_exc()}"
                # If that cannot be written either, the first failure is the one to report.
                with contextlib.suppress(RunError):
                    self._finish("failed", f"{failure}{ours}", None)
            raise
        finally:
            self._nodes.close()
            if self._round is not None:
                self._round.cancel()
                self._round.close()
            self._exporter.close()
            self._pool.shutdown()
            self._checkpoints.close()
            self._journal.close()

    def report(self, worker: str, generation: int, records: Sequence[StepRecord | Evaluated]) -> None:
        """Accept a batch of applied steps and evaluations from a worker."""
        self._post(partial(self._reported, worker, generation, records))

    def written(self, told: Written) -> None:
        """Record that a worker has written its share of a checkpoint, or could not."""
        self._post(partial(self._wrote, told))

    def joined(self, worker: str, generation: int, form_s: float) -> None:
        """Record that a worker is in its world, which took `form_s` seconds to form, and has the state."""
        self._post(partial(self._joined, worker, generation, form_s))

    def follow(self, cursor: int, timeout_s: float) -> list[dict[str, Any]]:
        """Return the events from number `cursor` on; wait up to `timeout_s` for the first of them."""
        return self._journal.follow(cursor, timeout_s)

    def folder(self) -> str | None:
        """Return the run's folder; None if nobody runs the job."""
        return None if self._over else self._run.where

    def stop(self) -> None:
        """Ask the run to stop at the next step boundary."""
        self._post(self._stop)

    def rescale(self, minimum: int | None, maximum: int | None, spares: int | None) -> None:
        """Request other numbers of workers; None keeps a number.

        Raises `InputError` if the job does not support them.
        """
        job, now = self._order.plan.job, self._group.limits
        workers = replace(
            job.workers,
            min=now.minimum if minimum is None else minimum,
            max=now.maximum if maximum is None else maximum,
            spares=now.spares if spares is None else spares,
        )
        cuts_of(replace(job, workers=workers))
        fewest = max(job.workers.min, now.cuts[-1])
        if job.parallel.pipeline > 1 and workers.min < fewest:
            # The check whether the partitions fit the workers' memory assumed so many workers.
            raise InputError(
                f"a model in stages cannot shrink below the minimum that it began with: {fewest} workers",
                where=f"workers.min: {workers.min}",
                remedy="stop the run, and continue with: raytrain resume RUN --set 'workers={min: ...}'",
            )
        self._post(lambda: self._feed(e.Rescale(workers.min, workers.max or workers.min, workers.spares)))

    # The loop

    def _hear(self) -> None:
        """Do what is in the inbox, or wait a moment for something."""
        try:
            self._inbox.get(timeout=TICK_S)()
            while self._closing is None:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _look(self, now: float) -> None:
        """Do what is due by the clock."""
        self._journal.renew()
        self._checkpoints.make()
        self._save_in_time(now)
        if self._metrics.due:
            newest = self._checkpoints.newest
            self._metrics.show(self._journal.gauges.figures(None if newest is None else newest.time))
        for timer in [timer for timer in self._timers if timer[0] <= now]:
            self._timers.remove(timer)
            timer[1]()
        self._ask(now)
        for name in overdue(self._pulses.all, now, holders(self._group)):
            self._lost(name, "it did not leave a broken collective in time")
        group = self._group
        verdict = judge(self._pulses.all, members_in(group), holders(group), self._elastic.hang_timeout_s, now)
        for name, what in verdict.hung.items():
            self._lost(name, what)
        generation = self._group.generation
        if verdict.stuck and self._group.phase in (Phase.TRAIN, Phase.PAUSE):
            self._journal.broke(time.time(), "all workers waited for one another")
            self._feed(e.Stuck(generation))
        self._look_at_limits(now)

    def _look_at_limits(self, now: float) -> None:
        group = self._group
        if clock_of(group) != self._clock[0]:
            self._clock = (clock_of(group), now)
        since = now - self._clock[1]
        if group.phase is Phase.GATHER and group.generation < 0 and since > EARLY_WAIT_S:
            self._waits(len([worker for worker in group.workers.values() if worker.state != "coming"]))
        state_bytes = max((ready.state_bytes for ready in self._ready.values()), default=0)
        limit = limit_s(group, self._elastic.wait_s, state_bytes)
        late = limit is not None and since > limit
        if self._stopping_since is not None:
            rest = stop_limit_s(group, self._elastic.stop_grace_s, self._asked_aside)
            late = late or (rest is not None and now - self._stopping_since > rest)
        late = late or (group.phase is Phase.PAUSE and self._goes_within(LEAVE_BEFORE_S, untold=False))
        late = late or (group.phase is Phase.TRAIN and self._goes_within(PAUSE_BEFORE_S, untold=True))
        if late and group.phase is Phase.LEAVE and self._stopping_since is not None and not self._asked_aside:
            self._asked_aside = True
            for name in members_in(group):
                self._ask_aside(name, group.generation)
        elif late:
            if group.phase in (Phase.JOIN, Phase.PAUSE):
                self._journal.broke(time.time(), f"{group.phase.value} took too long")
            for name in members_in(group) if group.phase is Phase.LEAVE else ():
                self._journal.gone(name, "it did not leave its world in time")
            if group.phase is Phase.CLOSE and self._handed_over:
                # The model is exported; only the last checkpoint is late.
                self._checkpoints.wait_no_longer("it was not written before the run ended")
                self._feed(e.Handed())
                return
            self._feed(e.Late(group.generation))

    def _goes_within(self, seconds: float, untold: bool) -> bool:
        """Whether a node that hosts a member leaves so soon; `untold` is the answer without a known deadline."""
        nodes = {self._places[name].node for name in members_in(self._group) if name in self._places}
        deadlines = [deadline for node, deadline in self._draining.items() if node in nodes]
        return any(untold if deadline is None else time.time() > deadline - seconds for deadline in deadlines)

    def _ask_aside(self, name: str, generation: int) -> None:
        if self._group.phase is Phase.LEAVE and name in self._pool:
            self._pool.ask(name, self._posted(self._came_aside, name, generation), "stand_aside", generation)

    def _came_aside(self, name: str, generation: int, future: Future[Any]) -> None:
        try:
            outcome: Outcome | None = answer(future, name)
        except WorkerLost:
            return
        if outcome is None:
            self._at(time.monotonic() + TICK_S, partial(self._ask_aside, name, generation))
        else:
            self._out(name, generation, outcome)

    def _ask(self, now: float) -> None:
        """Ask the workers what they do; remind those that should leave, with the addresses published so far."""
        leaving = members_in(self._group) if self._group.phase is Phase.LEAVE else ()
        for name in self._pulses.due(leaving, LEAVE_PULSE_S, now):
            self._tell_to_leave(name, now)
        for name in self._pulses.due(self._pulses.all.keys(), PULSE_S, now):
            self._pulses.asked(name, now)
            self._pool.ask(name, self._posted(self._pulse, name), "activity")

    def _feed(self, event: e.Event) -> None:
        """Give the machine an event, and carry out its commands."""
        before = self._group
        self._group, commands = machine.step(before, event)
        formed = before.phase is Phase.JOIN and self._group.phase in (Phase.TRAIN, Phase.PAUSE)
        if formed and self._round is not None:
            self._formed(self._round)
        for command in commands:
            self._do(command)
        self._look_for_buddies()

    def _do(self, command: e.Command) -> None:
        now = time.monotonic()
        if isinstance(command, e.Start):
            for name in command.workers:
                self._at(now + command.delay_s, partial(self._start, name))
        elif isinstance(command, e.Join):
            self._join(command)
        elif isinstance(command, e.Pause):
            for name in members_in(self._group):
                self._pool.call(name, "pause", command.generation)
        elif isinstance(command, e.Interrupt):
            if self._round is not None:
                self._round.cancel()
            for name in command.workers:
                self._pulses.told(name, now)
                self._tell_to_leave(name, now)
        elif isinstance(command, e.Finish):
            self._finish_step(command)
        elif isinstance(command, e.Recall):
            for name in command.workers:
                came_out = self._posted(self._came_out, name, command.generation)
                self._pool.ask(name, came_out, "recall", command.generation, command.step)
        elif isinstance(command, e.Rehearse):
            self._pool.ask(command.worker, self._posted(self._rehearsed, command.worker), "rehearse")
        elif isinstance(command, e.Restore):
            self._restore(command.worker, command.stage)
        elif isinstance(command, e.Keep):
            self._keep(command.step)
        elif isinstance(command, e.Dismiss):
            self._dismiss(command.worker)
        elif isinstance(command, e.HandOver):
            self._export = None
            self._errors.pop("export", None)
            self._ends_kept = 0
            self._tries_to_export = EXPORT_TRIES
            self._handing = command.step
            if self._journal.opened and command.step < self._journal.committed:
                # Nobody holds what was committed, and nothing more will be computed.
                self._journal.base += 1
                self._go_back_to(command.step, self._group.generation)
            self._export_model(command.workers, command.step)
            if self._journal.committed >= command.step and not self._checkpoints.busy:
                # At the same time as the export: a run that is stopped has little time.
                self._keeps_the_end()
        elif isinstance(command, e.Wait):
            if self._group.generation >= 0:
                self._waits(command.have)
        elif isinstance(command, e.End):
            self._end(command)

    def _at(self, when: float, act: Callable[[], None]) -> None:
        self._timers.append((when, act))

    def _posted(self, act: Callable[..., None], *arguments: Any) -> Callable[[Future[Any]], None]:
        """Return a callback that puts an answer into the inbox when it comes."""
        return lambda future: self._post(partial(act, *arguments, future))

    def _post(self, act: Callable[[], None]) -> None:
        """Run `act` on the controller's thread, when its turn comes."""
        self._inbox.put(act)

    # Workers start

    def _start(self, name: str) -> None:
        if name not in self._group.workers:
            return
        self._pool.start(name)
        self._pool.watch(name, self._posted(self._died, name))
        self._pool.ask(name, self._posted(self._came, name), "place")

    def _came(self, name: str, future: Future[Any]) -> None:
        try:
            place: Place = answer(future, name)
        except WorkerLost:
            return
        if name not in self._pool:
            return
        self._places[name] = place
        self._journal.came(place)
        # Asked once the process is there, so that the answer is quick.
        self._pool.ask(name, self._posted(self._clocked, name, time.time()), "clock")
        self._pulses.add(name, time.monotonic())
        self._feed(e.Up(name))
        if place.node in self._draining:
            self._feed(e.Notice(name))
        plan = replace(self._plan, sights=self._sights.get(place.node, {}))
        self._pool.ask(name, self._posted(self._prepared, name), "prepare", plan, PREPARE_S)

    def _clocked(self, name: str, asked: float, future: Future[Any]) -> None:
        try:
            clock_s: float = answer(future, name)
        except WorkerLost:
            return
        self._journal.clocked(name, clock_s, asked, time.time())

    def _prepared(self, name: str, future: Future[Any]) -> None:
        try:
            ready: Ready = answer(future, name)
        except WorkerLost:
            return
        except RaytrainError as error:
            if self._group.generation < 0:
                raise
            if isinstance(error, DataChanged):
                self._fail(error)
            else:
                self._lost(name, str(error))
            return
        self._sights.setdefault(self._places[name].node, ready.sights)
        # Kept once per node: workers may come and go by the hundred.
        self._ready[name] = replace(ready, sights={})
        if ready.layers and self._group.generation < 0:
            self._look_what_fits()
        self._feed(e.Warm(name, -1))

    def _look_what_fits(self) -> None:
        """Drop the partitions of the model in which a stage is too large for a worker.

        Raises `InputError` if the requested partition is one of them.
        """
        limits, parallel = self._group.limits, self._order.plan.job.parallel
        self._cuts = {}
        for stages in limits.cuts:
            found = self._laid(stages)
            if not isinstance(found, Misfit):
                self._cuts[stages] = found
            elif stages == parallel.pipeline:
                raise InputError(
                    f"the model does not fit: {found}",
                    where=f"parallel.pipeline: {stages}",
                    remedy="use more stages, smaller layers, more microbatches, or larger machines",
                )
            else:
                log.warning("fewer than %d workers cannot hold the model: %s", min(self._cuts), found)
        self._feed(e.Fitted(tuple(self._cuts)))

    def _laid(self, stages: int) -> tuple[Chunks, ...] | Misfit:
        """Return the layers of each of so many stages, or why they do not fit."""
        job = self._order.plan.job
        living = {name: ready for name, ready in self._ready.items() if name in self._group.workers}
        sharing = Counter(self._places[name].node for name in living)
        room = min(
            ready.room if job.workers.gpus else ready.room // sharing[self._places[name].node]
            for name, ready in living.items()
        )
        layers = next(ready.layers for ready in living.values())
        microbatches = most_shards(job, stages) * job.parallel.microbatches
        return within(layers, job.parallel.schedule, stages, microbatches, room)

    def _rehearsed(self, name: str, future: Future[Any]) -> None:
        try:
            answer(future, name)
        except WorkerLost:
            return
        except DataChanged as error:
            self._fail(error)
            return
        except RaytrainError as error:
            self._lost(name, f"its warm-up step failed: {error}")
            return
        self._feed(e.Warm(name, None))

    # A generation

    def _join(self, command: e.Join) -> None:
        view = command.view
        if not self._journal.opened:
            # Only now: nothing is wrong with what was requested.
            self._open_folder()
        self._journal.renew()
        if not command.again:
            self._go_back_to(command.first_step - 1, view.generation)
        self._checkpoints.formed(self._journal.base + view.generation, view.members)
        names = [member.worker for member in view.members]
        self._journal.regroup(time.time(), names, command.first_step - 1, view.generation)
        if self._round is not None:
            threading.Thread(target=self._round.close, name="close rendezvous", daemon=True).start()
        self._round = _Round(view)
        shape = view.shape
        rings = [self._formations(f"stage{stage}", shape.ring(stage), names) for stage in range(shape.stages)]
        replicas = [
            self._formations(f"replica{replica}", shape.replica(replica), names) for replica in range(shape.replicas)
        ]
        takes = {name for name, what in command.lacks.items() if what != "initial"}
        sources: tuple[Any, ...] = ()
        if takes:
            sources = self._snapshots(command.donors, command.first_step - 1)
        self._round.buddies = self._buddies()
        for seat, member in enumerate(view.members):
            name, stage = member.worker, shape.stage(seat)
            assignment = Assignment(
                generation=view.generation,
                layers=self._layers(stage),
                ring=rings[stage.number][member.replica],
                replica=replicas[member.replica][stage.number] if shape.stages > 1 else None,
                shards=member.shards,
                first_step=command.first_step,
                lacks=command.lacks.get(name),
                gives=command.donors.count(name) if takes else 0,
                buddy=self._buddy(name),
                copies=bool(self._round.buddies) or self._overlaps,
                evaluated=self._journal.evaluated,
                share=ShareOf(
                    generation=self._journal.base + view.generation,
                    writer=seat,
                    writers=shape.size,
                    rank=member.replica,
                    size=shape.replicas,
                    speaks=self._speaks(stage),
                    claim=self._run.claim,
                ),
            )
            self._pulses.left(name, time.monotonic())
            came_out = self._posted(self._came_out, name, view.generation)
            self._pool.ask(name, came_out, "serve", self._me, assignment)
            if name in takes:
                # If the model is partitioned as before, a single donor has all that this member needs.
                same = len(command.donors) == stage.of
                given = (sources[stage.number],) if same else sources
                # A separate call, which ends: a reference lives as long as the call that received it.
                self._pool.call(name, "take", view.generation, given)

    def _open_folder(self) -> None:
        """Claim the run's folder and open it. Raises `RunError` if the storage does not take what a run begins with."""
        order = self._order
        address = ray.get_runtime_context().gcs_address
        try:
            fence = claim(self._run, fresh=order.fresh, claims=None if order.past is None else order.past.claims)
            self._run.hold(fence.claim)
            name = ray.get_runtime_context().get_actor_name() or ""
            names, where = order.plan.job.trackers, order.plan.roots[0]
            relays = begun(names, self._run, order.job_yaml, order.environment, where)
            self._journal.open(fence, order.job_yaml, order.versions, address, order.plan.index.to_json(), name, relays)
        except StorageError as failure:
            raise RunError(f"the run cannot start in {self._run.where}: {outage_of(failure, self._run)}") from failure
        self._checkpoints.restart_clock()

    def _snapshots(self, donors: Sequence[str], step: int) -> tuple[Any, ...]:
        """Return references to the states after `step`, by stage."""
        generation = self._group.generation
        return tuple(
            self._pool.call(name, "snapshot", generation, step, stage) for name, stage in self._holders(donors, step)
        )

    def _holders(self, donors: Sequence[str], step: int) -> list[tuple[str, Stage]]:
        """Return which worker provides which stage of the state after `step`.

        Workers that only have a copy of it are asked whether the copy is intact.
        """
        stages = [Stage(number, len(donors)) for number in range(len(donors))]
        for name, stage in zip(donors, stages, strict=True):
            worker = self._group.workers[name]
            if (worker.holds, worker.stage) != (step, stage):
                self._pool.ask(name, self._posted(self._has_copy, name), "has_copy", step, stage)
        return list(zip(donors, stages, strict=True))

    # Copies in memory

    def _buddies(self) -> dict[str, str]:
        """Return, for each member whose state nobody else holds, the worker that keeps copies of it."""
        now, group = self._round, self._group
        if now is None or now.view.shape.replicas > 1:
            return {}
        owners = [member.worker for member in now.view.members]
        spares = [
            name
            for name, worker in group.workers.items()
            # A worker about to run a warm-up step is busy for a while.
            if (worker.state, worker.holds) == ("idle", None) and not worker.leaving and name not in owners
        ]
        owners = [name for name in owners if name in group.workers]
        nodes = {name: self._places[name].node for name in (*owners, *spares)}
        found = buddies(owners, spares, nodes, now.buddies)
        self._copies = self._copies or bool(found) or self._overlaps
        return found

    def _buddy(self, owner: str) -> Buddy | None:
        now = self._round
        name = None if now is None else now.buddies.get(owner)
        return None if name is None or name not in self._pool else Buddy(name, self._pool.actor(name))

    def _look_for_buddies(self) -> None:
        """Reassign the copies of workers that are gone, and assign those that had no keeper until now."""
        now = self._round
        if now is None or self._group.phase not in (Phase.JOIN, Phase.TRAIN, Phase.PAUSE):
            return
        before, now.buddies = now.buddies, self._buddies()
        for owner in now.buddies.keys() | before.keys():
            if before.get(owner) != now.buddies.get(owner) and owner in self._pool:
                self._pool.call(owner, "copy_to", self._group.generation, self._buddy(owner))

    def copied(self, sent: Sent) -> None:
        """Record that a copy of a worker's state is in its buddy's memory."""
        self._post(partial(self._sent, sent))

    def _sent(self, sent: Sent) -> None:
        now = self._round
        if now is None or self._stale(sent.generation, f"a copy from {sent.worker}") or sent.step <= now.settled:
            return
        now.sent.setdefault(sent.step, {})[sent.worker] = sent
        self._look_at_copies()

    def _look_at_copies(self) -> None:
        """Settle the copies of a step once all are in place and the step is committed.

        The group could not go back to a step that was never announced.
        """
        now = self._round
        if now is None or self._group.phase not in (Phase.JOIN, Phase.TRAIN, Phase.PAUSE, Phase.LEAVE):
            return
        members = [member.worker for member in now.view.members]
        for step in sorted(step for step in now.sent if step <= self._journal.committed):
            told = now.sent[step]
            # A worker whose buddy has changed sends the copy to the new one.
            if any(name not in told or told[name].buddy != now.buddies.get(name, "") for name in members):
                continue
            del now.sent[step]
            now.settled = step
            copies: dict[str, tuple[Stage, ...]] = {}
            for seat, name in enumerate(members):
                for keeper in filter(None, (name, told[name].buddy)):
                    copies[keeper] = (*copies.get(keeper, ()), now.view.shape.stage(seat))
            self._journal.copied(told.values())
            self._settle_copies(step, copies)

    def _settle_copies(self, step: int, copies: Mapping[str, tuple[Stage, ...]]) -> None:
        """Announce that only these copies are needed from now on."""
        self._feed(e.Copied(self._group.generation, step, copies))
        for name in self._pool:
            self._pool.call(name, "copied", self._group.generation, step)

    def _has_copy(self, name: str, future: Future[Any]) -> None:
        try:
            sound = answer(future, name)
        except WorkerLost:
            return
        if not sound and name in self._group.workers:
            log.error("%s: the copy that it should provide is missing or damaged; please report this", name)
            self._feed(e.Bare(name))

    def _formations(self, world: str, seats: Sequence[int], names: Sequence[str]) -> list[Formation]:
        """Return the invitations to one world of the current generation, for the workers of these seats."""
        now = self._round
        assert now is not None
        members = [names[seat] for seat in seats]
        addresses = [self._places[name].address for name in members]
        where, credentials = (self._here, 0), [Credentials()] * len(members)
        # A single member needs nobody's address.
        if len(members) > 1:
            server = RendezvousServer(self._here, len(members), set(addresses))
            (now.rings if world.startswith("stage") else now.replicas).append(server)
            where = (self._here, server.start())
            credentials = [server.credentials(rank) for rank in range(len(members))]
        generation = now.view.generation
        return [
            Formation(
                generation=generation,
                name=f"{world}-g{generation}",
                rank=rank,
                size=len(members),
                address=address,
                server=where,
                timeout_s=COLLECTIVE_S,
                credentials=credentials[rank],
            )
            for rank, address in enumerate(addresses)
        ]

    def _layers(self, stage: Stage) -> Layers:
        """Return the layers that belong to a stage: the same for as long as this controller lives."""
        if stage.of == 1:
            return WHOLE
        cut = self._cuts[stage.of]
        stages = {name: number for number, chunks in enumerate(cut) for chunk in chunks for name in chunk}
        return Layers(stage, cut[stage.number], stages)

    def _speaks(self, stage: Stage) -> bool:
        """Whether this stage is the first that trains anything."""
        if stage.of == 1:
            return True
        trains = {layer.name for layer in next(iter(self._ready.values())).layers if layer.parameters}
        stages = self._layers(stage).stages
        return stage.number == min(stages[name] for name in stages if name in trains)

    def _parameters(self, view: View) -> dict[str, int]:
        """Return how many parameters each member trains."""
        found = {}
        for seat, member in enumerate(view.members):
            ready, layers = self._ready[member.worker], self._layers(view.shape.stage(seat))
            counts = {layer.name: layer.parameters for layer in ready.layers}
            own = [counts[name] for chunk in layers.chunks for name in chunk]
            found[member.worker] = sum(own) if layers.chunks else ready.parameters
        return found

    def _finish_step(self, command: e.Finish) -> None:
        """Have the step applied by workers that hold all its sums; its norms come from a worker that has applied it."""
        now = self._round
        assert now is not None
        assert now.squares_of == command.step, "a worker that has applied it has come back"
        for name in command.workers:
            came_out = self._posted(self._came_out, name, command.generation)
            self._pool.ask(name, came_out, "finish", command.generation, now.squares)

    def _joined(self, name: str, generation: int, form_s: float) -> None:
        if self._stale(generation, f"{name} joined"):
            return
        if self._round is not None:
            self._round.slowest_s = max(self._round.slowest_s, form_s)
        self._feed(e.Joined(name, generation))

    def _formed(self, formed: _Round) -> None:
        members = {member.worker for member in formed.view.members}
        spares = [
            name
            for name, worker in self._group.workers.items()
            if name not in members and not worker.leaving and worker.state in ("idle", "rehearsing")
        ]
        if self._copies and not (formed.buddies or self._overlaps):
            # All state is held by two workers now.
            self._copies = False
            self._settle_copies(self._group.committed, {})
        collective = self._order.plan.collective
        counts = self._parameters(formed.view)
        self._journal.formed(time.time(), formed.view, counts, spares, collective, formed.slowest_s)

    def _reported(self, name: str, generation: int, records: Sequence[StepRecord | Evaluated]) -> None:
        if self._stale(generation, f"a report from {name}"):
            return
        before = self._journal.committed
        best = self._order.plan.job.checkpoint.keep_best
        for record in records:
            if best is not None and isinstance(record, Evaluated) and best.metric not in record.metrics:
                raise InputError(
                    f"the task's evaluate does not return {best.metric!r}",
                    where="checkpoint.keep_best.metric",
                    expected=f"one of {', '.join(record.metrics)}",
                )
        self._journal.report(name, records)
        self._look_at_copies()
        if self._journal.committed > before:
            self._feed(e.Committed(generation, self._journal.committed))

    def _came_out(self, name: str, generation: int, future: Future[Any]) -> None:
        try:
            outcome: Outcome = answer(future, name)
        except WorkerLost:
            return
        self._out(name, generation, outcome)

    def _out(self, name: str, generation: int, outcome: Outcome) -> None:
        if self._stale(generation, f"{name} left") or name not in self._group.workers:
            return
        self._reported(name, generation, outcome.records)
        self._pulses.left(name, time.monotonic())
        self._checkpoints.left(name, outcome.saved_as, outcome.copied)
        if outcome.why == "finished" and self._round is not None and outcome.state_sha256 is not None:
            self._round.shas[name] = outcome.state_sha256
        if self._round is not None and outcome.holds is not None and outcome.holds > self._round.squares_of:
            self._round.squares, self._round.squares_of = outcome.squares, outcome.holds
        if outcome.error is not None:
            self._errors[outcome.fault] = outcome.error
            log.info("%s failed in generation %d: %s", name, generation, outcome.fault)
        if outcome.why in ("failed", "interrupted"):
            self._journal.broke(time.time(), f"{name}: {outcome.fault}" if outcome.why == "failed" else "")
        self._feed(
            e.Left(
                name,
                generation,
                outcome.holds,
                outcome.why,
                outcome.fault,
                outcome.final,
                stage=outcome.stage,
                ready=outcome.ready,
                copy=outcome.copy,
            )
        )

    def _stale(self, generation: int, what: str) -> bool:
        """Whether a message belongs to another generation: then it is refused."""
        if generation == self._group.generation:
            return False
        log.warning("refused: %s in generation %d; the current one is %d", what, generation, self._group.generation)
        return True

    def _tell_to_leave(self, name: str, now: float) -> None:
        if self._round is None or name not in self._pool:
            return
        rings, replicas = _published(self._round.rings), _published(self._round.replicas)
        if name in self._pulses.all:
            self._pulses.asked(name, now)
        self._pool.ask(name, self._posted(self._pulse, name), "interrupt", self._group.generation, rings, replicas)

    def _pulse(self, name: str, future: Future[Any]) -> None:
        try:
            activity: Activity = answer(future, name)
        except WorkerLost:
            return
        except Exception:
            # The worker still owes an answer, and is lost if it owes it for too long.
            log.warning("%s cannot report its activity", name, exc_info=True)
            return
        now = time.monotonic()
        self._pulses.heard(name, activity.doing, activity.since_s, activity.limit_s, now)

    # Checkpoints

    def _wrote(self, told: Written) -> None:
        self._checkpoints.wrote(told, self._group.workers)

    def _settled(self, step: int, number: int) -> None:
        """Announce that a checkpoint is no longer in progress: the next one may begin."""
        for name in self._pool:
            self._pool.call(name, "settled", step, number)
        self._hand_over()

    def _save_in_time(self, now: float) -> None:
        group = self._group
        if group.phase is Phase.TRAIN and self._checkpoints.wanted(group.generation, now):
            # The header carries one member's request to all: a second request could arrive after the first is
            # fulfilled.
            self._pool.call(members_in(group)[0], "save", group.generation)

    def _restore(self, name: str, stage: Stage) -> None:
        if name not in self._pool:
            return
        if self._checkpoints.publishing:
            # The one being published may be newer, and publishing may remove older ones.
            self._at(time.monotonic() + TICK_S, partial(self._restore, name, stage))
            return
        manifest = self._checkpoints.newest
        assert manifest is not None
        told = self._posted(self._restored_by, name, stage, manifest)
        self._pool.ask(name, told, "restore", manifest, self._layers(stage))

    def _restored_by(self, name: str, stage: Stage, manifest: Manifest, future: Future[Any]) -> None:
        try:
            answer(future, name)
        except WorkerLost:
            return
        except DamagedError as error:
            self._damaged(name, stage, manifest, error)
            return
        except StorageError as error:
            self._restore_later(name, stage, error)
            return
        self._restored = manifest
        self._feed(e.Warm(name, manifest.step, stage))

    def _restore_later(self, name: str, stage: Stage, error: OSError) -> None:
        """Wait for a storage that is temporarily unavailable, as long as a worker may take to read a checkpoint."""
        self._journal.waits(f"the checkpoint storage: {error}")
        self._at(time.monotonic() + RESTORE_AGAIN_S, partial(self._restore, name, stage))

    def _damaged(self, name: str, stage: Stage, manifest: Manifest, error: DamagedError) -> None:
        try:
            hidden = error.what == MISSING and not amiss(self._run, manifest)
        except OSError as failure:
            self._restore_later(name, stage, failure)
            return
        if hidden:
            raise InputError(
                f"{name} cannot see the checkpoint {manifest.name}, which the controller sees",
                where=f"run folder {self._run.where}",
                expected="a storage that all nodes share",
            ) from error
        self._checkpoints.drop(manifest)
        if self._checkpoints.newest is None:
            raise CheckpointError(
                f"no checkpoint can be used; the last one tried: {error.what}",
                where=error.where,
                remedy="restore the file from a copy, or start over with --fresh, which keeps this run's folder",
            ) from error
        log.warning("%s", error)
        self._journal.not_saved(manifest.step, f"{error.where}: {error.what}; the previous checkpoint is used")
        self._feed(e.Unreadable(name, self._checkpoints.durable))

    def _go_back_to(self, step: int, generation: int) -> None:
        """Record it if a generation continues after fewer steps than were committed, or is a controller's first."""
        past = self._order.past
        going_on, self._going_on = self._going_on, False
        if past is not None and going_on:
            made, evaluated = max(past.committed, step), past.evaluated
        elif step < self._journal.committed:
            made, evaluated = self._journal.committed, self._journal.evaluated
        else:
            return
        read = self._restored
        checkpoint = read.name if read is not None and read.step == step else None
        self._journal.go_back(step, generation, checkpoint, made, min(evaluated, step))
        self._checkpoints.go_back(self._journal.generation, step)

    def _keeps_the_end(self) -> bool:
        """Request a checkpoint of the state that the run ends with; return whether one is being made."""
        step = self._handing
        differ = self._round is not None and self._round.differ
        if step <= self._checkpoints.durable or self._ends_kept == ENDS_KEPT or differ:
            return False
        self._ends_kept += 1
        return self._keep(step)

    def _keep(self, step: int) -> bool:
        """Request a checkpoint from the holders of the state after `step` in no world; return whether there are any."""
        group = self._group
        able = [name for name, worker in group.workers.items() if worker.state == "idle" and name in self._pool]
        keepers = [name for name in able if group.workers[name].holds == step]
        best = standing(group)
        if best is None or best.step != step or best.copied or not keepers:
            return False
        stages = {name: group.workers[name].stage or Stage() for name in keepers}
        keepers = [name for name in keepers if stages[name].of == len(best.donors)]
        # A number that no generation has: the remains of an earlier attempt may exist under the old one.
        self._journal.base += 1
        number = self._journal.base + group.generation
        self._checkpoints.begin(step, number, keepers)
        for writer, name in enumerate(keepers):
            alike = [other for other in keepers if stages[other] == stages[name]]
            share = ShareOf(
                generation=number,
                writer=writer,
                writers=len(keepers),
                rank=alike.index(name),
                size=len(alike),
                speaks=self._speaks(stages[name]),
                claim=self._run.claim,
            )
            self._pool.ask(name, self._posted(self._kept, name), "keep", self._me, share)
        return True

    def _kept(self, name: str, future: Future[Any]) -> None:
        try:
            answer(future, name)
        except WorkerLost:
            return
        except RaytrainError as error:
            self._checkpoints.wait_no_longer(f"{name} could not copy its state: {error}")

    # Workers leave

    def _died(self, name: str, future: Future[Any]) -> None:
        if name not in self._pool:
            return
        try:
            answer(future, name)
        except RaytrainError as error:
            self._lost(name, str(error).removeprefix(f"{name} died: "))

    def _lost(self, name: str, cause: str) -> None:
        """Handle a worker that is gone or is considered gone; end its process in the latter case."""
        worker = self._group.workers.get(name)
        if worker is not None:
            self._journal.gone(name, cause)
            if worker.state == "in":
                self._journal.broke(time.time(), f"{name} was lost: {cause}")
        self._dismiss(name)
        self._feed(e.Lost(name, cause))

    def _dismiss(self, name: str) -> None:
        self._pulses.drop(name)
        if name in self._pool:
            self._pool.end(name)
        self._checkpoints.lost(self._group.workers.keys() - {name})

    def _silent_nodes(self) -> set[str]:
        """Return the nodes whose worker has owed an answer for long."""
        now = time.monotonic()
        names = silent(dict(self._pulses.all), holders(self._group), NODE_SILENT_S, now)
        return {self._places[name].node for name in names}

    def _noticed(self, draining: Mapping[str, float | None]) -> None:
        before, self._draining = self._draining, dict(draining)
        for node, deadline in draining.items():
            hosted = [name for name in self._group.workers if name in self._places and self._places[name].node == node]
            if node in before:
                continue
            if not hosted:
                log.warning("node %s will leave; it hosts no worker of this run", node)
                continue
            self._journal.will_leave(node, deadline)
            for name in hosted:
                self._feed(e.Notice(name))

    def _node_lost(self, node: str) -> None:
        for name in [name for name in self._group.workers if name in self._places and self._places[name].node == node]:
            self._lost(name, f"its node {node[:12]} does not answer")

    # The end

    def _stop(self) -> None:
        if self._stopping_since is None and self._group.phase is not Phase.CLOSE:
            self._stopping_since = time.monotonic()
        self._feed(e.Stop())

    def _fail(self, error: DataChanged) -> None:
        """Stop at the next step boundary because of data that a worker met before it joined; the run has failed."""
        self._errors["data"] = error
        self._stop()

    def _waits(self, have: int) -> None:
        need = self._group.limits.minimum
        if have >= need:
            # All of them have started, and are preparing.
            return
        self._journal.waits(f"{need - have} more of at least {need} workers (each needs {self._pool.need})")

    def _exported(self, leads: tuple[str, ...], step: int, came: str | RaytrainError) -> None:
        """Handle the end of an export: `came` is the hash of the state, or the error."""
        if not self._hands_over(leads, step) or isinstance(came, WorkerLost):
            # The loss of a holder is reported separately.
            return
        if isinstance(came, Interrupted) and self._tries_to_export:
            # A fault of a copy is reported separately too: then another worker provides the model.
            self._tries_to_export -= 1
            self._at(time.monotonic() + EXPORT_AGAIN_S, partial(self._export_model, leads, step))
            return
        if isinstance(came, RaytrainError):
            self._errors["export"] = came
            self._handed(leads)
        else:
            self._pool.ask(leads[0], self._posted(self._showed, leads, step, came), "show", step)

    def _export_model(self, leads: tuple[str, ...], step: int) -> None:
        """Export the model, unless other workers provide it by now."""
        if self._hands_over(leads, step):
            came = partial(self._exported, leads, step)
            self._exporter.export(self._holders(leads, step), step, lambda sha: self._post(partial(came, sha)))

    def _showed(self, leads: tuple[str, ...], step: int, sha: str, future: Future[Any]) -> None:
        if not self._hands_over(leads, step):
            return
        try:
            self._export = Export(show=answer(future, leads[0]), state_sha256=sha)
        except WorkerLost:
            return
        except RaytrainError as error:
            self._errors["export"] = error
        self._handed(leads)

    def _hands_over(self, leads: tuple[str, ...], step: int) -> bool:
        """Whether these workers still provide the model of that step."""
        return self._group.phase is Phase.CLOSE and (self._group.leads, self._handing) == (leads, step)

    def _handed(self, leads: tuple[str, ...]) -> None:
        # The state that these workers alone hold is committed, now that the model is stored.
        self._journal.regroup(time.time(), leads[:1], self._handing, self._group.generation)
        self._hand_over()

    def _hand_over(self) -> None:
        """End the run once the model is exported and the last checkpoint is made or given up."""
        if self._group.phase is not Phase.CLOSE or not self._handed_over or self._checkpoints.busy:
            return
        if not self._keeps_the_end():
            self._feed(e.Handed())

    @property
    def _handed_over(self) -> bool:
        return self._export is not None or "export" in self._errors

    def _end(self, end: e.End) -> None:
        status = end.status
        error: RaytrainError | None = RunError(end.why) if end.why else None
        if status == "failed":
            error = self._errors.get(end.why) or RunError(end.why)
        elif found := self._errors.get("data") or self._errors.get("export"):
            status, error = "failed", found
        elif self._round is not None and self._round.differ:
            digests = ", ".join(f"{name}: {sha[:12]}" for name, sha in self._round.shas.items())
            status, error = "failed", RunError(f"the workers' states differ at the end ({digests}); please report this")
        if error is not None and not self._journal.opened:
            # Nothing was ever trained: there is no run to report, and no folder.
            raise error
        if isinstance(error, DataChanged) and error.first is not None:
            self._journal.data_changed(error.first)
        result = self._finish(status, None if error is None else str(error), self._export)
        self._closing = Closing(result=result, error=error)

    def _finish(self, status: str, error: str | None, export: Export | None) -> Result:
        return self._journal.finish(self._order.plan.job.name, status, error, export, self._began)


def _published(servers: Sequence[RendezvousServer]) -> frozenset[tuple[str, int]]:
    """Return the addresses at which the members of these worlds listen."""
    return frozenset(place for server in servers for places in server.published().values() for place in places)
