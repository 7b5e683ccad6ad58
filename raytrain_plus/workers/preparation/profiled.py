"""Which steps of a generation a worker profiles, and what its model computes in one of them."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from raytrain_plus.observe.step_profile import Profiled, ProfiledWorker, peak_of
from raytrain_plus.runs.folder import PROFILE
from raytrain_plus.storage.folders.claimed import Claimed
from raytrain_plus.training.exchange.step_records import Remark
from raytrain_plus.training.model.precision import Precision
from raytrain_plus.training.profile.profiling import Profiling, not_profiled
from raytrain_plus.training.step.build import task_of
from raytrain_plus.trial.measure import count_operations
from raytrain_plus.workers.messages import Assignment
from raytrain_plus.workers.preparation.prepared import Prepared


def profiling_of(
    worker: str, prepared: Prepared, assignment: Assignment, tell: Callable[[Profiled | Remark], None]
) -> Profiling | None:
    """Return what profiles the steps of this generation on the worker of that name; None if nothing does."""
    wanted, device = prepared.plan.job.profile, prepared.device
    if wanted is None or assignment.seat >= wanted.workers:
        return None

    def describe(step: int) -> ProfiledWorker:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        precision = prepared.plan.job.precision
        peak, why = peak_of(name, precision), f"the peak of {name} in {precision} is not known"
        operations = None
        try:
            operations = _operations(prepared, assignment)
        except Exception as error:
            why = "the operations of the model could not be counted"
            tell(not_profiled(why, error))
        trace = f"{PROFILE}/{worker}-from-{step}.json"
        return ProfiledWorker(
            seat=assignment.seat, device=name, trace=trace, operations=operations, peak=peak, no_mfu=why
        )

    def write(name: str, data: bytes) -> None:
        run, claim = prepared.run_folder(), assignment.share.claim
        (run if claim is None else Claimed(run, claim)).write(name, [data])

    return Profiling(range(*wanted.steps), device, describe=describe, write=write, tell=tell)


def _operations(prepared: Prepared, assignment: Assignment) -> int:
    """Return the operations of this member's part of a step, counted on the first microbatch of the data.

    A model and a task of their own are built for this, so that the training's do not change.
    """
    plan, chunks = prepared.plan, assignment.layers.chunks
    task = task_of(plan.job, type(prepared.task), plan.steps, plan.data.rows)
    precision = Precision(plan.job.precision, prepared.device)
    try:
        counted = count_operations(task, plan.job.seed, precision, prepared.feeds.first(), staged=bool(chunks))
    finally:
        # Hooks tie a model and its gradients into cycles.
        del task
        gc.collect()
        if prepared.device.type == "cuda":
            torch.cuda.empty_cache()
    own = [counted.get(name, 0) for chunk in chunks for name in chunk] if counted.keys() != {""} else counted.values()
    # Workers that share a stage's slices have equal shares of the matrix products that are cut, nearly all of them.
    return sum(own) // assignment.layers.stage.ranks * len(assignment.shards) * plan.job.parallel.microbatches
