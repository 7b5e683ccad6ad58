"""Run one worker: control calls that always answer, and a training thread that does the work.

Everything that changes the state or touches a world runs on the training thread, one thing after the other; control
calls hand work to it, or set a request that it checks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import ray
import safetensors.torch
import torch
from ray.exceptions import RayError
from torch import nn

from raytrain_plus.collective.formation import Formation
from raytrain_plus.collective.horovod import HorovodWorld, load_horovod
from raytrain_plus.collective.interrupt import cut
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.collective.torch import TorchWorld
from raytrain_plus.collective.world import World
from raytrain_plus.data.of_job import evaluation_line, line_of
from raytrain_plus.data.prepare import prepare
from raytrain_plus.data.reader import (
    Batches,
    Collate,
    Counts,
    first_microbatch,
    held_out,
    held_out_counts,
    microbatch_rows,
)
from raytrain_plus.data.sample_order import Line
from raytrain_plus.data.sight import Sight
from raytrain_plus.data.source import Index, check_unchanged, differences, index
from raytrain_plus.data.transform_block import Rows, Transform
from raytrain_plus.errors import (
    CheckpointError,
    DamagedError,
    DataChanged,
    DataError,
    InputError,
    Interrupted,
    RaytrainError,
    RunError,
    StorageError,
    TaskError,
    TrainingError,
    WaitExpired,
)
from raytrain_plus.install.state import REMEDY
from raytrain_plus.job.settings import Job
from raytrain_plus.job.task_loader import (
    build_task,
    fault_of,
    load_function,
    load_task,
    told_as_task_error,
    trim_traceback,
)
from raytrain_plus.membership.events import Why
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.parallel.pipeline.message import KNOWN, Classes, classes_of
from raytrain_plus.ray_compat import ray_data_on_the_head
from raytrain_plus.runs.folder import MODEL
from raytrain_plus.state.checkpoint import read_tensors
from raytrain_plus.state.entry import Entry
from raytrain_plus.state.finite import as_tensors, check_finite, not_finite
from raytrain_plus.state.holding import Holding, model_state, other_classes, saved_model
from raytrain_plus.state.hostcopy import check_storable
from raytrain_plus.state.manifest import FOLDER, Manifest, mismatch
from raytrain_plus.state.named import bytes_of, dtype_name, entry_of, optimizer_state, state_sha256
from raytrain_plus.state.stages import own_tensors, own_tree
from raytrain_plus.state.transfer import Array, Snapshot, digest, hashed, restricted
from raytrain_plus.storage.open import open_folder
from raytrain_plus.storage.probe import amiss_with, refusal
from raytrain_plus.storage.retry import tried
from raytrain_plus.task import Task
from raytrain_plus.training.control import Control
from raytrain_plus.training.loop import Evaluation, Feed, Limits, Window, train
from raytrain_plus.training.model import build_chunks, build_model
from raytrain_plus.training.randomness import random_key, repeatable, set_random_key
from raytrain_plus.training.records import Activity, Evaluated, StepRecord
from raytrain_plus.training.step import Stepper
from raytrain_plus.workers.copier import Copier
from raytrain_plus.workers.messages import (
    WHOLE,
    Assignment,
    Buddy,
    Layers,
    Outcome,
    Place,
    Plan,
    Ready,
    Sent,
    ShareOf,
    Written,
)
from raytrain_plus.workers.notices import hear_notices
from raytrain_plus.workers.reporter import FLUSH_S, Reporter
from raytrain_plus.workers.saver import Part, Saver

T = TypeVar("T")

FIRST_STEP_S = 300.0
"""Maximum seconds of a first step and of an evaluation: they compile, open files, and have no earlier step as a
measure."""
TELL_TRIES = 3
"""Number of attempts to report a written share to the controller."""
LOOK_S = 0.02
"""Seconds between two checks for a request, while a copy of the state is on its way."""

log = logging.getLogger(__name__)


class Worker:
    """The contents of a worker process; `actor` puts it on Ray."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._control = Control()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training")
        self._plan: Plan | None = None
        self._task: Task | None = None
        self._stepper: Stepper | None = None
        self._stage: Stage | None = None
        """The stage that the stepper holds, or the whole model. A model in stages is built once the stage is known."""
        self._before: tuple[Stage, Stepper] | None = None
        """The previous stage and stepper, in a generation with another stage, until that generation has made a step."""
        self._classes: Classes = KNOWN
        """The classes of the objects in a batch, if batches pass from stage to stage."""
        self._rows: Rows | None = None
        self._evaluation: Evaluation | None = None
        self._feed: Batches | None = None
        self._saver: Saver | None = None
        self._copier: Copier | None = None
        self._copies: dict[int, Future[list[Snapshot]]] = {}
        self._copied_state: tuple[tuple[int, Stage], Mapping[str, torch.Tensor]] | None = None
        self._giving = threading.Lock()
        self._given: Counter[int] = Counter()
        """For each generation, how often others were given a state that they begin it with."""
        self._aside = False

    def place(self) -> Place:
        """Return the name, process, node and address of this worker."""
        return Place(
            worker=self._name,
            pid=os.getpid(),
            node=ray.get_runtime_context().get_node_id(),
            address=ray.util.get_node_ip_address(),
        )

    def clock(self) -> float:
        """Return the Unix seconds by this process's clock."""
        return time.time()

    def prepare(self, plan: Plan, limit_s: float) -> Ready:
        """Import and build the task; make the data if this node lacks it. Raises what is wrong with either."""
        ready = self._do(lambda: self._prepare(plan, limit_s))
        hear_notices()
        return ready

    def rehearse(self) -> None:
        """Make one warm-up step alone, so that the first one in a group is not slow; no state is held afterwards."""
        self._do(self._rehearse)

    def serve(self, controller: Any, assignment: Assignment) -> Outcome:
        """Take part in one generation, from joining its world to leaving it, and return how that ended.

        The controller keeps this call pending.
        """
        self._control.begin(assignment.generation)
        return self._thread.submit(self._serve, controller, assignment).result()

    def take(self, generation: int, sources: tuple[Any, ...]) -> None:
        """Fetch the donors' states, given as Ray references, while the training thread joins that generation."""
        if self._stale(generation, "a copy of the state") or self._control.over(generation):
            return
        copy = self._copies.setdefault(generation, Future())
        try:
            copy.set_result([self._fetch(generation, source) for source in sources])
        except BaseException as error:
            copy.set_exception(error)

    def restore(self, manifest: Manifest, layers: Layers) -> None:
        """Load the state, or a stage's, from a checkpoint.

        Raises `DamagedError` if it is not what was written, and `CheckpointError` if it belongs to another model.
        """
        self._do(lambda: self._restore(manifest, layers))

    def keep(self, controller: Any, share: ShareOf) -> None:
        """Write this worker's share of a checkpoint of the state that it holds, while it is in no generation."""
        self._do(lambda: self._keep(controller, share))

    def finish(self, generation: int, squares: Mapping[str, float]) -> Outcome:
        """Apply the step of which it has all sums, because others of its generation have: see `Stepper.finish`."""

        def finished() -> Outcome:
            assert self._plan is not None
            assert self._stepper is not None
            self._control.patience(self._plan.job.elastic.hang_timeout_s)
            self._control.enter("applying")
            self._stepper.finish(squares)
            if self._stepper.held == self._plan.steps - 1:
                # This worker ends the run without reaching the end of its own training.
                self._check_data()
            return self._outcome("interrupted")

        try:
            return self._do(finished)
        except RaytrainError as error:
            fault, final = f"{type(error).__name__}: {error}", isinstance(error, DataChanged)
            return replace(self._outcome("failed"), holds=None, error=error, fault=fault, final=final)

    def recall(self, generation: int, step: int) -> Outcome:
        """Load its copy of its own state after `step`, and return what it holds then."""

        def recalled() -> Outcome:
            found = None if self._copier is None or self._stage is None else self._copier.find(step, self._stage)
            # Beside a step that is still being computed, nothing can be changed.
            if found is not None and self._stepper is not None and not self._aside:
                self._control.enter("preparing")
                self._stepper.adopt(found)
            return replace(self._outcome("interrupted"), ready=None)

        try:
            return self._do(recalled)
        except RaytrainError as error:
            # The copy still exists.
            log.warning("a copy could not be loaded", exc_info=True)
            return replace(self._outcome("interrupted"), holds=None, ready=None, fault=str(error))

    def snapshot(self, generation: int, step: int, stage: Stage) -> Snapshot:
        """Return that stage's state after `step`, held or copied here, for a member that begins a generation with it.

        This worker is between two steps, and stays so until the other has copied the state.
        """
        if (own := self._stepper_at(step, stage)) is not None:
            snapshot: Snapshot | None = own.snapshot()
        else:
            snapshot = None if self._copier is None else self._copier.find(step, stage)
        if snapshot is None:
            raise RunError(f"{self._name} has neither {stage} of step {step} nor a copy of it")
        with self._giving:
            self._given[generation] += 1
        return snapshot

    def has_copy(self, step: int, stage: Stage) -> bool:
        """Whether it holds that stage's state after `step`, or has an undamaged copy of it."""
        if self._stepper_at(step, stage) is not None:
            return True
        return self._copier is not None and self._copier.sound(step, stage)

    def _stepper_at(self, step: int, stage: Stage) -> Stepper | None:
        """Return the stepper if it holds that stage's state after `step`, else None."""
        stepper = self._stepper
        return stepper if stepper is not None and (stepper.held, self._stage) == (step, stage) else None

    def keep_copy(self, generation: int, stage: Stage, snapshot: Snapshot) -> None:
        """Keep a copy of the state of another worker, the only one that holds it."""
        assert self._copier is not None
        self._copier.keep(generation, stage, snapshot)

    def copied(self, generation: int, step: int) -> None:
        """Record that the copies of that step are all in place: earlier ones are no longer needed."""
        if self._copier is not None:
            self._copier.settled(generation, step)

    def copy_to(self, generation: int, buddy: Buddy | None) -> None:
        """Send the copies of its state to another worker from now on."""
        if self._copier is not None:
            self._copier.send_to(generation, buddy)

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
        if self._saver is not None:
            self._saver.settled(step, generation)

    def interrupt(
        self, generation: int, rings: frozenset[tuple[str, int]], replicas: frozenset[tuple[str, int]]
    ) -> Activity:
        """Leave the worlds whose members listen at these addresses; return what the training thread does now."""
        if not self._stale(generation, "an interrupt"):
            self._control.interrupt(generation)
        if self._control.generation == generation:
            cut(rings, listeners=self._plan is not None and self._plan.collective == "horovod")
            cut(replicas, listeners=False)
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
        held = None if self._stepper is None or self._control.generation != generation else self._stepper.held
        self._aside = held is not None
        if held is None:
            return None
        return self._outcome("interrupted")

    def inventory(self, step: int, stage: Stage) -> list[Entry]:
        """Return the tensors of that stage's state after `step`.

        Raises `Interrupted` if this worker has neither that state nor an undamaged copy.
        """
        self._copied_state = None
        if not self.has_copy(step, stage):
            raise Interrupted(f"{self._name} has neither {stage} of step {step} nor a copy of it")
        state = self._state_of(step, stage)
        check_finite(state.items(), self._allowed(step, stage), step)
        return [entry_of(name, value) for name, value in state.items()]

    def _allowed(self, step: int, stage: Stage) -> Collection[str]:
        """Return the tensors of a state that may hold NaN or infinity."""
        if (own := self._stepper_at(step, stage)) is not None:
            return own.allowed
        found = None if self._copier is None else self._copier.find(step, stage)
        return () if found is None else json.loads(found.values)["allowed"]

    def tensors(self, step: int, stage: Stage, names: Sequence[str]) -> list[Array]:
        """Return the bytes of the named tensors."""
        state = self._state_of(step, stage)
        found = [bytes_of(state[name].cpu()).numpy() for name in names]
        # Check that it still is that state.
        self._state_of(step, stage)
        return found

    def _state_of(self, step: int, stage: Stage) -> Mapping[str, torch.Tensor]:
        """Return the tensors of one state; those of a copy are kept until another state is requested."""
        if (own := self._stepper_at(step, stage)) is not None:
            self._copied_state = None
            return _state(own)
        if self._copied_state is None or self._copied_state[0] != (step, stage):
            found = None if self._copier is None else self._copier.find(step, stage)
            if found is None:
                raise Interrupted(f"{self._name} no longer has a copy of {stage} of step {step}")
            self._copied_state = (step, stage), hashed(found)
        return self._copied_state[1]

    def show(self, step: int) -> str | None:
        """Return what the task shows of the model after `step`, which is in the run's folder."""
        return self._do(lambda: self._show(step))

    def _outcome(self, why: Why) -> Outcome:
        """Return what this worker holds now."""
        stepper, saver = self._stepper, self._saver
        assert saver is not None
        if stepper is None:
            return Outcome(holds=None, why=why)
        staged = self._stage is not None and self._stage.of > 1
        return Outcome(
            holds=stepper.held,
            why=why,
            stage=self._stage,
            ready=stepper.ready if staged else None,
            copy=None if self._copier is None else self._copier.own(),
            squares=stepper.squares,
            copied=saver.copied,
            saved_as=saver.generation,
        )

    def _stale(self, generation: int, what: str) -> bool:
        """Whether a call is for a generation that is over here: then it is refused."""
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

    def _do(self, work: Callable[[], T]) -> T:
        def told() -> T:
            try:
                return work()
            except RaytrainError:
                raise
            except (Exception, SystemExit) as error:
                raise _users_error(error) from None
            finally:
                self._control.enter("idle")

        return told() if self._aside else self._thread.submit(told).result()

    def _prepare(self, plan: Plan, limit_s: float) -> Ready:
        self._control.patience(limit_s)
        self._control.enter("preparing")
        fault = "" if plan.probe is None else amiss_with(plan.probe)
        if fault:
            raise refusal(os.uname().nodename, fault, plan.job.storage)
        torch.set_num_threads(plan.job.workers.threads)
        if plan.job.reduction == "exact":
            repeatable()
        if plan.collective == "horovod":
            try:
                load_horovod()
            except Exception as error:
                raise InputError(
                    f"Horovod does not load on {os.uname().nodename}: {error}",
                    where="collective: horovod",
                    remedy=f"{REMEDY}, on every node",
                ) from None
        # What runs from here on may have threads of its own.
        sys.path[:0] = [root for root in plan.roots if root not in sys.path]
        roots = [Path(root) for root in plan.roots]
        job = plan.job
        if plan.pickled_task is not None:
            cls = cloudpickle.loads(plan.pickled_task)
        else:
            assert isinstance(job.task, str), "a class is sent pickled"
            cls = load_task(job.task, roots)
        # With what this node sees of the files; the driver may see copies of its own.
        plan = replace(
            plan,
            index=_same_data(plan, roots, plan.index),
            held_out=None if plan.held_out is None else _same_data(plan, roots, plan.held_out),
        )
        set_random_key(random_key(job.seed, "task"))
        self._plan = plan
        self._task = task = build_task(cls, job.args)
        if job.parallel.pipeline == 1:
            self._build(WHOLE)
        self._copier = Copier(self._name, self._holding, job.elastic.copy_every)
        self._saver = Saver(
            open_folder(plan.folder),
            self._holding,
            job.checkpoint.every_steps,
            best=job.checkpoint.keep_best is not None,
        )
        transform = load_function(job.data.transform, roots) if job.data.transform else None
        self._rows = _rows(plan.index, line_of(job, plan.index), job, transform)
        self._evaluation = _evaluation(plan, task.collate, transform)
        if self._stepper is None:
            return replace(self._measured(), sights=_sights(plan))
        trained = [value for _, value in self._stepper.named]
        held = [*self._stepper.module.parameters(), *self._stepper.module.buffers()]
        return Ready(
            parameters=sum(value.numel() for value in trained),
            # An optimizer has two numbers, as a rule, for each weight that it trains.
            state_bytes=sum(value.nbytes for value in held) + 2 * sum(value.nbytes for value in trained),
            sights=_sights(plan),
        )

    @property
    def _device(self) -> torch.device:
        assert self._plan is not None
        return torch.device("cuda", 0) if self._plan.job.workers.gpus else torch.device("cpu")

    def _holding(self) -> Holding:
        assert self._stepper is not None
        return self._stepper.holding()

    def _build(self, layers: Layers) -> None:
        """Build the model, or a stage of it, with its initial values."""
        assert self._plan is not None
        assert self._task is not None
        job, task = self._plan.job, self._task
        self._stepper = self._stage = None
        with told_as_task_error(f"{type(task).__name__} cannot be built", f"task: {job.task}"):
            if layers.chunks:
                built = build_chunks(task, job.seed, self._device, layers.chunks)
            else:
                built = (build_model(task, job.seed, self._device),)
            self._stepper = Stepper(
                task,
                built,
                seed=job.seed,
                shards=job.data.shards,
                clip_norm=job.clip_norm,
                device=self._device,
                exact=job.reduction == "exact",
                skip_nonfinite=job.elastic.on_nonfinite == "skip",
            )
        check_storable(self._stepper.holding())
        self._stage = layers.stage

    def _measured(self) -> Ready:
        """Measure the cost of each layer, which also warms up what a first step needs."""
        assert self._plan is not None
        assert self._task is not None
        assert self._rows is not None
        # Also loads torch's schedules before the first world forms.
        from raytrain_plus.training.measure import measured, room_of
        from raytrain_plus.training.staged import Staged  # noqa: F401

        job = self._plan.job
        batch = first_microbatch(self._rows, job.parallel.microbatches, self._task.collate)
        self._classes = classes_of(batch.batch)
        found = measured(self._task, job.seed, self._device, batch, overlaps=job.parallel.overlaps)
        return Ready(
            parameters=sum(layer.parameters for layer in found),
            state_bytes=sum(layer.bytes for layer in found),
            layers=found,
            room=room_of(self._device),
        )

    def _rehearse(self) -> None:
        assert self._plan is not None
        if self._plan.job.parallel.pipeline > 1:
            # It has measured the layers, which amounts to a step, and has no state that it could lose.
            return
        assert self._stepper is not None
        self._control.patience(FIRST_STEP_S)
        self._control.enter("preparing")
        with self._open_feed((0,), 0, stream=False) as feed:
            batches = feed.get(0, FIRST_STEP_S)
            self._stepper.run(0, batches.shards, SoloWorld(), control=Control(), wait_s=FIRST_STEP_S)
        self._stepper.held = None

    def _restore(self, manifest: Manifest, layers: Layers) -> None:
        assert self._plan is not None
        if self._stage != layers.stage:
            self._build(layers)
        assert self._stepper is not None
        stepper, run = self._stepper, open_folder(self._plan.folder)
        stored = own_tensors(manifest.tensors, layers.others)
        built = {
            name: (dtype_name(value.dtype), tuple(value.shape))
            for name, value in model_state(stepper.holding()).items()
        }
        differing = mismatch(stored, built) or other_classes(manifest.tree, stepper.holding())
        if differing:
            rest = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise CheckpointError(
                f"the checkpoint belongs to another task: {'; '.join(differing[:3])}{rest}",
                where=f"{run.where}/{FOLDER}/{manifest.name}.json",
                remedy="use the layers, optimizer and args that the run began with, or start over with --fresh",
            )
        try:
            tensors = tried(lambda: read_tensors(run, manifest, dict.fromkeys(stored)))
        except StorageError as failure:
            raise StorageError(f"the checkpoint {manifest.name} cannot be read: {failure}") from failure
        bad = not_finite(as_tensors(tensors), stepper.allowed)
        if bad:
            # Older versions wrote such checkpoints.
            raise DamagedError(f"'{bad[0]}' holds NaN or infinity", where=f"{run.where}/{FOLDER}/{manifest.name}.json")
        tree = own_tree(manifest.tree, layers.others)
        stepper.adopt(Snapshot(manifest.step, tensors, json.dumps(tree).encode(), ""))

    def _keep(self, controller: Any, share: ShareOf) -> None:
        assert self._stepper is not None
        assert self._saver is not None
        assert self._stepper.held is not None
        held = self._stepper.held
        self._saver.begin(self._part(controller, share, lambda: None))
        self._saver.copy(held, {})
        self._unchanged_since(held)

    def _unchanged_since(self, held: int) -> None:
        assert self._stepper is not None
        if self._stepper.held != held:
            raise RunError("the worker's state changed while it was being copied")

    def _part(self, controller: Any, share: ShareOf, report: Callable[[], None]) -> Part:
        def tell(written: Written) -> None:
            # A checkpoint counts once its step is known to be committed.
            report()
            for _ in range(TELL_TRIES):
                with contextlib.suppress(RayError):
                    ray.get(controller.written.remote(written), timeout=FLUSH_S)
                    return

        return Part(share, tell)

    def _serve(self, controller: Any, assignment: Assignment) -> Outcome:
        assert self._plan is not None
        assert self._saver is not None
        control, generation = self._control, assignment.generation
        reporter = Reporter(lambda records: controller.report.remote(self._name, generation, records))
        self._saver.begin(self._part(controller, assignment.share, reporter.soon))

        def copied(sent: Sent) -> None:
            # A copy counts once its step is known to be committed.
            reporter.soon()
            controller.copied.remote(sent)

        assert self._copier is not None
        self._copier.begin(
            generation,
            assignment.layers.stage,
            assignment.copies,
            assignment.buddy,
            copied,
        )
        outcome = Outcome(holds=None, why="interrupted")
        joined = False
        try:
            with ExitStack() as stack:
                control.patience(assignment.ring.timeout_s)
                control.enter("joining")
                control.check()
                # Its first batches are made while the world forms.
                feed = self._feed_of(assignment, stack)
                stack.enter_context(reporter)
                self._take_place(assignment)
                world, form_s = self._join(assignment, stack)
                joined = True
                controller.joined.remote(self._name, generation, form_s)
                why = self._train(assignment, feed, world, lambda record: self._made(record, reporter.tell))
                if why == "finished":
                    self._check_data()
            self._go_back_to_before()
            outcome = self._outcome(why)
            if why == "finished":
                assert self._stepper is not None
                outcome = replace(outcome, state_sha256=_sha256(self._stepper))
        except (Interrupted, WaitExpired) as error:
            # The loss of a peer is reported by others, in more detail.
            known = control.interrupted() or (joined and isinstance(error, Interrupted))
            self._go_back_to_before()
            outcome = replace(self._outcome("interrupted"), fault="" if known else str(error))
        except RaytrainError as error:
            final = isinstance(error, (TrainingError, TaskError, DataChanged))
            fault = f"{type(error).__name__}: {error}"
            self._go_back_to_before()
            outcome = replace(self._outcome("failed"), error=error, fault=fault, final=final)
        # SystemExit would end the process, as if it had been lost.
        except (Exception, SystemExit) as error:
            self._go_back_to_before()
            outcome = replace(self._outcome("failed"), error=_users_error(error), fault=fault_of(error))
        self._copier.end()
        self._given.clear()
        control.enter("idle")
        return replace(outcome, records=reporter.rest())

    def _check_data(self) -> None:
        """Compare all data files with what this worker first saw of them. Raises `DataChanged` if one has changed."""
        assert self._plan is not None
        self._control.patience(FIRST_STEP_S)
        self._control.enter("data")
        for seen in filter(None, (self._plan.index, self._plan.held_out)):
            check_unchanged(seen)

    def _take_place(self, assignment: Assignment) -> None:
        """Build what this member is to hold, if it holds something else or must start over."""
        if self._stage == assignment.layers.stage and assignment.lacks != "initial":
            return
        # Building discards what it holds: others copy that first.
        while self._given[assignment.generation] < assignment.gives:
            self._control.check()
            time.sleep(LOOK_S)
        if assignment.lacks == "stage":
            assert self._stepper is not None
            assert self._stage is not None
            self._before = self._stage, self._stepper
        # Meanwhile it waits for nobody, whichever worker is lost.
        self._control.enter("preparing")
        self._build(assignment.layers)
        self._control.check()
        self._control.enter("joining")

    def _made(self, record: StepRecord | Evaluated, tell: Callable[[Any], None]) -> None:
        """Report a record. A step of the generation proves that all its members have the state that they need."""
        if isinstance(record, StepRecord):
            self._before = None
        tell(record)

    def _go_back_to_before(self) -> None:
        """Restore the previous state if the generation ends before its first step: no other worker may have it.

        With more stages than before it now has less of the model; otherwise the state that it took is as good.
        """
        before, self._before = self._before, None
        if before is None:
            return
        stepper, stage = self._stepper, self._stage
        taken = stepper is not None and stepper.held is not None and stepper.held == before[1].held
        if not taken or stage is None or stage.of > before[0].of:
            self._stage, self._stepper = before

    def _join(self, assignment: Assignment, stack: ExitStack) -> tuple[World, float]:
        """Form its worlds, which `stack` leaves, and take the state if there is one to take.

        Return the world of its ring, and how many seconds the forming took.
        """
        assert self._plan is not None
        assert self._stepper is not None
        start = time.monotonic()
        world = self._form(assignment.ring)
        # Registered last, left first: others wait until this world is left, not for the rest.
        stack.callback(self._leave, world)
        if assignment.replica is not None:
            # torch's schedules take a while to load: they are loaded here, when needed.
            from raytrain_plus.training.pipedream import PipeDream
            from raytrain_plus.training.staged import Staged

            replica = TorchWorld(assignment.replica)
            stack.callback(self._leave, replica)
            kind = PipeDream if self._plan.job.parallel.overlaps else Staged
            self._stepper.passes = kind(
                self._stepper.task,
                self._stepper.parts,
                replica,
                schedule=self._plan.job.parallel.schedule,
                stages=assignment.layers.stage.of,
                device=self._device,
                shards=self._plan.job.data.shards,
                classes=self._classes,
                tied=assignment.layers.apart(self._stepper.tied),
            )
        form_s = time.monotonic() - start
        if assignment.lacks in ("newer", "stage"):
            self._stepper.adopt(self._copied(assignment))
        return world, form_s

    def _form(self, formation: Formation) -> World:
        assert self._plan is not None
        if formation.size == 1:
            return SoloWorld()
        return HorovodWorld(formation) if self._plan.collective == "horovod" else TorchWorld(formation)

    def _leave(self, world: World) -> None:
        self._control.enter("leaving")
        world.close()
        self._control.enter("idle")

    def _wait_for(self, future: Future[T]) -> T:
        """Wait for `future`. Raises `Interrupted` if this worker must leave meanwhile."""
        while not future.done():
            self._control.check()
            wait([future], LOOK_S)
        return future.result()

    def _copied(self, assignment: Assignment) -> Snapshot:
        """Return what `take` fetched. Raises `Interrupted` if it does not arrive."""
        try:
            snapshots = self._wait_for(self._copies.setdefault(assignment.generation, Future()))
        finally:
            # Nothing keeps the copy, and the object store's memory, once it is in place.
            self._copies.clear()
        for snapshot in snapshots:
            if snapshot.step != assignment.first_step - 1:
                raise Interrupted(f"the donor's state is of step {snapshot.step}, not {assignment.first_step - 1}")
        return restricted(snapshots, assignment.layers.others)

    def _fetch(self, generation: int, reference: Any) -> Snapshot:
        """Return the donor's undamaged state. Raises `Interrupted` if it does not arrive."""
        while not ray.wait([reference], timeout=LOOK_S)[0]:
            if self._control.over(generation):
                raise Interrupted("the group changes")
        return _received(reference)

    def _train(self, assignment: Assignment, feed: Feed, world: World, tell: Callable[[Any], None]) -> Any:
        assert self._plan is not None
        assert self._stepper is not None
        assert self._saver is not None
        assert self._copier is not None
        job = self._plan.job
        return train(
            self._stepper,
            feed,
            world,
            hosted=assignment.shards,
            shards=job.data.shards,
            first_step=assignment.first_step,
            steps=self._plan.steps,
            window=self._window_of(assignment),
            evaluation=self._evaluation_of(assignment.layers.stage),
            evaluated=assignment.evaluated,
            limits=Limits(
                step_s=job.elastic.hang_timeout_s, first_step_s=FIRST_STEP_S, wait_s=assignment.ring.timeout_s
            ),
            saving=self._saver,
            copying=self._copier,
            tell=tell,
            control=self._control,
        )

    def _feed_of(self, assignment: Assignment, stack: ExitStack) -> Feed:
        """Return the source of a member's batches; only the first stage reads data."""
        assert self._plan is not None
        if assignment.layers.stage.number:
            job = self._plan.job
            return Counts(line_of(job, self._plan.index), assignment.shards, job.parallel.microbatches)
        return stack.enter_context(self._open_feed(assignment.shards, assignment.first_step, stream=True))

    def _window_of(self, assignment: Assignment) -> Window | None:
        """Return how many steps are committed together, if steps overlap."""
        assert self._plan is not None
        job = self._plan.job
        if not job.parallel.overlaps:
            return None
        counts = Counts(line_of(job, self._plan.index), assignment.shards, job.parallel.microbatches)
        return Window(every=job.parallel.commit_every, counted=lambda step: counts.get(step, 0.0).shards)

    def _evaluation_of(self, stage: Stage) -> Evaluation | None:
        """Return the evaluation of that stage; later stages get only the row counts of the held-out data."""
        plan, found = self._plan, self._evaluation
        if found is None or not stage.number:
            return found
        assert plan is not None
        assert plan.held_out is not None
        line = evaluation_line(plan.job, plan.held_out)
        rows = microbatch_rows(line, plan.job.parallel.microbatches)
        return replace(found, batches=lambda shard: held_out_counts(line, shard, rows))

    def _open_feed(self, hosted: tuple[int, ...], first_step: int, *, stream: bool) -> Batches:
        assert self._plan is not None
        assert self._task is not None
        assert self._rows is not None
        plan, job = self._plan, self._plan.job
        node = ray.get_runtime_context().get_node_id()
        self._feed = Batches(
            self._rows,
            shards=hosted,
            first_step=first_step,
            microbatches=job.parallel.microbatches,
            collate=self._task.collate,
            cache_mb=job.data.cache_mb,
            make_stream=functools.partial(open_stream, node=node, roots=plan.roots) if stream else None,
            before=self._feed,
        )
        return self._feed

    def _show(self, step: int) -> str | None:
        assert self._task is not None
        if type(self._task).show is Task.show:
            return None
        stepper = self._stepper_at(step, WHOLE.stage)
        if stepper is None:
            return self._show_whole()
        if self._aside:
            # The model is in use.
            return None
        stepper.restore_buffers()
        return _shown(stepper.task, stepper.module)

    def _show_whole(self) -> str | None:
        """Return what the task shows of a model that no worker holds whole: it is loaded from the run's folder."""
        assert self._plan is not None
        assert self._task is not None
        run = open_folder(self._plan.folder)
        try:
            local = run.path_of(MODEL)
            weights = safetensors.torch.load(run.read(MODEL)) if local is None else safetensors.torch.load_file(local)
            module = build_model(self._task, self._plan.job.seed, torch.device("cpu")).module
            # A parameter that a layer shares internally has one name here, and two there.
            module.load_state_dict(weights, strict=False)
        except Exception as error:
            return f"the whole model could not be assembled for Task.show: {type(error).__name__}: {error}"
        return _shown(self._task, module)


