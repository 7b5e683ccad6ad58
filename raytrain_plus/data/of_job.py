"""Derive the data paths and the sample order from a job. Pure."""

from __future__ import annotations

from raytrain_plus.data.images import DecodeImages
from raytrain_plus.data.sample_order import SampleOrder, read_factor, steps_of_epochs
from raytrain_plus.data.source import Index
from raytrain_plus.data.tokens import Tokenized
from raytrain_plus.data.transform_block import Rows, Transform
from raytrain_plus.job.settings import Job


def data_paths(job: Job) -> dict[str, str]:
    """Return the data paths of a job by their settings; there are none if functions return its datasets."""
    named = {"data.path": job.data.path, "evaluate.path": None if job.evaluate is None else job.evaluate.path}
    return {key: path for key, path in named.items() if path is not None}


def sample_order_of(job: Job, data: Index) -> SampleOrder:
    """Return the sample order that the job trains on."""
    return SampleOrder(
        data.unit_rows,
        shards=job.data.shards,
        batch_size=job.data.batch_size,
        seed=job.seed,
        shuffle=job.data.shuffle,
        steps=job.steps,
        epochs=job.epochs,
    )


def steps_of(job: Job, rows: int) -> int:
    """Return the number of steps of a job whose data has `rows` rows."""
    if job.steps is not None:
        return job.steps
    shards = job.data.shards
    return steps_of_epochs(rows, shards, job.data.batch_size // shards, job.epochs)


def evaluation_order_of(job: Job, data: Index) -> SampleOrder:
    """Return the sample order of the held-out data: one epoch, unshuffled, divided over the shards."""
    return SampleOrder(
        data.unit_rows, shards=job.data.shards, batch_size=job.data.batch_size, seed=0, shuffle="none", epochs=1
    )


def odd_sizes(job: Job, data: Index) -> list[str]:
    """Return what is unusual about the number of rows in the steps of a job, in words."""
    size = job.data.batch_size
    if size > data.rows:
        instead = "use a smaller one" if job.steps is None else "a step uses rows repeatedly"
        return [f"data.batch_size = {size:,} is more than the {data.rows:,} rows of the data: {instead}"]
    order = sample_order_of(job, data)
    last = sum(order.rows_in_step(shard, order.steps - 1) for shard in range(order.shards))
    if last <= size:
        return []
    # Each shard needs two rows in a step: see `steps_of_epochs`.
    left = "the rows left over are too few for a step of their own"
    return [f"the last step has {last:,} rows, more than data.batch_size = {size:,}: {left}"]


def read_factor_of(sample_order: SampleOrder, data: Index) -> float | None:
    """Return how often a row group is read in epoch 0, on average; None for a dataset that is read by index."""
    return read_factor(sample_order, len(data.unit_rows)) if data.items is None else None


def rows_of(job: Job, data: Index, transform: Transform | None) -> Rows:
    """Return what reads the rows that the job trains on."""
    return _rows(job, data, sample_order_of(job, data), transform)


def held_out_rows_of(job: Job, data: Index, transform: Transform | None) -> Rows:
    """Return what reads the held-out rows."""
    return _rows(job, data, evaluation_order_of(job, data), transform)


def _rows(job: Job, data: Index, sample_order: SampleOrder, transform: Transform | None) -> Rows:
    return Rows(
        index=data,
        sample_order=sample_order,
        seed=job.seed,
        transform=transform,
        block_rows=job.data.granule,
        before=() if job.data.image_size is None else (DecodeImages(*job.data.image_size),),
        after=() if data.tokenizer is None else (Tokenized(data.tokenizer),),
    )
