"""Measure what a plan needs to know of a task: the cost of each layer, at two microbatch sizes, recomputed and not."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch

from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import TaskError
from raytrain_plus.job.setting_types import Recompute
from raytrain_plus.job.settings import Job
from raytrain_plus.parallel.per_row import through
from raytrain_plus.parallel.pipeline.chunk import Chunk
from raytrain_plus.parallel.pipeline.partition import Layer
from raytrain_plus.parallel.pipeline.transport import Tensors
from raytrain_plus.parallel.state_bytes import NO_STATE, StateSize
from raytrain_plus.planner.layer_profile import STEP_S, LayerPasses, LayerProfile, Mode, ModelProfile
from raytrain_plus.planner.space import recomputes
from raytrain_plus.task import Task
from raytrain_plus.training.model.model import WHOLE, pass_names, train_as_built
from raytrain_plus.training.step.build import slicing_of
from raytrain_plus.training.weights.optimizer import build_optimizer
from raytrain_plus.training.weights.step_options import Technique, technique_of
from raytrain_plus.trial.link_speed import measure_link
from raytrain_plus.trial.measure import Alone, alone_loss, backward, each_layer, forward, measure_layers
from raytrain_plus.trial.memory_limits import held_memory
from raytrain_plus.trial.state_size import count_parts

UPDATES = 2
"""How often an optimizer's step is timed; the fastest counts."""


def profile_layers(job: Job, task: Task, few: Microbatch, many: Microbatch, *, cores: float) -> ModelProfile:
    """Return the profile of a task's model on this machine's CPU, with as many threads as a worker has.

    `few`, `many`: microbatches of two sizes, of the same number of rows if there are no smaller ones. `cores`: the
    cores of this machine. Errors of the task propagate.
    """
    device = torch.device("cpu")
    torch.set_num_threads(job.workers.threads)
    process = held_memory(device)
    layered = _is_layered(task, job)
    technique = technique_of(job, device)
    modes = recomputes(job) if layered else ("none",)
    slicing = slicing_of(job, task)
    measured: dict[tuple[Mode, int], Mapping[str, Layer]] = {}
    for mode in dict.fromkeys(["none", *modes]):
        which: Recompute = mode if isinstance(mode, str) else list(mode)
        for batch in (few, many):
            own = replace(technique, recompute=which)
            overlaps = job.parallel.overlaps and mode == "none"
            found = measure_layers(task, job.seed, own, batch, overlaps, slicing, in_one=not layered)
            measured[mode, batch.rows] = {layer.name: layer for layer in found}
    states = count_parts(job, task) or {}
    beside = {batch.rows: _beside(job, task, technique, batch, layered=layered) for batch in (few, many)}

    def passes(name: str, mode: Mode) -> LayerPasses:
        points = [(batch.rows, measured[mode, batch.rows][name]) for batch in (few, many)]
        seconds = through(*((rows, layer.seconds) for rows, layer in points))
        return LayerPasses(seconds, through(*((rows, float(layer.activations)) for rows, layer in points)))

    layers = tuple(
        LayerProfile(
            name,
            states[name] if name in states else _about(layer, layered=layered),
            {mode: passes(name, mode) for mode in dict.fromkeys(["none", *modes])},
            through(*((rows, float(beside[rows].get(name, (0, 0.0))[0])) for rows in (few.rows, many.rows))),
            beside[many.rows].get(name, (0, 0.0))[1],
            Fraction(layer.sliced_parameters, max(1, layer.parameters)),
            layer.cost,
        )
        for name, layer in measured["none", many.rows].items()
    )
    return ModelProfile(
        layers=layers,
        layered=layered,
        link=measure_link(),
        step_s=STEP_S,
        process_bytes=0 if job.workers.gpus else process,
        on_one=1 << 20,
        cores=cores / job.workers.threads,
    )


def _is_layered(task: Task, job: Job) -> bool:
    try:
        return pass_names(task, job.seed) != WHOLE
    except TaskError:
        return False


def _about(layer: Layer, *, layered: bool) -> StateSize:
    """Return the state of a layer that cannot be built without values: two values of the optimizer's for each."""
    each = layer.bytes // 4
    return replace(
        NO_STATE,
        weights=each,
        changed=each,
        gradients=each,
        kept=2 * each,
        saved=3 * each,
        largest=2 * each,
        layered=layered,
    )


def _beside(
    job: Job, task: Task, technique: Technique, batch: Microbatch, *, layered: bool
) -> dict[str, tuple[int, float]]:
    """Return, for each layer, the bytes that the next one gets, and the seconds of an optimizer's step."""
    names = pass_names(task, job.seed, in_one=not layered)
    plain = replace(technique, recompute="none", compiled=False)
    work = Alone(partial(alone_loss, task), job.seed, plain, batch)
    given: Any = None
    found = {}
    for number, (name, built) in enumerate(each_layer(task, job.seed, plain, names, slicing_of(job, task))):
        module = train_as_built(built.module)
        chunk = Chunk(module, number, [0] * len(names))
        given = forward(chunk, work, given)
        sent = sum(one.nbytes for one in given.values) if isinstance(given, Tensors) else 0
        backward(chunk, given)
        trained = [(at, value) for at, value in module.named_parameters() if value.grad is not None]
        found[name] = (sent, _update_s(task, trained, module))
    if names == WHOLE:
        # The first module of a model without layers has the costs of all.
        [(_, cost)] = found.items()
        first = next(iter(dict(module.named_children())), "")
        found = {first: cost}
    return found


def _update_s(task: Task, trained: list[tuple[str, torch.nn.Parameter]], module: torch.nn.Module) -> float:
    if not trained:
        return 0.0
    try:
        optimizer = build_optimizer(task, trained, module)
    except ValueError:
        # A layer may hold none of the parameters that the optimizer selects.
        return 0.0
    seconds = []
    for _ in range(UPDATES):
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
