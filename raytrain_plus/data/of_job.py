"""Derive the data paths and the sample order from a job. Pure."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from raytrain_plus.data.order.mixed_order import AnyOrder, MixedOrder
from raytrain_plus.data.order.sample_order import SampleOrder, read_factor, steps_of_epochs
from raytrain_plus.data.reading.transform_block import RowReader, Transform
from raytrain_plus.data.sources.source import Source
from raytrain_plus.data.sources.tokenized_source import TokenizedSource
from raytrain_plus.data.values.images import DecodeImages
from raytrain_plus.data.values.tokens import Tokenized
from raytrain_plus.errors import InputError
from raytrain_plus.job.settings import Job
from raytrain_plus.job.value_checks import beyond_the_end


def data_paths(job: Job) -> dict[str, str]:
    """Return the data paths of a job by their settings; there are none if functions return its datasets."""
    held_out = None if job.evaluate is None else job.evaluate.path
    return {**training_paths(job), **({} if held_out is None else {"evaluate.path": held_out})}


def training_paths(job: Job) -> dict[str, str]:
    """Return the paths of the training data of a job by their settings."""
    mixed = {f"data.mix[{number}].path": source.get("path") for number, source in enumerate(job.data.mix or ())}
    return {key: path for key, path in {"data.path": job.data.path, **mixed}.items() if path is not None}


def sample_order_of(job: Job, data: Source) -> AnyOrder:
    """Return the sample order that the job trains on."""
    if job.data.mix is not None:
        assert job.steps is not None
        return MixedOrder(
            [source.unit_rows for source in data.parts],
            [source["weight"] for source in job.data.mix],
            shards=job.data.shards,
            batch_size=job.data.batch_size,
            seed=job.seed,
            shuffle=job.data.shuffle,
            steps=job.steps,
        )
    return SampleOrder(
        data.unit_rows,
        shards=job.data.shards,
        batch_size=job.data.batch_size,
        seed=job.seed,
        shuffle=job.data.shuffle,
        steps=job.steps,
        epochs=job.epochs,
    )


def check_profiled(job: Job, steps: int) -> None:
    """Raise `InputError` if steps are to be profiled that are beyond the job's `steps`."""
    if job.profile is not None and job.profile.steps[1] > steps:
        what, expected, _ = beyond_the_end(job.profile.steps, steps)
        raise InputError(what, where="profile.steps", expected=expected)


@dataclass(frozen=True, slots=True)
class SourceShare:
    """One source of the mix that a job trains on."""

    number: int
    path: str
    rows: int
    weight: float
    """Its weight as the job gives it."""
    share: float
    """Its share of the rows of all steps, of 1."""
    epochs: float
    """Epochs of this source that the steps of the job use."""

    def line(self) -> str:
        """Return a line of text for a person."""
        rows = f"{self.rows:,} row{'s' * (self.rows != 1)}"
        share = f"weight {self.weight:g}, {100 * self.share:.4g} % of each step"
        return f"  source {self.number}, {self.path}: {rows}, {share}, {self.epochs:,.2f} epochs"


def source_shares(job: Job, data: Source) -> tuple[SourceShare, ...]:
    """Return the sources of the mix that the job trains on; none without a mix."""
    order = sample_order_of(job, data)
    if job.data.mix is None or not isinstance(order, MixedOrder):
        return ()
    return tuple(
        SourceShare(
            number,
            source.named,
            source.rows,
            entry["weight"],
            order.counts[number] / sum(order.counts),
            order.epochs(number),
        )
        for number, (source, entry) in enumerate(zip(data.parts, job.data.mix, strict=True))
    )


def steps_of(job: Job, rows: int) -> int:
    """Return the number of steps of a job whose data has `rows` rows."""
    if job.steps is not None:
        return job.steps
    shards = job.data.shards
    return steps_of_epochs(rows, shards, job.data.batch_size // shards, job.epochs)


def evaluation_order_of(job: Job, data: Source) -> SampleOrder:
    """Return the sample order of the held-out data: one epoch, unshuffled, or the first batches of a shuffled one."""
    order = functools.partial(SampleOrder, data.unit_rows, shards=job.data.shards, batch_size=job.data.batch_size)
    batches = None if job.evaluate is None else job.evaluate.batches
    if batches is None or batches * job.data.batch_size >= data.rows:
        return order(seed=0, shuffle="none", epochs=1)
    return order(seed=job.seed, shuffle="rows", steps=batches)


def odd_sizes(job: Job, data: Source) -> list[str]:
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


def read_factor_of(sample_order: AnyOrder, data: Source) -> float | None:
    """Return how often a row group is read in epoch 0, on average; None for datasets that are read by index."""
    found = [
        (read_factor(order, len(source.unit_rows)), len(source.unit_rows))
        for order, source in zip(sample_order.source_orders, data.parts, strict=True)
        if not source.by_index
    ]
    return sum(factor * units for factor, units in found) / sum(units for _, units in found) if found else None


def rows_of(job: Job, data: Source, transform: Transform | None) -> RowReader:
    """Return what reads the rows that the job trains on."""
    return _rows(job, data, sample_order_of(job, data), transform)


def keeps_rows(job: Job, data: Source) -> bool:
    """Return whether workers keep the row groups that they train on in memory once they are read."""
    return job.data.transform is None and rows_of(job, data, None).fit(job.data.cache_mb)


def held_out_rows_of(job: Job, data: Source, transform: Transform | None) -> RowReader:
    """Return what reads the held-out rows."""
    return _rows(job, data, evaluation_order_of(job, data), transform)


def _rows(job: Job, data: Source, sample_order: AnyOrder, transform: Transform | None) -> RowReader:
    return RowReader(
        source=data,
        sample_order=sample_order,
        seed=job.seed,
        transform=transform,
        block_rows=job.data.granule,
        before=() if job.data.image_size is None else (DecodeImages(*job.data.image_size),),
        after=(Tokenized(data.tokenizer),) if isinstance(data, TokenizedSource) else (),
        skip=job.data.on_error == "skip",
    )
