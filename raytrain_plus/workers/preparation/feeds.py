"""Open what a worker reads: the batches of one generation after another, and the held-out data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pyarrow as pa
import ray

from raytrain_plus.data.of_job import evaluation_order_of, held_out_rows_of, rows_of, sample_order_of
from raytrain_plus.data.order.sample_order import RowRange
from raytrain_plus.data.reading.first_rows import first_microbatch
from raytrain_plus.data.reading.microbatches import Collate, Microbatch, microbatch_rows
from raytrain_plus.data.reading.reader import Batches, Counts, held_out, held_out_counts
from raytrain_plus.data.reading.transform_block import RowReader, Transform
from raytrain_plus.data.reading.unit_cache import UnitCache
from raytrain_plus.data.sources.row_names import named_rows
from raytrain_plus.job.settings import Job
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.ray_compat import ray_data_on_the_head
from raytrain_plus.training.exchange.thread_control import RowSpan
from raytrain_plus.training.passes.passes import Shards
from raytrain_plus.training.step.loop import Evaluation, Feed
from raytrain_plus.workers.messages import Plan


class Feeds:
    """Opens the sources of batches; each reuses what its predecessor keeps in memory."""

    def __init__(
        self,
        plan: Plan,
        collate: Collate,
        transform: Transform | None,
        pin: Callable[[Any], Any] | None = None,
        *,
        draws: bool = False,
    ) -> None:
        """Prepare to open them; `pin`: see `Batches`; `draws`: see `RowReader`."""
        self._plan = plan
        self._pin = pin
        self._collate = collate
        self.rows = self._apart(rows_of(plan.job, plan.data, transform), draws)
        """What reads the training data."""
        held_out = None if plan.held_out is None else held_out_rows_of(plan.job, plan.held_out, transform)
        self.held_out = None if held_out is None else self._apart(held_out, draws)
        """What reads the held-out data, if the job has any."""
        self._evaluation = None if self.held_out is None else _evaluation(plan.job, self.held_out, collate)
        self._cache = UnitCache(self.rows, plan.job.data.cache_mb)
        self._last: Batches | None = None

    def _apart(self, rows: RowReader, draws: bool) -> RowReader:
        """Return what reads rows: in another process, if their transform needs seeded generators of its process."""
        if not draws:
            return rows
        rows = replace(rows, draws=True)
        return replace(rows, elsewhere=read_elsewhere(rows, self._plan.roots))

    def first(self) -> Microbatch:
        """Return the first microbatch of shard 0 in step 0."""
        return first_microbatch(self.rows, self._plan.job.parallel.microbatches, self._collate)

    @property
    def failed(self) -> RowSpan | None:
        """The rows that could not be collated, if any could not since the last `batches`."""
        found = None if self._last is None else self._last.failed
        return None if found is None else RowSpan(*found, 0, self.rows.sample_order.rows_in_step(found[1], found[0]))

    def named(self, place: RowSpan) -> str:
        """Return which rows these are, for people."""
        start = place.step * self.rows.sample_order.per_shard + place.offset
        rows = named_rows(self.rows.source, self.rows.sample_order, place.shard, start, place.rows)
        return f"of shard {place.shard} in step {place.step}, {rows}"

    def batches(self, shards: Sequence[int], first_step: int, *, stream: bool) -> Batches:
        """Return the batches of these shards from `first_step` on. `stream`: Ray Data reads ahead."""
        plan, job = self._plan, self._plan.job
        self._last = Batches(
            self.rows,
            shards=shards,
            first_step=first_step,
            microbatches=job.parallel.microbatches,
            collate=self._collate,
            cache=self._cache,
            make_stream=functools.partial(open_stream, node=_node(), roots=plan.roots) if stream else None,
            pin=self._pin,
        )
        return self._last

    def of_member(self, stage: Stage, shards: Sequence[int], first_step: int, stack: ExitStack) -> Feed:
        """Return the source of a member's batches, which `stack` closes.

        Of a replica, only the worker at its first position reads data.
        """
        if stage.index:
            return self._counts(shards)
        return stack.enter_context(self.batches(shards, first_step, stream=True))

    def counted(self, shards: Sequence[int]) -> Callable[[int], Shards]:
        """Return a function that returns the number of rows of each microbatch of a step."""
        counts = self._counts(shards)
        return lambda step: counts.get(step, 0.0).shards

    def evaluation(self, stage: Stage) -> Evaluation | None:
        """Return the evaluation of that stage; others than the first position get only the row counts.

        None if the job has no evaluation.
        """
        found, seen = self._evaluation, self._plan.held_out
        if found is None or seen is None or not stage.index:
            return found
        sample_order = evaluation_order_of(self._plan.job, seen)
        rows = microbatch_rows(sample_order, self._plan.job.parallel.microbatches)
        return replace(found, batches=lambda shard: held_out_counts(sample_order, shard, rows))

    def _counts(self, shards: Sequence[int]) -> Counts:
        job = self._plan.job
        return Counts(sample_order_of(job, self._plan.data), shards, job.parallel.microbatches)


def _evaluation(job: Job, rows: RowReader, collate: Collate) -> Evaluation | None:
    if job.evaluate is None:
        return None
    size = microbatch_rows(rows.sample_order, job.parallel.microbatches)
    return Evaluation(every_steps=job.evaluate.every_steps, batches=lambda shard: held_out(rows, shard, size, collate))


def open_stream(*arguments: Any, **settings: Any) -> Any:
    """Open a Ray Data stream; Ray Data is loaded here, when the first one is needed, because that takes a second."""
    from raytrain_plus.data.reading.stream import Stream

    return Stream(*arguments, **settings, first=ray_data_on_the_head)


def read_elsewhere(rows: RowReader, roots: Sequence[str]) -> Callable[[RowRange], pa.Table]:
    """See `stream.reading_elsewhere`; on this node."""
    from raytrain_plus.data.reading.stream import reading_elsewhere

    return reading_elsewhere(rows, roots, _node())


def _node() -> str:
    node: str = ray.get_runtime_context().get_node_id()
    return node
