"""Prepare a worker: check this node's storage, libraries and data, then import and build the task."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import cloudpickle
import torch

from raytrain_plus.collective.horovod_world import load_horovod
from raytrain_plus.collective.nccl import set_up_nccl
from raytrain_plus.data.of_job import held_out_rows_of, rows_of
from raytrain_plus.data.reading.transform_block import Transform, with_draws
from raytrain_plus.device_copies import pinned
from raytrain_plus.errors import InputError
from raytrain_plus.generators import set_random_key
from raytrain_plus.install.horovod_usable import REMEDY
from raytrain_plus.job.settings import Job
from raytrain_plus.job.task_loader import as_task_error, load_function, load_task
from raytrain_plus.membership.events import Why
from raytrain_plus.parallel.pipeline.message import KNOWN, Classes, classes_of
from raytrain_plus.parallel.pipeline.partition import Layer
from raytrain_plus.parallel.tensor.link import Link
from raytrain_plus.state.holding import NEW_RULES, rules_of
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.probe import find_probe_fault, refusal
from raytrain_plus.task import Task
from raytrain_plus.training.model.randomness import make_deterministic, random_key
from raytrain_plus.training.step.build import build_state, divided_layers, slicing_of, task_of
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.optimized_rows import Named, row_counts_of
from raytrain_plus.training.weights.shardable import Division
from raytrain_plus.training.weights.step_options import technique_of
from raytrain_plus.trial.measure import measure_layers
from raytrain_plus.trial.memory_limits import total_memory
from raytrain_plus.trial.task_trial import Trial, check_alike, try_task
from raytrain_plus.workers.machine.gpu import Gpu, gpu_of
from raytrain_plus.workers.messages import WHOLE, Layers, Outcome, Plan, PreparedReport
from raytrain_plus.workers.preparation.data_check import same_data, sights_of
from raytrain_plus.workers.preparation.feeds import Feeds
from raytrain_plus.workers.states.held_state import OwnState
from raytrain_plus.workers.states.saver import Saver
from raytrain_plus.workers.states.state_copier import Copier
from raytrain_plus.workers.states.state_source import StateSource


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Everything that a prepared worker has."""

    plan: Plan
    """With the data as this node sees it."""
    task: Task
    device: torch.device
    classes: Classes
    """The classes of the objects in a batch, if batches pass from worker to worker."""
    feeds: Feeds
    own: OwnState
    """Empty until the worker's stage is known, if the model is held in parts."""
    source: StateSource
    copier: Copier
    saver: Saver
    gpu: Gpu | None = None
    """Its GPU; None without one."""

    @property
    def sharded(self) -> bool:
        """Whether each worker holds the optimizer's state of some rows only."""
        return self.plan.job.parallel.sharded != "none"

    def run_folder(self) -> Folder:
        """Open the run's folder."""
        return open_folder(self.plan.folder)

    def outcome(self, why: Why) -> Outcome:
        """Return what this worker holds now."""
        now = self.own.now
        if now is None:
            return Outcome(holds=None, why=why)
        return Outcome(
            holds=now.state.last_applied,
            why=why,
            stage=now.stage,
            ready=now.state.ready if now.stage.layout != (1, 1) or self.sharded else None,
            owned=now.state.trained.owned if self.sharded else None,
            complete=now.state.complete,
            copy=self.copier.own(),
            squares=now.state.squares,
            copied=self.saver.copied,
            saved_as=self.saver.generation,
        )


def device_of(job: Job) -> torch.device:
    """Return the device on which this process computes: Ray shows it one GPU, or none."""
    return torch.device("cuda", 0) if job.workers.gpus else torch.device("cpu")


def prepare_worker(worker: str, plan: Plan) -> tuple[Prepared, PreparedReport]:
    """Prepare the worker of that name; make the data if this node lacks it. Raises what is wrong with task or data."""
    _check_storage(plan)
    torch.set_num_threads(plan.job.workers.threads)
    if plan.job.reduction == "exact":
        make_deterministic()
    _set_up(plan.collective)
    # What runs from here on may have threads of its own.
    sys.path[:0] = [root for root in plan.roots if root not in sys.path]
    roots, job = [Path(root) for root in plan.roots], plan.job
    cls = _task_class(plan, roots)
    # With what this node sees of the files; the driver may see copies of its own.
    plan = replace(
        plan,
        data=same_data(plan, roots, plan.data),
        held_out=None if plan.held_out is None else same_data(plan, roots, plan.held_out),
    )
    device = device_of(job)
    technique_of(job, device).precision.set_up()
    transform = load_function(job.data.transform, roots) if job.data.transform else None
    # No thread of this process trains yet.
    draws = with_draws(rows_of(job, plan.data, transform)).draws
    rules = NEW_RULES if plan.resumed is None else rules_of(plan.resumed)
    trial = _trial(plan, cls, device, transform, rules, draws=draws) if plan.trial else None
    set_random_key(random_key(job.seed, "task"))
    task = task_of(job, cls, plan.steps, plan.data.rows)

    def build(layers: Layers) -> TrainState:
        with as_task_error(f"{type(task).__name__} cannot be built", f"task: {job.task}"):
            link = Link(layers.stage.rank, layers.stage.ranks)
            state = build_state(job, task, device, layers.chunks, link)
        # Before it has a state, it makes a step to warm up.
        state.rules.update(rules)
        return state

    own = OwnState(build)
    if not job.parallel.in_parts:
        built = own.build(WHOLE)
        if trial is not None and trial.initial:
            check_alike(trial, built, f"task: {job.task}")
    copier = Copier(worker, own.holding, job.elastic.copy_every)
    best = job.best is not None
    saver = Saver(
        open_folder(plan.folder),
        own.holding,
        job.checkpoint.every_steps,
        best,
    )
    feeds = Feeds(plan, task.collate, transform, pinned if device.type == "cuda" else None, draws=draws)
    ready, classes = _reported(job, task, device, own, feeds, trial)
    gpu = gpu_of(device)
    made = Prepared(
        plan=plan,
        task=task,
        device=device,
        classes=classes,
        feeds=feeds,
        own=own,
        source=StateSource(worker, own, copier),
        copier=copier,
        saver=saver,
        gpu=gpu,
    )
    return made, replace(ready, sights=sights_of(plan), gpu="" if gpu is None else gpu.model)


