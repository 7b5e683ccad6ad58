"""The lines of a job's data. Pure."""

from __future__ import annotations

from raytrain_plus.data.line import Line
from raytrain_plus.data.source import Index
from raytrain_plus.job import Job


def line_of(job: Job, data: Index) -> Line:
    """The line that the job trains on."""
    return Line(
        data.unit_rows,
        shards=job.data.shards,
        batch_size=job.data.batch_size,
        seed=job.seed,
        shuffle=job.data.shuffle,
        steps=job.steps,
        epochs=job.epochs,
    )


def evaluation_line(job: Job, data: Index) -> Line:
    """The held-out rows in the files' order, divided over the shards once."""
    return Line(
        data.unit_rows, shards=job.data.shards, batch_size=job.data.batch_size, seed=0, shuffle="none", epochs=1
    )
