"""Possible shapes of a job's group: how many model replicas of how many stages for each number of workers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from raytrain_plus.errors import InputError
from raytrain_plus.job.settings import Job, Parallel
from raytrain_plus.membership.sizes import SizeTable
from raytrain_plus.parallel.pipeline.layout import chunk_stages, first_layers_fault, schedule_fault
from raytrain_plus.storage.size_text import size_text

PASSES_ON_A_GPU = 2
"""The most shards of one replica that `validate` leaves without a word, if workers have GPUs."""


def size_table(job: Job, layers: Sequence[str] | None = None) -> SizeTable:
    """Return which group a job forms out of how many workers; `layers`: the layer names of its model, if known.

    Raises `InputError` if the requested number of stages, or its `parallel.partition`, is not possible.
    """
    workers = job.workers
    counts = _stage_counts(job, layers)
    return SizeTable(workers.min, workers.max or workers.min, job.data.shards, counts, job.parallel.slices)


def most_workers(job: Job) -> int:
    """Return the most workers that can have work: one replica per shard."""
    return min(job.workers.max or job.workers.min, job.data.shards * job.parallel.width)


def unused_workers(sizes: SizeTable) -> str:
    """Return why fewer workers than `workers.max` are used, and how many; empty if all are used."""
    if sizes.fewest > sizes.minimum:
        return (
            f"workers.min is treated as {sizes.fewest}: with fewer workers, no partition of the model fits the schedule"
        )
    shape = sizes.largest
    if shape is None or shape.size == sizes.maximum:
        return ""
    slower = f"with data.shards = {sizes.shards} one more would make no step faster"
    if shape.layout != (1, 1):
        each = f"{shape.stages} stages" if shape.stages > 1 else f"{shape.tensor_ranks} workers"
        each += f" of {shape.tensor_ranks} workers" if min(shape.layout) > 1 else ""
        why = f"they make {shape.replicas} replicas of {each} each"
        if shape.replicas < sizes.maximum // (shape.stages * shape.tensor_ranks):
            why += f", and {slower}"
    else:
        why = slower
    return f"at most {shape.size} of workers.max = {sizes.maximum} are used: {why}"


def many_passes(job: Job, replicas: int) -> str:
    """Return why GPUs are partly idle if the largest group has `replicas` replicas; empty if that is no reason."""
    shards, batch_size, microbatches = job.data.shards, job.data.batch_size, job.parallel.microbatches
    if not job.workers.gpus or shards <= PASSES_ON_A_GPU * replicas:
        return ""
    fewer = next(number for number in range(replicas, shards + 1) if batch_size % (number * microbatches) == 0)
    remedy = (
        f"; with data.shards = {fewer} a pass has {batch_size // fewer // microbatches:,} rows"
        if fewer < shards
        else ""
    )
    each, rows = -(-shards // replicas) * microbatches, batch_size // shards // microbatches
    return (
        f"data.shards is {shards}, and the largest group has {replicas} model replica{'s' * (replicas > 1)}: in each "
        f"step a GPU makes {each} small passes, of {rows:,} rows, one after the other, which leaves it partly "
        f"idle{remedy}"
    )


def share_of(parallel: Parallel, replicas: int) -> Fraction:
    """Return the share of a sharded state that a worker of one of `replicas` replicas holds; else 1."""
    return Fraction(1) if parallel.sharded == "none" else Fraction(min(parallel.holders, replicas), replicas)


def sharded_lines(parallel: Parallel, sizes: Sequence[int], state: Mapping[int, int] | None = None) -> tuple[str, ...]:
    """Return what each worker holds of a sharded state; empty if it is not sharded.

    `sizes`: possible numbers of model replicas. `state`: the bytes of the training state of each worker, if each of so
    many replicas is one worker.

    >>> for line in sharded_lines(Parallel(sharded="optimizer"), [1, 2, 8], {1: 1_600_000, 2: 1_600_000, 8: 1_000_000}):
    ...     print(line)
    optimizer's state: all of it on each of 1 or 2 workers, 25 % on each of 8
    training state of a worker: 1.6 MB with 1 worker, 1.0 MB with 8
    >>> print(sharded_lines(Parallel(sharded="optimizer", pipeline=4), [1, 3])[0])
    optimizer's state of a stage: all of it on each of its workers with 1 replica, 67 % with 3
    """
    if parallel.sharded == "none":
        return ()
    holders, staged = parallel.holders, parallel.in_parts
    unit, each, less = (
        ("replica", "each of its workers with", "with") if staged else ("worker", "each of", "on each of")
    )
    whole = sorted({count for count in sizes if count <= holders})
    parts = [f"all of it on {each} {' or '.join(map(str, whole))} {unit}{'s' * (whole[-1] > 1)}"] if whole else []
    shares = sorted({count for count in sizes if count > holders})
    # The smallest and the largest tell enough.
    parts += [f"{100 * holders / count:.0f} % {less} {count}" for count in sorted({*shares[:1], *shares[-1:]})]
    what = "optimizer's state" if parallel.sharded == "optimizer" else "weights, gradients and optimizer's state"
    what += " of a stage" if staged else ""
    lines = [f"{what}: {', '.join(parts)}"]
    if state is not None:
        few, most = min(state), max(state)
        least = f", {size_text(state[most])} with {most}" if most > few else ""
        lines.append(f"training state of a worker: {size_text(state[few])} with {few} worker{'s' * (few > 1)}{least}")
    return tuple(lines)


def _stage_counts(job: Job, layers: Sequence[str] | None) -> tuple[int, ...]:
    """Return the possible numbers of stages: the requested number, then smaller ones.

    A smaller number is used only if there are too few workers for the larger ones.
    """
    requested = job.parallel.pipeline
    # Replicas of fewer tensor ranks are formed only if there is one of them.
    fault = _fault(job, requested, most_workers(job) // job.parallel.slices, layers)
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


def _fault(job: Job, stages: int, most: int, layers: Sequence[str] | None) -> InputError | None:
    """Return why the job cannot run in `stages` stages, on up to `most` workers, or None."""
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
    faults = (replicas_fault(job, stages, count) for count in range(1, max(1, min(most // stages, shards)) + 1))
    return next((fault for fault in faults if fault is not None), None)


def replicas_fault(job: Job, stages: int, replicas: int) -> InputError | None:
    """Return why the job's schedule cannot run in so many replicas of `stages` stages, or None."""
    schedule, shards = job.parallel.schedule, job.data.shards
    for hosted in {shards // replicas, -(-shards // replicas)}:
        if problem := schedule_fault(
            schedule, stages, hosted * job.parallel.microbatches * job.parallel.steps_together
        ):
            return InputError(
                f"{problem}: with {replicas} replica{'s' * (replicas != 1)}, one hosts {hosted} of the {shards} shards",
                where="parallel.microbatches",
                remedy="raise parallel.microbatches, lower workers.max or parallel.pipeline, or use gpipe",
            )
    return None
