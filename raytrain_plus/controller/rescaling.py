"""Check a request for other numbers of workers. Pure."""

from __future__ import annotations

from dataclasses import replace

from raytrain_plus.errors import InputError
from raytrain_plus.job.settings import Job
from raytrain_plus.membership.events import Rescale
from raytrain_plus.membership.group_state import Limits
from raytrain_plus.parallel.sizing import size_table, unused_workers


def requested(job: Job, now: Limits, minimum: int | None, maximum: int | None, spares: int | None) -> Rescale:
    """Return the request for these numbers of workers; None keeps a number of the limits `now`.

    Raises `InputError` if the job does not support them.
    """
    workers = replace(
        job.workers,
        min=now.sizes.fewest if minimum is None else minimum,
        max=now.sizes.maximum if maximum is None else maximum,
        spares=now.spares if spares is None else spares,
    )
    size_table(replace(job, workers=workers))
    fewest = max(job.workers.min, min(stages * ranks for stages, ranks in now.sizes.layouts))
    if job.parallel.in_parts and workers.min < fewest:
        # The check whether the partitions fit the workers' memory assumed this maximum.
        raise InputError(
            f"a model in parts cannot shrink below the minimum that it began with: {fewest} workers",
            where=f"workers.min: {workers.min}",
            remedy="stop the run, and continue with: raytrain resume RUN --set 'workers={min: ...}'",
        )
    return Rescale(workers.min, workers.max or workers.min, workers.spares)


def effect(now: Limits, wanted: Rescale, members: int) -> str:
    """Return what a request changes for a run in which `members` workers train, or why it changes nothing."""
    numbers = f"workers.min {wanted.minimum}, max {wanted.maximum}, spares {wanted.spares}"
    if (wanted.minimum, wanted.maximum, wanted.spares) == (now.sizes.fewest, now.sizes.maximum, now.spares):
        return f"nothing changes: the run has {numbers} already"
    unused = unused_workers(replace(now.sizes, minimum=wanted.minimum, maximum=wanted.maximum))
    said = [f"the run has {numbers} from now on, and {members} train now"]
    if unused:
        said.append(unused)
    elif wanted.maximum > members:
        said.append("more join at a step boundary as soon as the cluster has room for them")
    return "; ".join(said)
