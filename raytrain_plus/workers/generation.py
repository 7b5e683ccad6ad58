"""Take part in one generation: join its worlds, take the state, train, and leave."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from raytrain_plus.collective.horovod_world import HorovodWorld
from raytrain_plus.collective.invitation import Invitation
from raytrain_plus.collective.nccl import Nccl
from raytrain_plus.collective.nccl_peers import NcclPeers
from raytrain_plus.collective.nccl_world import NcclWorld
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.collective.staged import StagedWorld
from raytrain_plus.collective.torch_world import TorchWorld
from raytrain_plus.collective.world import SwitchableTransport, World
from raytrain_plus.device_copies import HostCopies, release_memory
from raytrain_plus.errors import DataChanged, Interrupted, RaytrainError, TaskError, TrainingError, WaitExpired
from raytrain_plus.job.task_loader import fault_of, is_signal, out_of_memory
from raytrain_plus.membership.pieces import Pieces
from raytrain_plus.observe.expert_use import ExpertReports, ExpertsUsed
from raytrain_plus.parallel.pipeline.layout import directions
from raytrain_plus.parallel.pipeline.transport import Peers
from raytrain_plus.state.holding import AS_BUILT, MEAN_LOSS, WEIGHTED
from raytrain_plus.state.stages import all_but, everything
from raytrain_plus.state.transfer import restricted, undigested
from raytrain_plus.training.exchange.early_stop import Evaluations
from raytrain_plus.training.exchange.remarks import (
    loss_weighted,
    modes_changed,
    of_task,
    rows_counted,
    settings_kept,
    stays_in_evaluation,
    woken,
)
from raytrain_plus.training.exchange.step_records import Evaluated, Remark, StepRecord
from raytrain_plus.training.exchange.thread_control import Control, RowSpan
from raytrain_plus.training.passes.pipedream import PipeDream
from raytrain_plus.training.passes.stage import replica_stage
from raytrain_plus.training.passes.synchronous import Synchronous
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.step.loop import Companions, Feed, Span, Steps, StepTimeouts, not_profiled, train
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.step.window import OverlappingSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.workers.machine.device_fault import device_fault
from raytrain_plus.workers.machine.gpu_meter import metered
from raytrain_plus.workers.messages import Outcome, Sent, Written
from raytrain_plus.workers.preparation.data_check import check_data
from raytrain_plus.workers.preparation.prepared import Prepared
from raytrain_plus.workers.preparation.profiled import profiling_of
from raytrain_plus.workers.preparation.task_error import as_training_error
from raytrain_plus.workers.reporter import Reporter, tell_written
from raytrain_plus.workers.states.saver import Part
from raytrain_plus.workers.states.state_receiver import ReceivedStates
from raytrain_plus.workers.states.state_source import sha256_of
from raytrain_plus.workers.stay import Stay
from raytrain_plus.workers.unconfirmed import Unconfirmed
from raytrain_plus.workers.warm_up import FIRST_STEP_S

_OfHost = TypeVar("_OfHost", TorchWorld, HorovodWorld)
_Replica = TorchWorld | StagedWorld | NcclPeers


class Generation:
    """A member's part in one generation, which `run` takes on the training thread."""

    def __init__(
        self,
        worker: str,
        prepared: Prepared,
        control: Control,
        received: ReceivedStates,
        controller: Any,
        stay: Stay,
        unconfirmed: Unconfirmed,
    ) -> None:
        self._worker = worker
        self._prepared = prepared
        self._control = control
        self._received = received
        self._controller = controller
        self._stay = stay
        self._assignment = assignment = stay.assignment
        number = assignment.generation
        self._steps: Steps | None = None
        """How it makes its steps, once it has joined."""
        self._in_step: int | None = None
        """The step in which training has ended, if inside of one."""
        self._place: RowSpan | None = None
        """The rows that it then computed with, or read."""
        # The reporter repeats it itself: Ray would show the user each call that it repeats.
        report = controller.report.options(max_task_retries=0)
        self._reporter = Reporter(
            lambda records: report.remote(worker, number, records), unconfirmed, assignment.charter.number
        )
        first = assignment.ring.rank == 0 and assignment.layers.stage.rank == 0
        self._expert_reports = ExpertReports(prepared.plan.steps) if first else None
        """Those of its stage, which one worker makes."""
        self._profiling = profiling_of(worker, prepared, assignment, self._reporter.tell)

    def run(self) -> Outcome:
        """Join, train, leave, and return how that ended."""
        prepared, assignment = self._prepared, self._assignment
        prepared.saver.begin(Part(assignment.share, self._tell_written))
        prepared.copier.begin(
            assignment.generation,
            assignment.layers.stage,
            assignment.copies,
            assignment.buddy,
            self._tell_copied,
        )
        try:
            outcome = self._trained()
        # SystemExit would end the process, as if it had been lost, and KeyboardInterrupt means a cancelled call to Ray.
        except BaseException as error:
            # The process is of no use any more if its device has failed.
            if is_signal(error) or device_fault(error, prepared.device):
                raise
            prepared.own.go_back()
            outcome = self._ended_by(error)
        if outcome.exhausted:
            # The memory that the error and the steps held is free by now; the next attempt can use all of it.
            self._steps = None
            release_memory(prepared.device)
        prepared.copier.end()
        prepared.source.forget_given()
        self._control.enter("idle")
        return replace(outcome, records=self._reporter.rest())

    def _trained(self) -> Outcome:
        prepared, control, assignment = self._prepared, self._control, self._assignment
        with ExitStack() as stack:
            control.set_limit(assignment.ring.timeout_s)
            control.enter("joining")
            control.check()
            # Its first batches are made while the world forms.
            feed = prepared.feeds.of_member(assignment.layers.stage, assignment.shards, assignment.first_step, stack)
            stack.enter_context(self._reporter)
            if prepared.gpu is not None:
                stack.enter_context(metered(prepared.gpu.uuid, self._reporter.tell))
            if self._profiling is not None:
                # What was profiled until an interrupt is written, once the worlds are left.
                stack.callback(self._profiling.stop, control)
            state = self._take_place()
            world, peers, form_s = self._join(state, stack)
            moved = self._take_state(state)
            self._stay.joined = True
            self._controller.joined.remote(self._worker, assignment.generation, form_s, moved)
            # Called first, before the worlds are left.
            stack.callback(self._remember)
            for remark in self._on_rules(state):
                self._reporter.tell(remark)
            why = self._train(feed, world, peers)
            if why == "finished":
                if self._profiling is not None:
                    self._profiling.finish(control)
                control.set_limit(FIRST_STEP_S)
                control.enter("data")
                check_data(prepared.plan)
        prepared.own.go_back()
        outcome = prepared.outcome(why)
        return replace(outcome, state_sha256=sha256_of(prepared.own.state)) if why == "finished" else outcome

    def _on_rules(self, state: TrainState) -> Iterator[Remark]:
        """Yield what a user should know of how this run trains its model, by the rules of the version that began it."""
        if self._prepared.plan.job.evaluate is not None and not state.rules[WEIGHTED]:
            yield rows_counted()
        if state.kept:
            yield settings_kept(state.kept)
        if not state.rules[MEAN_LOSS]:
            yield loss_weighted()
        if not state.rules[AS_BUILT] and any(part.in_evaluation for part in state.parts):
            yield modes_changed()
        if state.woken:
            yield woken()
        if state.rules[AS_BUILT] and (name := state.trained_in_evaluation):
            yield stays_in_evaluation(name)
        yield from of_task(state.task)

    def _remember(self) -> None:
        """Note in which step training has ended, if inside of one, and with which rows."""
        steps, doing = self._steps, self._control.activity().doing
        # An evaluation computes too, after its step.
        if steps is not None and doing in ("computing", "applying") and steps.begun != steps.state.last_applied:
            self._in_step = steps.begun
        self._place = self._prepared.feeds.failed if doing == "data" else self._control.place

    def _ended_by(self, error: BaseException) -> Outcome:
        """Return the outcome of a generation that `error` has ended here."""
        if isinstance(error, (Interrupted, WaitExpired)):
            # If it was told to leave, what made the others leave is the reason.
            told = self._control.interrupted()
            return replace(self._prepared.outcome("interrupted"), fault="" if told else str(error))
        failed = self._prepared.outcome("failed")
        if isinstance(error, RaytrainError):
            final = isinstance(error, (TrainingError, TaskError, DataChanged))
            return replace(failed, error=error, fault=f"{type(error).__name__}: {error}", final=final)
        rows = "" if self._place is None else self._prepared.feeds.named(self._place)
        parts = () if self._steps is None else self._steps.state.parts
        modules = {id(one): name for part in parts for name, one in part.module.named_modules()}
        reported = as_training_error(error, rows, modules)
        exhausted = out_of_memory(error)
        return replace(failed, error=reported, fault=fault_of(error), exhausted=exhausted, step=self._in_step)

    def _take_place(self) -> TrainState:
        """Return the state of what this member is to hold, built if it holds something else or must start over."""
        own, control, assignment = self._prepared.own, self._control, self._assignment
        if own.stage == assignment.layers.stage and assignment.lacks != "initial" and not self._starts_over(own.state):
            return own.state
        # Building discards what it holds: others copy that first.
        self._prepared.source.wait_until_given(assignment.generation, assignment.gives, control.check)
        # Meanwhile it waits for nobody, whichever worker is lost.
        control.enter("preparing")
        state = own.build(assignment.layers, keep_before=assignment.lacks == "stage")
        control.check()
        control.enter("joining")
        return state

    def _starts_over(self, state: TrainState) -> bool:
        """Return whether it has too few rows of the initial state, which nobody can give it."""
        assignment = self._assignment
        initial = assignment.first_step == 0 and bool(assignment.owners) and state.gathered is None
        return initial and not state.trained.everything and state.trained.owned != self._owned

    @property
    def _owned(self) -> Pieces | None:
        """The rows whose optimizer's state this member is to hold; None if that is not sharded."""
        assignment = self._assignment
        return assignment.owners[assignment.ring.rank] if assignment.owners else None

    def _join(self, state: TrainState, stack: ExitStack) -> tuple[World, _Replica | None, float]:
        """Form its worlds, which `stack` leaves, and prepare to make steps in them.

        Return the world of its ring, that of its model replica, if that has several workers, and how many seconds the
        forming took.
        """
        assignment = self._assignment
        start = time.monotonic()
        world = self._form(assignment.ring)
        # Registered last, left first: others wait until this world is left, not for the rest.
        stack.callback(self._leave, world)
        replica = None
        if assignment.replica is not None:
            replica = self._form_replica(assignment.replica)
            stack.callback(self._leave, replica)
            # Before the first of them is left: to free a part of NCCL waits for the whole GPU.
            stack.callback(world.begin_to_leave)
            stack.callback(replica.begin_to_leave)
        self._steps = self._steps_of(state, replica)
        return world, replica, time.monotonic() - start

    def _form_replica(self, invitation: Invitation) -> _Replica:
        """Form the world of its model replica."""
        prepared, layers = self._prepared, self._assignment.layers
        if prepared.plan.collective != "nccl":
            return self._staged(TorchWorld(invitation))
        library, host = Nccl(prepared.device), self._staged(TorchWorld(invitation))
        wanted = directions(prepared.plan.job.parallel.schedule, layers.stage.of, layers.stage.ranks)
        return NcclPeers(host, wanted, invitation.timeout_s, self._control.interrupted).join(library)

    def _steps_of(self, state: TrainState, replica: Peers | None) -> Steps:
        """Return how this member makes its steps; `replica`: the world of its model replica, if that has stages."""
        prepared, layers = self._prepared, self._assignment.layers
        job = prepared.plan.job
        skip = job.elastic.on_nonfinite == "skip"
        if replica is None:
            return whole_steps(state, skip_nonfinite=skip)
        stage = partial(
            replica_stage,
            state=state,
            peers=replica,
            schedule=job.parallel.schedule,
            stages=layers.stage.of,
            classes=prepared.classes,
            tied=layers.apart(state.tied),
        )
        if not job.parallel.overlaps:
            return SynchronousSteps(state, stage(Synchronous), skip_nonfinite=skip)
        counted = prepared.feeds.counted(self._assignment.shards)
        return OverlappingSteps(state, stage(PipeDream), every=job.parallel.commit_every, counted=counted)

    def _take_state(self, state: TrainState) -> int:
        """Take the state that this member lacks; return how many bytes came from others."""
        assignment, layers = self._assignment, self._assignment.layers
        owned = self._owned
        if owned is not None:
            state.share_rows(assignment.owners)
        if assignment.lacks not in ("newer", "stage", "rows"):
            if owned is not None:
                # At the beginning of the run; later it has what it is to own.
                if assignment.first_step == 0:
                    state.begin_with(owned)
                else:
                    state.own(owned)
            return 0
        step = assignment.first_step - 1
        parts = self._received.take(assignment.generation, step)
        moved = sum(part.bytes for part in parts)
        parts += [self._prepared.source.copy_of(step, *one) for one in assignment.own_copies]
        if assignment.lacks == "stage":
            before = self._prepared.own.before
            assert before is not None, "it holds another stage of the state"
            parts.insert(0, undigested(step, before.state.holding(), all_but(layers.others)))
        if owned is None:
            state.adopt(restricted(parts, layers.others))
            return moved
        if assignment.lacks == "rows":
            parts.insert(0, undigested(step, state.holding(), everything))
            # Others take rows from here, too, and before these are others.
            self._prepared.source.wait_until_given(assignment.generation, assignment.gives, self._control.check)
        state.own(owned)
        # Who gives may lack weights that others have changed; the members send theirs before the first step.
        state.adopt(state.joined(parts, layers.others), spread=not assignment.incomplete)
        return moved

    def _form(self, invitation: Invitation) -> World:
        if invitation.size == 1:
            return SoloWorld()
        plan = self._prepared.plan
        if plan.collective == "nccl":
            library, meanwhile = Nccl(self._prepared.device), self._staged(TorchWorld(invitation))
            return NcclWorld(meanwhile, invitation.timeout_s, self._control.interrupted).join(library)
        if plan.collective != "horovod":
            return self._staged(TorchWorld(invitation))
        # The rings of workers that share a stage's slices sum the same gradients of what is not cut.
        return self._staged(HorovodWorld(invitation, fuses=plan.job.parallel.slices == 1))

    def _staged(self, world: _OfHost) -> _OfHost | StagedWorld:
        """Return a world of the host for tensors of this worker's device."""
        device = self._prepared.device
        return (
            world if device.type == "cpu" else StagedWorld(world, HostCopies(device), self._control.interrupted).start()
        )

    def _leave(self, world: World | _Replica) -> None:
        self._control.enter("leaving")
        world.close()
        self._control.enter("idle")

    def _train(self, feed: Feed, world: World, peers: SwitchableTransport | None) -> Any:
        assert self._steps is not None, "it has joined"
        prepared, assignment = self._prepared, self._assignment
        job, feeds = prepared.plan.job, prepared.feeds
        evaluation = feeds.evaluation(assignment.layers.stage)
        return train(
            self._steps,
            Span(
                first_step=assignment.first_step,
                end=prepared.plan.steps,
                hosted=assignment.shards,
                shards=job.data.shards,
                incomplete=assignment.incomplete,
                saved=assignment.saved,
            ),
            (world, peers),
            Companions(
                feed=feed,
                saving=prepared.saver,
                copying=prepared.copier,
                tell=self._tell,
                profiling=not_profiled if self._profiling is None else self._profiling.during,
            ),
            evaluation=None if evaluation is None else replace(evaluation, made=assignment.evaluated),
            evaluations=Evaluations(job.best, assignment.history),
            timeouts=StepTimeouts(
                step_s=job.elastic.hang_timeout_s, first_step_s=FIRST_STEP_S, wait_s=assignment.ring.timeout_s
            ),
            control=self._control,
        )

    def _tell(self, record: StepRecord | Evaluated | ExpertsUsed) -> None:
        """Report a record. A step of the generation proves that all its members have the state that they need."""
        if isinstance(record, ExpertsUsed):
            if self._expert_reports is not None and self._expert_reports.due(record.step):
                self._reporter.tell(record)
            return
        if isinstance(record, StepRecord):
            self._prepared.own.proven()
            task = self._prepared.own.state.stepwise
            if task is not None and task.stops():
                # As `raytrain stop` does; all workers stop at the same boundary.
                self._controller.stop.remote()
        self._reporter.tell(record)

    def _tell_written(self, written: Written) -> None:
        # A checkpoint counts once its step is known to be committed.
        self._reporter.soon()
        tell_written(self._controller, written)

    def _tell_copied(self, sent: Sent) -> None:
        # A copy counts once its step is known to be committed.
        self._reporter.soon()
        self._controller.copied.remote(sent)
