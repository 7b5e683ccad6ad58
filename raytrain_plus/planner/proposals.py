"""Propose settings that would make steps faster, or fit, but change the result: they are never chosen. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from raytrain_plus.errors import JobError
from raytrain_plus.job.settings import Job
from raytrain_plus.planner.layer_profile import ModelProfile
from raytrain_plus.planner.plan_table import SizePlan
from raytrain_plus.planner.search import Room, plan_sizes

GAIN = 1.1
"""How much faster steps must be for a proposal."""


def proposals(job: Job, profile: ModelProfile, workers: int, room: Room) -> Iterator[str]:
    """Yield what would make steps of so many workers faster, or let them fit."""
    known = plan_sizes(job, profile, [workers], room).at(workers)
    for words, other in _variants(job):
        found = plan_sizes(other, profile, [workers], room).at(workers)
        if not isinstance(found, SizePlan):
            continue
        if not isinstance(known, SizePlan):
            yield f"{words} would fit on {workers} workers"
        elif known.cost.time.total > GAIN * found.cost.time.total:
            faster = known.cost.time.total / found.cost.time.total
            yield f"{words} would make steps of {workers} workers {faster:.1f} times as fast"


def _variants(job: Job) -> Iterator[tuple[str, Job]]:
    """Yield neighbouring jobs, and what differs, in words; those that are not allowed are left out."""
    shards, microbatches = job.data.shards, job.parallel.microbatches
    for count in (2 * shards, shards // 2):
        yield from _allowed(f"data.shards: {count}", job, count, microbatches)
    for count in (2 * microbatches, microbatches // 2):
        yield from _allowed(f"parallel.microbatches: {count}", job, shards, count)


def _allowed(words: str, job: Job, shards: int, microbatches: int) -> Iterator[tuple[str, Job]]:
    try:
        data, parallel = replace(job.data, shards=shards), replace(job.parallel, microbatches=microbatches)
        yield words, replace(job, data=data, parallel=parallel)
    except JobError:
        return
