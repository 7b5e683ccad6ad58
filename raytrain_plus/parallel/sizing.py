"""Which shapes the group of a job can have: how many cells, of how many stages, for each number of workers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from raytrain_plus.errors import InputError
from raytrain_plus.job.settings import Job
from raytrain_plus.membership.mesh import Shape, useful_shape
from raytrain_plus.parallel.pipeline.layout import amiss, holders


def cuts_of(job: Job, layers: Sequence[str] | None = None) -> tuple[int, ...]:
    """The numbers of stages that the job's model may be cut into: the wished one, then smaller ones, each taken only
    where there are too few workers for those before it. `layers`: their names, where they are known.

    Raises `InputError` where the wished one is not possible.
    """
    wished = job.parallel.pipeline
    fault = _fault(job, wished, largest(job), layers)
    if fault is not None:
        raise fault
    cuts = [wished]
    # With at least as many workers as a cell has there is no need of another cut.
    for stages in range(wished - 1, job.workers.min - 1, -1):
        if _fault(job, stages, cuts[-1] - 1, layers) is None:
            cuts.append(stages)
    return tuple(cuts)


def most_shards(job: Job, stages: int) -> int:
    """The most shards that a cell of so many stages hosts, where there are as few cells as may be."""
    return -(-job.data.shards // max(1, min(job.workers.min // stages, job.data.shards)))


def largest(job: Job) -> int:
    """The most workers that can have anything to do: a cell each shard."""
    return min(job.workers.max or job.workers.min, job.data.shards * job.parallel.pipeline)


def shapes_of(job: Job, cuts: Sequence[int]) -> dict[int, Shape]:
    """For each number of workers from `workers.min` on, what is formed of them."""
    shapes = {}
    for workers in range(job.workers.min, max(job.workers.min, largest(job)) + 1):
        shape = useful_shape(workers, job.workers.min, workers, job.data.shards, cuts)
        if shape is not None:
            shapes[workers] = shape
    return shapes


def left_out(job: Job, cuts: Sequence[int]) -> str:
    """Says how many workers are formed where these are fewer than `workers.max`; empty where they are not."""
    maximum = job.workers.max or job.workers.min
    if cuts[-1] > job.workers.min:
        return f"workers.min counts as {cuts[-1]}: on fewer workers no cut of the model goes with the schedule"
    shape = useful_shape(maximum, job.workers.min, maximum, job.data.shards, cuts)
    if shape is None or shape.size == maximum:
        return ""
    if shape.stages > 1:
        why = f"they make {shape.cells} cells of {shape.stages} stages each"
        if shape.cells < maximum // shape.stages:
            why += f", and with data.shards = {job.data.shards} a further one would make no step faster"
    else:
        why = f"with data.shards = {job.data.shards} a further one would make no step faster"
    return f"at most {shape.size} of workers.max = {maximum} are formed: {why}"


def _fault(job: Job, stages: int, most: int, layers: Sequence[str] | None) -> InputError | None:
    """What keeps the job from being run in so many stages, on up to `most` workers."""
    schedule, shards = job.parallel.schedule, job.data.shards
    if stages == 1:
        return None
    chunks = len(holders(schedule, stages))
    if layers is not None and len(layers) < chunks:
        return InputError(
            f"{stages} stages of {schedule} need {chunks} layers, and the model has {len(layers)}: {', '.join(layers)}",
            where="parallel.pipeline",
            expected="at least one layer for each stage, and two for each of interleaved and zero-bubble",
            remedy="say smaller layers in the task's layers(), or take fewer stages",
        )
    for cells in range(1, max(1, min(most // stages, shards)) + 1):
        for hosted in {shards // cells, -(-shards // cells)}:
            if problem := amiss(schedule, stages, hosted * job.parallel.microbatches * job.parallel.steps_together):
                return InputError(
                    f"{problem}: with {cells} cell{'s' * (cells != 1)}, one has {hosted} of the {shards} shards",
                    where="parallel.microbatches",
                    remedy="raise parallel.microbatches, lower workers.max or parallel.pipeline, or take gpipe",
                )
    return None
