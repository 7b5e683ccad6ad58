"""Possible shapes of a job's group: how many model replicas of how many stages for each number of workers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from raytrain_plus.errors import InputError
from raytrain_plus.job.settings import Job
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.membership.sizes import SizeTable, size_table
from raytrain_plus.parallel.pipeline.layout import chunk_stages, first_layers_fault, schedule_fault


def stage_counts(job: Job, layers: Sequence[str] | None = None) -> tuple[int, ...]:
    """Return the possible numbers of stages: the requested number, then smaller ones.

    A smaller number is used only if there are too few workers for the larger ones. `layers`: the layer names, if known.
    Raises `InputError` if the requested number, or its `parallel.partition`, is not possible.
    """
    requested = job.parallel.pipeline
    fault = _fault(job, requested, most_workers(job), layers)
    if fault is not None:
        raise fault
    first = job.parallel.first_layers(requested)
    if first is not None and layers is not None and (wrong := first_layers_fault(first, layers)):
        raise InputError(wrong, where="parallel.partition", expected=f"names out of {', '.join(layers)}, in this order")
    counts = [requested]
    # With at least as many workers as a replica has, no other partition is needed.
    for stages in range(requested - 1, job.workers.min - 1, -1):
        if _fault(job, stages, counts[-1] - 1, layers) is None:
            counts.append(stages)
    return tuple(counts)


def most_shards(job: Job, stages: int) -> int:
    """Return the most shards that a replica of `stages` stages hosts, given the smallest number of replicas."""
    return -(-job.data.shards // max(1, min(job.workers.min // stages, job.data.shards)))


def most_workers(job: Job) -> int:
    """Return the most workers that can have work: one replica per shard."""
    return min(job.workers.max or job.workers.min, job.data.shards * job.parallel.pipeline)


def shapes_of(job: Job, counts: Sequence[int]) -> dict[int, Shape]:
    """Return the shape of the group for each number of workers from `workers.min` on."""
    shapes = enumerate(_table(job, counts).shapes)
    return {workers: shape for workers, shape in shapes if shape is not None}


def unused_workers(job: Job, counts: Sequence[int]) -> str:
    """Return why fewer workers than `workers.max` are used, and how many; empty if all are used."""
    maximum = job.workers.max or job.workers.min
    if counts[-1] > job.workers.min:
        return (
            f"workers.min is treated as {counts[-1]}: with fewer workers, no partition of the model fits the schedule"
        )
    shape = _table(job, counts).largest
    if shape is None or shape.size == maximum:
        return ""
    if shape.stages > 1:
        why = f"they make {shape.replicas} replicas of {shape.stages} stages each"
        if shape.replicas < maximum // shape.stages:
            why += f", and with data.shards = {job.data.shards} one more would make no step faster"
    else:
        why = f"with data.shards = {job.data.shards} one more would make no step faster"
    return f"at most {shape.size} of workers.max = {maximum} are used: {why}"


def _table(job: Job, counts: Sequence[int]) -> SizeTable:
    return size_table(job.workers.min, job.workers.max or job.workers.min, job.data.shards, counts)


def _fault(job: Job, stages: int, most: int, layers: Sequence[str] | None) -> InputError | None:
    """Return why the job cannot run in so many stages, on up to `most` workers, or None."""
    schedule, shards = job.parallel.schedule, job.data.shards
    if stages == 1:
        return None
    chunks = len(chunk_stages(schedule, stages))
    if layers is not None and len(layers) < chunks:
        return InputError(
            f"{stages} stages of {schedule} need {chunks} layers, but the model has {len(layers)}: {', '.join(layers)}",
            where="parallel.pipeline",
            expected="at least one layer per stage, or two with interleaved and zero-bubble",
            remedy="declare smaller layers in the task's layers(), or use fewer stages",
        )
    for replicas in range(1, max(1, min(most // stages, shards)) + 1):
        for hosted in {shards // replicas, -(-shards // replicas)}:
            if problem := schedule_fault(
                schedule, stages, hosted * job.parallel.microbatches * job.parallel.steps_together
            ):
                return InputError(
                    f"{problem}: with {replicas} replica{'s' * (replicas != 1)}, one hosts {hosted} of the {shards} "
                    "shards",
                    where="parallel.microbatches",
                    remedy="raise parallel.microbatches, lower workers.max or parallel.pipeline, or use gpipe",
                )
    return None
