"""Run one worker: control calls that always answer, and a training thread that does the work.

Everything that changes the state or touches a world runs on the training thread, one thing after the other; control
calls hand work to it, or set a request that it checks.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import ray
import torch

from raytrain_plus.collective.interrupt import close_connections
from raytrain_plus.errors import DataChanged, DeviceBroken, Interrupted, RaytrainError
from raytrain_plus.job.task_loader import reporting
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.membership.pieces import Piece, Pieces
from raytrain_plus.result import Result
from raytrain_plus.runs.folder import claimed_by
from raytrain_plus.state.entry import StateTensor
from raytrain_plus.state.stored.manifest import Manifest
from raytrain_plus.state.transfer import Array, Snapshot
from raytrain_plus.storage.folders.claimed import Claimed
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.retry import LAST_PAUSES_S, retry
from raytrain_plus.training.exchange.step_records import Activity
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.workers import between
from raytrain_plus.workers.generation import Generation
from raytrain_plus.workers.machine.device_fault import Brokenness, device_fault, device_name
from raytrain_plus.workers.machine.notices import hear_notices
from raytrain_plus.workers.messages import (
    AdoptionReport,
    Assignment,
    Buddy,
    Layers,
    Outcome,
    Plan,
    PreparedReport,
    ShareOf,
    WorkerLocation,
    Written,
)
from raytrain_plus.workers.preparation.prepared import Prepared, device_of, prepare_worker
from raytrain_plus.workers.preparation.show import show_model
from raytrain_plus.workers.preparation.task_error import as_training_error
from raytrain_plus.workers.reporter import FLUSH_S, tell_written
from raytrain_plus.workers.restored import restore
from raytrain_plus.workers.states.leftover import LastGeneration, Leftover, leave
from raytrain_plus.workers.states.saver import STILL_S
from raytrain_plus.workers.states.state_receiver import ReceivedStates
from raytrain_plus.workers.stay import Addresses, Stay
from raytrain_plus.workers.unconfirmed import Unconfirmed
from raytrain_plus.workers.warm_up import warm_up

T = TypeVar("T")

LEAVE_S = 10.0
"""Maximum seconds until a member that ends is out of a world that it was told to leave."""

log = logging.getLogger(__name__)


class Worker:
    """The contents of a worker process; `actor` puts it on Ray."""

    def __init__(
        self,
        name: str,
        *,
        prepare: Callable[[str, Plan], tuple[Prepared, PreparedReport]] = prepare_worker,
        listen: Callable[[], None] = hear_notices,
        store: Any = ray,
        broken: Brokenness | None = None,
    ) -> None:
        """Begin unprepared.

        `prepare` makes what all but a few calls need. `listen` begins to listen for preemption notices. `store` has
        Ray's `wait` and `get`. `broken` is told if the device has failed.
        """
        self._name = name
        self._prepare = prepare
        self._listen = listen
        self._broken = Brokenness() if broken is None else broken
        self._device = torch.device("cpu")
        """That of the job, once this is known."""
        self._control = Control()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training")
        self._received = ReceivedStates(self._control, store)
        self._preparation: Prepared | None = None
        """None until `prepare` has ended."""
        self._ready: PreparedReport | None = None
        self._stay: Stay | None = None
        """The newest generation that it was called into."""
        self._last: Outcome | None = None
        """How it came out of that, and what it has done since."""
        self._unconfirmed = Unconfirmed()
        self._leaving = threading.Lock()
        self._left: Stay | None = None
        """The generation after which it has written what it leaves."""
        self._lock = threading.Lock()
        self._changing = 0
        """The number of calls that may change the state, beside `serve`."""
        self._aside = False
        """The training thread may be in a step that is never applied, and this worker only provides its state."""

    def location(self) -> WorkerLocation:
        """Return the name, process, node and address of this worker."""
        return WorkerLocation(
            worker=self._name,
            pid=os.getpid(),
            node=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),
        )

    def clock(self) -> float:
        """Return the Unix seconds by this process's clock."""
        return time.time()

    def prepare(self, plan: Plan, limit_s: float) -> PreparedReport:
        """Import and build the task; make the data if this node lacks it. Raises what is wrong with either."""

        def made() -> PreparedReport:
            self._control.set_limit(limit_s)
            self._control.enter("preparing")
            self._device = device_of(plan.job)
            self._preparation, ready = self._prepare(self._name, plan)
            return ready

        ready = self._do(made)
        self._listen()
        self._ready = ready
        return ready

    def standing(self) -> AdoptionReport | None:
        """Return what a controller that adopts it must know; None if it is not prepared. Waits for nothing."""
        if self._ready is None:
            return None
        prepared, stay = self._prepared, self._stay
        # Before its outcome is looked at, so that this is never older.
        inside = stay is not None and not stay.out.done() and not self._aside
        last = self._last
        return AdoptionReport(
            location=self.location(),
            clock_s=self.clock(),
            ready=self._ready,
            charter=None if stay is None else stay.assignment.charter,
            joined=stay is not None and stay.joined,
            inside=inside,
            outcome=Outcome(holds=None, why="interrupted") if inside else self._as_now(last),
            copies=prepared.copier.copies(),
            written=prepared.saver.written,
            records=self._unconfirmed.all(),
        )

    def rejoin(self, generation: int) -> Outcome:
        """Wait for the end of a generation that another controller has formed; return as `serve` does."""
        stay = self._stay
        if stay is None or stay.assignment.generation != generation:
            raise Interrupted(f"{self._name} is not in generation {generation}")
        outcome = stay.outcome()
        return replace(self._as_now(self._last), records=outcome.records)

    def formed(self, generation: int, rings: Addresses, replicas: Addresses) -> None:
        """Keep the addresses at which the members of a generation listen, for an `interrupt` that has none."""
        if self._stay is not None and self._stay.assignment.generation == generation:
            self._stay.rings, self._stay.replicas = rings, replicas

    def warm_up(self) -> None:
        """Make a warm-up step alone, so that the first step in a group is not slow; holds no state afterwards."""
        prepared = self._prepared
        self._change(lambda: warm_up(prepared, self._control))

    def serve(self, controller: Any, assignment: Assignment) -> Outcome:
        """Take part in one generation, from joining its world to leaving it, and return how that ended.

        The controller keeps this call pending.
        """
        self._control.begin(assignment.generation)
        prepared, stay = self._prepared, Stay(assignment)
        part = Generation(self._name, prepared, self._control, self._received, controller, stay, self._unconfirmed)

        def run() -> Outcome:
            self._last = self._whole(part.run)
            return self._last

        stay.out = self._thread.submit(run)
        self._stay = stay
        return stay.out.result()

    def take(self, generation: int, sources: tuple[Any, ...]) -> None:
        """Fetch parts of donors' states, given as Ray references, while the training thread joins that generation."""
        if not self._stale(generation, "a copy of the state"):
            self._received.fetch(generation, sources)

    def restore(self, manifest: Manifest, layers: Layers, owned: Pieces | None = None) -> None:
        """Load the state, or a stage's, from a checkpoint; `owned`: only the optimizer's state of these rows.

        Raises `DamagedError` if it is not what was written, and `CheckpointError` if it belongs to another model.
        """
        prepared = self._prepared
        self._change(lambda: restore(prepared, manifest, layers, owned))

    def keep(self, controller: Any, share: ShareOf) -> None:
        """Write this worker's share of a checkpoint of the state that it holds, while it is in no generation."""
        prepared = self._prepared
        self._do(lambda: between.keep(prepared, share, partial(tell_written, controller)))

    def leave(self, controller: str) -> None:
        """Write what the next controller of the run needs of this worker, because none of this name comes back.

        All members stop at one step boundary, and write their shares of that state. Nothing is written if another
        controller owns the run. Every wait has a limit.
        """
        with self._leaving:
            stay = self._stay
            if stay is None or stay is self._left:
                return
            try:
                self._leave(stay, controller)
                self._left = stay
            except Exception:
                log.exception("%s could not write what it leaves", self._name)

    def _leave(self, stay: Stay, controller: str) -> None:
        prepared, generation = self._prepared, stay.assignment.generation
        # The request travels in the header, so the first member whose limit is over stops all.
        self._control.pause(generation)
        wait([stay.out], prepared.plan.job.elastic.hang_timeout_s + FLUSH_S)
        if not stay.out.done():
            # It waits for a member that is gone.
            self.interrupt(generation, frozenset(), frozenset())
            wait([stay.out], LEAVE_S)
        share = stay.assignment.share
        run = open_folder(prepared.plan.folder)
        if retry(lambda: claimed_by(run), LAST_PAUSES_S) != controller:
            log.warning("another controller owns the run, so %s leaves nothing", self._name)
            return
        if retry(lambda: Result.load(run), LAST_PAUSES_S) is not None:
            # The run has ended, and its workers are about to.
            return
        left = Leftover(
            location=self.location(),
            last=LastGeneration.of(stay.assignment.charter),
            records=self._unconfirmed.all(),
            written=self._last_share(stay),
        )
        claimed = run if share.claim is None else Claimed(run, share.claim)
        retry(lambda: leave(claimed, left), LAST_PAUSES_S)

    def _last_share(self, stay: Stay) -> Written | None:
        """Write this worker's share of the state with which it came out; return None if there is none."""
        if not (stay.joined and stay.out.done()) or self._as_now(self._last).holds is None:
            return None
        prepared, told = self._prepared, queue.SimpleQueue[Written]()
        try:
            self._do(lambda: between.keep(prepared, stay.assignment.share, told.put))
            written = told.get(timeout=2 * STILL_S)
        except (RaytrainError, queue.Empty):
            # What the record lacks is worth its file all the same.
            log.warning("%s could not write its share of its last state", self._name, exc_info=True)
            return None
        if written.share is None:
            log.warning("%s could not write its share of its last state: %s", self._name, written.error)
            return None
        return written

    def finish(self, generation: int, squares: Mapping[str, float]) -> Outcome:
        """Apply the step whose sums it has, because others have applied it: see `TrainState.finish`."""
        prepared = self._prepared
        try:
            self._last = self._change(lambda: between.finish(prepared, self._control, squares))
        except RaytrainError as error:
            fault, final = f"{type(error).__name__}: {error}", isinstance(error, DataChanged)
            failed = prepared.outcome("failed")
            self._last = replace(failed, holds=None, error=error, fault=fault, final=final)
        return self._last

    def recall(self, generation: int, step: int) -> Outcome:
        """Load its copy of its own state after `step`, and return what it holds then."""
        prepared = self._prepared
        try:
            self._last = self._change(lambda: between.recall(prepared, self._control, step, in_use=self._aside))
        except RaytrainError as error:
            # The copy still exists.
            log.warning("a copy could not be loaded", exc_info=True)
            self._last = replace(prepared.outcome("interrupted"), holds=None, ready=None, fault=str(error))
        return self._last

    def snapshot(
        self,
        generation: int,
        step: int,
        stage: Stage,
        layers: Collection[str] | None = None,
        rows: Sequence[Piece] | None = None,
        with_values: bool = False,
    ) -> Snapshot:
        """Return that stage's state after `step`, or some of it: see `StateSource.snapshot`."""
        source = self._prepared.source
        return self._whole(lambda: source.snapshot(generation, step, stage, layers, rows, with_values))

    def has_copy(self, step: int, stage: Stage) -> bool:
        """Return whether this worker holds that stage's state after `step`, or has an undamaged copy of it."""
        source = self._prepared.source
        return self._whole(lambda: source.has(step, stage))

    def inventory(self, step: int, stage: Stage) -> list[StateTensor]:
        """Return the tensors of that stage's state after `step`.

        Raises `Interrupted` if this worker has neither that state nor an undamaged copy.
        """
        source = self._prepared.source
        return self._whole(lambda: source.inventory(step, stage))

    def tensors(self, step: int, stage: Stage, pieces: Sequence[Piece]) -> list[Array]:
        """Return the bytes of these pieces of tensors."""
        source = self._prepared.source
        return self._whole(lambda: source.tensors(step, stage, pieces))

    def show(self, step: int) -> str | None:
        """Return what the task shows of the model after `step`, which is in the run's folder."""
        prepared = self._prepared
        return self._do(lambda: show_model(prepared, step, in_use=self._aside))

    def keep_copy(self, generation: int, stage: Stage, snapshot: Snapshot) -> None:
        """Keep a copy of the state of another worker, the only one that holds it."""
        self._prepared.copier.keep(generation, stage, snapshot)

    def copied(self, generation: int, step: int) -> None:
        """Record that the copies of that step are all in place: earlier ones are no longer needed."""
        # All workers are told, also those that are not prepared yet.
        if self._preparation is not None:
            self._preparation.copier.settled(generation, step)

    def copy_to(self, generation: int, buddy: Buddy | None) -> None:
        """Send the copies of its state to another worker from now on."""
        self._prepared.copier.send_to(generation, buddy)

    def pause(self, generation: int) -> None:
        """Request that the group stop at the next step boundary; the request travels in the header."""
        if not self._stale(generation, "a pause request"):
            self._control.pause(generation)

    def save(self, generation: int) -> None:
        """Request that the group make a checkpoint; the request travels in the header."""
        if not self._stale(generation, "a checkpoint request"):
            self._control.save(generation)

    def settled(self, step: int, generation: int) -> None:
        """Record that the checkpoint of that step and generation number is complete, or will never be."""
        # All workers are told, also those that are not prepared yet.
        if self._preparation is not None:
            self._preparation.saver.settled(step, generation)

    def writing(self) -> tuple[int, int] | None:
        """Return the bytes written of its share of a checkpoint, and all of them; None if it writes none."""
        return None if self._preparation is None else self._preparation.saver.writing()

    def interrupt(
        self, generation: int, rings: frozenset[tuple[str, int]], replicas: frozenset[tuple[str, int]]
    ) -> Activity:
        """Leave the worlds whose members listen at these addresses; return what the training thread does now.

        Without addresses, which the controller that formed them has not told another one, it uses its own.
        """
        if not self._stale(generation, "an interrupt"):
            self._control.interrupt(generation)
        if self._control.generation == generation:
            stay = self._stay
            if stay is not None and not rings and not replicas:
                rings, replicas = stay.rings, stay.replicas
            close_connections(
                rings, listeners=self._preparation is not None and self._preparation.plan.collective == "horovod"
            )
            close_connections(replicas, listeners=False)
        return self._control.activity()

    def activity(self) -> Activity:
        """Return what the training thread does now."""
        return self._control.activity()

    def stand_aside(self, generation: int) -> Outcome | None:
        """Come out of a generation whose world it was told to leave, though the training thread is in a long step.

        From now on this worker only provides its state; that step is never applied. Return None if that is impossible
        because the state is being changed at this moment.
        """
        if self._stale(generation, "a request to stand aside"):
            return None
        self._control.interrupt(generation)
        now = self._prepared.own.now
        last_applied = None if now is None or self._control.generation != generation else now.state.last_applied
        self._aside = last_applied is not None
        if last_applied is None:
            return None
        self._last = self._prepared.outcome("interrupted")
        return self._last

    @property
    def _prepared(self) -> Prepared:
        """The prepared worker's parts; the controller sends no request that needs them earlier."""
        assert self._preparation is not None, f"{self._name} is not prepared"
        return self._preparation

    def _stale(self, generation: int, what: str) -> bool:
        """Return whether a call is for a generation that is over here; log it as refused then."""
        if generation >= self._control.generation:
            return False
        log.warning(
            "%s refused %s for generation %d; it is in generation %d",
            self._name,
            what,
            generation,
            self._control.generation,
        )
        return True

    def _as_now(self, last: Outcome | None) -> Outcome:
        """Return an outcome with what it holds now, and without records."""
        now = self._prepared.outcome("interrupted")
        if self._changing:
            # Whatever it holds at this moment, it may be another state soon.
            now = replace(now, holds=None, ready=None)
        if last is None:
            return now
        return replace(
            last,
            holds=now.holds,
            stage=now.stage,
            # A worker that has gone back does not apply those sums any more.
            ready=None if last.ready is None else now.ready,
            copy=now.copy,
            owned=now.owned,
            complete=now.complete,
            squares=now.squares,
            records=(),
        )

    def _change(self, work: Callable[[], T]) -> T:
        """Do some work that changes the state."""
        with self._lock:
            self._changing += 1
        try:
            return self._do(work)
        finally:
            with self._lock:
                self._changing -= 1

    def _do(self, work: Callable[[], T]) -> T:
        def told() -> T:
            try:
                with reporting(lambda error: None if isinstance(error, RaytrainError) else as_training_error(error)):
                    return self._whole(work)
            finally:
                self._control.enter("idle")

        return told() if self._aside else self._thread.submit(told).result()

    def _whole(self, work: Callable[[], T]) -> T:
        """Do some work; if the device fails in it, tell so and never return."""
        try:
            return work()
        except BaseException as error:
            fault = device_fault(error, self._device)
            if fault:
                log.exception("the device of %s has failed", self._name)
                self._broken.tell(DeviceBroken(device_name(self._device), fault))
            raise
