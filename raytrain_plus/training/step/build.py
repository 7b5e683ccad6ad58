"""Build the training state of a job's model, or of a stage of it, and the steps of a whole one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from raytrain_plus.data.values.collate import set_collate
from raytrain_plus.job.settings import Job
from raytrain_plus.job.task_loader import build_task, run_facts
from raytrain_plus.membership.owners import balanced
from raytrain_plus.parallel.half_precision import ring_wire
from raytrain_plus.parallel.pipeline.layout import Chunks
from raytrain_plus.parallel.sizing import most_workers
from raytrain_plus.parallel.tensor.link import Link
from raytrain_plus.parallel.tensor.slice_plan import words_for
from raytrain_plus.parallel.tensor.slicing import Slicing
from raytrain_plus.parallel.wire import MakeWire
from raytrain_plus.state.hostcopy import check_storable
from raytrain_plus.task import Task
from raytrain_plus.training.model.model import (
    Built,
    as_one,
    build_chunks,
    build_layers,
    build_model,
    layer_names,
    model_without_values,
)
from raytrain_plus.training.model.recompute import check_layers
from raytrain_plus.training.passes.by_layer import ByLayer
from raytrain_plus.training.passes.passes import Passes
from raytrain_plus.training.passes.whole_model import WholePasses
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.optimized_rows import Named
from raytrain_plus.training.weights.optimizer import takes_model
from raytrain_plus.training.weights.shardable import Division, divide
from raytrain_plus.training.weights.step_options import technique_of


def task_of(job: Job, cls: type[Task], steps: int, rows: int = 0) -> Task:
    """Return an instance of the task for a run of `steps` steps; `rows`: see `RunFacts`.

    Raises the errors of `build_task`.
    """
    task = build_task(cls, job.args, run_facts(job, steps, rows))
    set_collate(task, job.data.collate)
    return task


def slicing_of(job: Job, task: Task, link: Link | None = None) -> Slicing | None:
    """Return how the job cuts its model into slices; None if it does not. `link`: see `Slicing`."""
    parallel = job.parallel
    if parallel.slices == 1:
        return None
    experts = parallel.experts > 1
    plan = words_for(task.tensor(), tensor=parallel.tensor > 1, experts=experts)
    return Slicing(plan, parallel.slices, link or Link(), experts)


def build_state(
    job: Job, task: Task, device: torch.device, chunks: Chunks = (), link: Link | None = None
) -> TrainState:
    """Build the state of the model, or of the `chunks` of a stage, with its initial values.

    `link`: says which slices of the layers are hosted here, and reaches the others. Raises `TaskError` for a model that
    cannot be trained, and what the task raises.
    """
    full = job.parallel.sharded == "full"
    slicing = slicing_of(job, task, link)
    built: Sequence[Built] = ()
    if full:
        check_layers(job.recompute, layer_names(task, job.seed))
    elif chunks:
        built = build_chunks(task, job.seed, device, chunks, slicing)
    else:
        built = (build_model(task, job.seed, device, slicing),)
        check_layers(job.recompute, built[0].layers)
    division = None
    if job.parallel.sharded != "none":
        parts = build_layers(task, job.seed, device) if full else built
        model = None if full else as_one([one.module for one in built])
        division = divide(task, _trained(parts), on_host=job.offload == "optimizer", model=model)
    state = TrainState(
        task,
        built,
        Summing(job.data.shards, job.reduction == "exact", _wire(job)),
        seed=job.seed,
        technique=technique_of(job, device),
        division=division,
        rebuild=(lambda: build_layers(task, job.seed, device)) if full else None,
        link=link,
    )
    check_storable(state.holding())
    return state


def divided_layers(job: Job, task: Task, device: torch.device) -> tuple[Named, Division]:
    """Return the trained weights of all layers, without values, and how the optimizer's state can be divided.

    One layer after the other is built. Raises the errors of `divide`, and what the task raises.
    """
    named = []

    def trained() -> Iterator[tuple[str, nn.Parameter]]:
        for name, value in _trained(build_layers(task, job.seed, device, slicing_of(job, task))):
            named.append((name, nn.Parameter(torch.empty_like(value, device="meta"))))
            yield name, value

    model = model_without_values(task) if takes_model(task) else None
    return named, divide(task, trained(), on_host=job.offload == "optimizer", model=model)


def _trained(built: Iterable[Built]) -> Iterator[tuple[str, nn.Parameter]]:
    for one in built:
        yield from ((name, value) for name, value in one.module.named_parameters() if value.requires_grad)


def whole_steps(state: TrainState, *, skip_nonfinite: bool = False) -> SynchronousSteps:
    """Return the steps of a worker that computes the whole model; `skip_nonfinite`: see `SynchronousSteps`."""
    passes: Passes = WholePasses(state) if state.gathered is None else ByLayer(state)
    return SynchronousSteps(state, passes, skip_nonfinite=skip_nonfinite)


def own_share(job: Job, state: TrainState) -> None:
    """Let a whole model's optimizer change only what it does on a worker of the job's largest group."""
    if job.parallel.sharded == "optimizer":
        trained = state.trained
        names = [str(number) for number in range(most_workers(job))]
        nodes = dict.fromkeys(names, "")
        state.own(balanced(trained.rows, trained.row_bytes, names, job.parallel.holders, nodes, {})[names[0]])


def initial_sums(state: TrainState) -> tuple[float, ...]:
    """Return the sum of each parameter and buffer: other values of the same model have, as good as surely, others."""
    values = [*state.module.parameters(), *state.module.buffers()]
    plain = (torch.view_as_real(value) if value.is_complex() else value for value in values)
    return tuple(float(value.detach().nan_to_num().sum(dtype=torch.float64)) for value in plain)


def _wire(job: Job) -> MakeWire:
    """Return how gradients travel if their sums need not be exact."""
    if job.compression == "none":
        return ring_wire
    return partial(ring_wire, compressed=torch.float16 if job.compression == "fp16" else torch.bfloat16)