def _received(reference: Any) -> Snapshot:
    """Return an undamaged state from Ray's object store. Raises `Interrupted` if it does not arrive."""
    try:
        snapshot: Snapshot = ray.get(reference)
    except RayError as error:
        raise Interrupted(f"the donor's state did not arrive: {type(error).__name__}") from None
    if digest(snapshot.step, snapshot.tensors, snapshot.values) != snapshot.digest:
        raise Interrupted("the donor's state arrived damaged")
    return snapshot


def _shown(task: Task, module: nn.Module) -> str | None:
    module.eval()
    try:
        with torch.no_grad():
            return task.show(module)
    except Exception as error:
        # A failure here must not lose the model.
        return f"Task.show failed: {_users_error(error)}"


def _rows(seen: Index, line: Line, job: Job, transform: Transform | None) -> Rows:
    return Rows(index=seen, line=line, seed=job.seed, transform=transform, granule=job.data.granule)


def _evaluation(plan: Plan, collate: Collate, transform: Transform | None) -> Evaluation | None:
    job, seen = plan.job, plan.held_out
    if job.evaluate is None or seen is None:
        return None
    rows = _rows(seen, evaluation_line(job, seen), job, transform)
    size = microbatch_rows(rows.line, job.parallel.microbatches)
    return Evaluation(every_steps=job.evaluate.every_steps, batches=lambda shard: held_out(rows, shard, size, collate))