def _reported(
    job: Job, task: Task, device: torch.device, own: OwnState, feeds: Feeds, trial: Trial | None
) -> tuple[PreparedReport, Classes]:
    """Return the size of the model, and the classes of the objects in a batch if batches pass between workers."""
    if not job.parallel.in_parts:
        return _size_of(own.state), KNOWN
    first = feeds.first()
    # To measure the layers warms up what a first step needs; a trial has done so.
    layers = (
        trial.layers
        if trial is not None
        else measure_layers(
            task,
            job.seed,
            technique_of(job, device),
            first,
            job.parallel.overlaps,
            slicing_of(job, task),
            in_one=job.parallel.in_one_stage,
        )
    )
    ready = _size_of_layers(layers, device, staged=job.parallel.pipeline > 1)
    if job.parallel.sharded != "none":
        named, division = divided_layers(job, task, device)
        ready = replace(ready, rows=_row_sizes(named, row_counts_of(named, division.undivided), division))
    return ready, classes_of(first.batch)


def _trial(
    plan: Plan,
    cls: type[Task],
    device: torch.device,
    transform: Transform | None,
    rules: Mapping[str, bool],
    *,
    draws: bool,
) -> Trial:
    """Try the task, and free what that has built."""
    rows, held_out = rows_of(plan.job, plan.data, transform), None
    if plan.held_out is not None:
        held_out = replace(held_out_rows_of(plan.job, plan.held_out, transform), draws=draws)
    found = try_task(plan.job, cls, device, replace(rows, draws=draws), held_out, rules)
    # Hooks tie a model and its gradients into cycles. A training function that waits holds its model until the first
    # pass has freed it.
    gc.collect()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def _check_storage(plan: Plan) -> None:
    """Raise `InputError` if this node has another storage than the controller."""
    fault = "" if plan.probe is None else find_probe_fault(plan.probe)
    if fault:
        raise refusal(os.uname().nodename, fault, plan.job.storage)


def _set_up(collective: str) -> None:
    """Check, or set up, what the library that sums needs in this process."""
    if collective == "horovod":
        _check_horovod()
    elif collective == "nccl":
        set_up_nccl()


def _check_horovod() -> None:
    """Load Horovod. Raises `InputError` if this node has none that loads."""
    try:
        load_horovod()
    except Exception as error:
        raise InputError(
            f"Horovod does not load on {os.uname().nodename}: {error}",
            where="collective: horovod",
            remedy=f"{REMEDY}, on every node",
        ) from None


def _task_class(plan: Plan, roots: list[Path]) -> type[Task]:
    if plan.pickled_task is not None:
        cls: type[Task] = cloudpickle.loads(plan.pickled_task)
        return cls
    assert isinstance(plan.job.task, str), "a class is sent pickled"
    return load_task(plan.job.task, roots)


def _size_of(state: TrainState) -> PreparedReport:
    """Return the size of the whole model and its state."""
    modules = [part.module for part in state.parts]
    held = [value for module in modules for value in (*module.parameters(), *module.buffers())]
    trained, dtypes = state.trained.weights, state.trained.dtypes
    changed = sum(value.numel() * dtypes[name].itemsize for name, value in trained)
    return PreparedReport(
        parameters=sum(value.numel() for name, value in trained if name not in state.tied),
        # An optimizer has two numbers, as a rule, for each weight that it trains.
        state_bytes=sum(value.nbytes for value in held) + 2 * changed,
        rows=_rows_held(state),
    )


def _rows_held(state: TrainState) -> dict[str, tuple[int, int, int]]:
    """Return the rows of each weight, and their bytes, if the state can be divided: see `PreparedReport.rows`."""
    trained, division = state.trained, state.division
    if division is None:
        return {}
    rows = _row_sizes(trained.weights, trained.row_counts, division)
    for name, value in trained.weights if trained.gathered else ():
        # The rows of the weights themselves, too.
        count, row_bytes, held = rows[name]
        rows[name] = count, row_bytes, held + value.numel() * trained.dtypes[name].itemsize // max(1, count)
    return rows


def _row_sizes(weights: Named, row_counts: Mapping[str, int], division: Division) -> dict[str, tuple[int, int, int]]:
    """Return `PreparedReport.rows`, given how many rows each weight has."""
    return {
        name: (row_counts[name], value.nbytes // max(1, row_counts[name]), division.state_bytes[name])
        for name, value in weights
    }


def _size_of_layers(found: tuple[Layer, ...], device: torch.device, *, staged: bool) -> PreparedReport:
    """Return the size of the model, given the cost of its layers."""
    if staged:
        # Loads torch's schedules before the first world forms.
        from raytrain_plus.parallel.pipeline import schedule  # noqa: F401

    return PreparedReport(
        parameters=sum(layer.own_parameters for layer in found),
        state_bytes=sum(layer.bytes for layer in found),
        layers=found,
        room=total_memory(device),
    )
