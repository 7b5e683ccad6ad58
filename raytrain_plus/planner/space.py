"""Which shapes and settings a plan may choose: those that the job's checks allow, and that change no result. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product, starmap
from typing import cast, get_args

from raytrain_plus.errors import JobError
from raytrain_plus.job.sameness import differing
from raytrain_plus.job.setting_types import Offload, Recompute, Sharded, plain
from raytrain_plus.job.settings import Job, Schedule
from raytrain_plus.membership.mesh import Shape, rank_counts
from raytrain_plus.membership.sizes import useful_size
from raytrain_plus.parallel.pipeline.layout import chunk_stages
from raytrain_plus.parallel.sizing import replicas_fault
from raytrain_plus.planner.layer_profile import Mode, ModelProfile

RECOMPUTES = ("none", "selective", "full")
"""The values of `recompute` that name no layers, those that cost the least time first."""
SEVERAL = 2
"""Stages that stand for any larger number in checks of a job."""


@dataclass(frozen=True, slots=True)
class FreeSettings:
    """Settings that a plan may choose, because results do not depend on them."""

    sharded: Sharded
    recompute: Mode
    offload: Offload
    schedule: Schedule

    def of(self, job: Job, stages: int) -> Job:
        """Return the job with these settings, in so many stages. Raises `JobError` if it must not have them."""
        pipedream = self.schedule == "pipedream"
        width = stages * job.parallel.slices
        most = max(job.parallel.holders * width, job.workers.max or 0, job.workers.min, width)
        parallel = replace(
            job.parallel,
            pipeline=stages,
            sharded=self.sharded,
            schedule=self.schedule,
            partition=job.parallel.partition if stages == job.parallel.pipeline else None,
        )
        # Spares and other numbers of workers are the run's, not the plan's.
        workers = replace(job.workers, min=width if pipedream else 1, max=most)
        return replace(job, parallel=parallel, workers=workers, recompute=_value(self.recompute), offload=self.offload)


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to use some workers: a shape, and settings."""

    shape: Shape
    settings: FreeSettings


def own_recompute(job: Job) -> Mode:
    """Return the job's value of `recompute`."""
    return job.recompute if isinstance(job.recompute, str) else tuple(job.recompute)


def recomputes(job: Job) -> tuple[Mode, ...]:
    """Return the values of `recompute` that a plan may choose for a model in layers; the job's own is one of them."""
    modes: list[Mode] = [*RECOMPUTES, own_recompute(job)]
    return tuple(mode for mode in dict.fromkeys(modes) if not _changes(job, replace(job, recompute=_value(mode))))


def _value(mode: Mode) -> Recompute:
    return list(mode) if isinstance(mode, tuple) else cast(Recompute, mode)


def _changes(job: Job, other: Job) -> bool:
    """Return whether the other job has other results."""
    return bool(differing(Job, plain(other), plain(job)))


def free_settings(job: Job, profile: ModelProfile, *, staged: bool) -> dict[FreeSettings, Job]:
    """Return the settings that a plan may choose for a model in one stage, or in several, and the job with them.

    The simplest ones are first. The checks of a job (`job.value_checks`) say what combines, and `job.sameness` what
    changes the result.
    """
    if staged and not profile.layered:
        return {}
    modes = [mode for mode in recomputes(job) if mode in profile.layers[0].passes]
    # With one stage, there is nothing to schedule.
    schedules = sorted(get_args(Schedule), key=lambda one: one != job.parallel.schedule)
    found = {}
    for free in starmap(
        FreeSettings,
        product(get_args(Sharded), modes, get_args(Offload), schedules if staged else [job.parallel.schedule]),
    ):
        if free.sharded == "full" and not profile.layered:
            continue
        if free.offload != job.offload and not job.workers.gpus:
            # Without GPUs, the host's memory is the worker's.
            continue
        with contextlib.suppress(JobError):
            asked = free.of(job, SEVERAL if staged else 1)
            if not _changes(job, asked):
                found[free] = asked
    return found


def shapes(job: Job, profile: ModelProfile, workers: int) -> list[Shape]:
    """Return the shapes of at most so many workers that a run forms, the smallest ones first.

    The numbers of replicas are those of `membership.sizes`: one more would make no step faster. Slices are hosted on
    fewer workers than there are slices only in a single replica.
    """
    shards, slices = job.data.shards, job.parallel.slices
    replicas = sorted({useful_size(count, 1, count, shards) for count in range(1, min(workers, shards) + 1)})
    stage_counts: Sequence[int] = range(1, len(profile.layers) + 1 if profile.layered else SEVERAL)
    if job.parallel.overlaps:
        # Their number is a part of what results depend on.
        stage_counts = [job.parallel.pipeline]
    found = [
        Shape(count, stages, ranks)
        for stages in stage_counts
        for ranks in rank_counts(slices)
        for count in (replicas if ranks == slices else [1])
        if count * stages * ranks <= workers
    ]
    return sorted(found, key=lambda shape: (shape.size, shape.stages, shape.tensor_ranks))


def forms(job: Job, shape: Shape, layers: int) -> bool:
    """Return whether the schedule of a job, one of `FreeSettings.of`, can run a model of so many layers so."""
    if shape.stages == 1:
        return True
    chunks = len(chunk_stages(job.parallel.schedule, shape.stages))
    return chunks <= layers and replicas_fault(job, shape.stages, shape.replicas) is None