def _state(stepper: Stepper) -> dict[str, torch.Tensor]:
    """Return the tensors that the state's hash covers."""
    return {**saved_model(stepper.holding()), **optimizer_state(stepper.optimizer, stepper.named)}


def _sha256(stepper: Stepper) -> str:
    return state_sha256(_state(stepper))


def open_stream(*arguments: Any, **settings: Any) -> Any:
    """Open a Ray Data stream; Ray Data is loaded here, when the first one is needed, because that takes a second."""
    from raytrain_plus.data.stream import Stream

    return Stream(*arguments, **settings, first=ray_data_on_the_head)


def _same_data(plan: Plan, roots: list[Path], expected: Index) -> Index:
    """Make the data if this node lacks it, compare it with what the driver saw, and return it as this node sees it.

    Raises `DataChanged` if a file has changed since an earlier worker on this node first saw it, `DataError` if the
    data differs from the driver's.
    """
    # Not as the job names it: a path may be relative to the driver's working directory.
    path = expected.path
    prepare(plan.job.data.prepare, path, roots)
    first = plan.sights.get(path)
    if first is not None:
        check_unchanged(replace(expected, file_sights=first))
    seen = index(path)
    if seen.fingerprint != expected.fingerprint:
        found = differences(seen.to_json(), expected.to_json())
        raise DataError(
            f"this node ({os.uname().nodename}) sees different data than the driver: {'; '.join(found[:3])}",
            where=path,
            expected=f"the data with the fingerprint {expected.fingerprint[:12]}, not {seen.fingerprint[:12]}",
            remedy="put the same files there on every node, or name a shared folder",
        )
    return seen if first is None else replace(seen, file_sights=first)


def _sights(plan: Plan) -> dict[str, tuple[Sight, ...]]:
    return {seen.path: seen.file_sights for seen in (plan.index, plan.held_out) if seen is not None}


def _users_error(error: BaseException) -> TrainingError:
    kind = type(error).__name__
    what = f"the task raised {kind}: {error}"
    # What torch's CPU allocator raises has no type of its own.
    no_memory = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    if no_memory or isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        what = f"out of memory ({kind}): {error}; use more microbatches, a smaller batch, or a larger machine"
    return TrainingError(what, trim_traceback(error))
