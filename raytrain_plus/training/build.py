"""Build the model of a job, or a stage of it, with everything that a step needs."""

from __future__ import annotations

from functools import partial

import torch

from raytrain_plus.job.settings import Job
from raytrain_plus.parallel.half import ring_wire
from raytrain_plus.parallel.pipeline.layout import Chunks
from raytrain_plus.parallel.wire import MakeWire
from raytrain_plus.state.hostcopy import check_storable
from raytrain_plus.task import Task
from raytrain_plus.training.model import build_chunks, build_model
from raytrain_plus.training.step import Stepper


def build_stepper(
    job: Job, task: Task, device: torch.device, chunks: Chunks = (), *, skip_nonfinite: bool | None = None
) -> Stepper:
    """Build the model, or the `chunks` of a stage, with its initial values.

    `skip_nonfinite`: as for `Stepper`; None for what the job says. Raises `TaskError` for a model that cannot be
    trained, and what the task raises.
    """
    built = build_chunks(task, job.seed, device, chunks) if chunks else (build_model(task, job.seed, device),)
    stepper = Stepper(
        task,
        built,
        seed=job.seed,
        shards=job.data.shards,
        clip_norm=job.clip_norm,
        device=device,
        exact=job.reduction == "exact",
        make_wire=_wire(job),
        skip_nonfinite=job.elastic.on_nonfinite == "skip" if skip_nonfinite is None else skip_nonfinite,
    )
    check_storable(stepper.holding())
    return stepper


def initial_sums(stepper: Stepper) -> tuple[float, ...]:
    """Return the sum of each parameter and buffer: other values of the same model have, as good as surely, others."""
    values = [*stepper.module.parameters(), *stepper.module.buffers()]
    plain = (torch.view_as_real(value) if value.is_complex() else value for value in values)
    return tuple(float(value.detach().nan_to_num().sum(dtype=torch.float64)) for value in plain)


def _wire(job: Job) -> MakeWire:
    """Return how gradients travel if their sums need not be exact."""
    if job.compression == "none":
        return ring_wire
    return partial(ring_wire, compressed=torch.float16 if job.compression == "fp16" else torch.bfloat16)
