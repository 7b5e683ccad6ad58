"""Manage the checkpoints of one run: when one is due, which are in progress, and which the run can resume from."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from functools import partial

import yaml

from raytrain_plus.controller.journal import Journal
from raytrain_plus.controller.order import Order
from raytrain_plus.controller.publisher import Published, Publisher
from raytrain_plus.controller.saving import Abandoned, Saving
from raytrain_plus.errors import TaskError
from raytrain_plus.membership.view import Member
from raytrain_plus.runs.history import Past
from raytrain_plus.state.manifest import Manifest, joined, name_of, void
from raytrain_plus.state.stages import whole_tree
from raytrain_plus.storage.interface import Folder
from raytrain_plus.storage.outage import outage_of
from raytrain_plus.workers.messages import Written

WRITER = "checkpoints"

log = logging.getLogger(__name__)


GENERATIONS = 32
"""Number of newest generations whose late shares of a checkpoint are still accepted."""


class Checkpoints:
    """The checkpoint state on the controller's thread; the publisher does what takes long on its own thread."""

    def __init__(
        self,
        run: Folder,
        order: Order,
        journal: Journal,
        post: Callable[[Callable[[], None]], None],
        saved: Callable[[int], None],
        settled: Callable[[int, int], None],
    ) -> None:
        """`post` puts work of another thread into the controller's inbox.

        `saved` gets the step of each complete checkpoint; `settled` gets step and generation of each that is no longer
        in progress.
        """
        past, job = order.past or Past(), order.plan.job
        self._order = order
        self._journal = journal
        self._every_s = job.checkpoint.every_s
        self._told_saved = saved
        self._settled = settled
        self._saving = Saving()
        self._publisher = Publisher(
            run,
            [found.manifest for found in past.found if found.manifest is not None],
            job.checkpoint.keep,
            job.checkpoint.keep_best,
            journal.settle,
            lambda published: post(partial(self._published, published)),
            ours=journal.check_fence,
            damaged=[found.name for found in past.found if found.damaged],
            failed=lambda error, wanted: journal.outages.failed(WRITER, outage_of(error, run, wanted)),
        )
        self._publishing: set[str] = set()
        self._writers: dict[int, Sequence[Member]] = {}
        self._layout: Sequence[Member] = ()
        self._resumptions = list(past.resumptions)
        self._last = time.monotonic()
        self._wished: int | None = None

    @property
    def newest(self) -> Manifest | None:
        """The newest checkpoint that is complete and can be used, as far as is known."""
        return next(iter(self._publisher.complete), None)

    @property
    def durable(self) -> int:
        """The step of the newest checkpoint; -1 if there is none."""
        return -1 if self.newest is None else self.newest.step

    @property
    def publishing(self) -> bool:
        """Whether a checkpoint whose shares are written is being published; older ones may be removed then."""
        return bool(self._publishing)

    @property
    def busy(self) -> bool:
        """Whether any checkpoint is in progress."""
        return bool(self._saving) or self.publishing

    def wanted(self, generation: int, now: float) -> bool:
        """Whether the last checkpoint is so old that this generation must make one; True once per generation."""
        if self._every_s is None or self._wished == generation or self.busy or now - self._last <= self._every_s:
            return False
        self._wished = generation
        return True

    def formed(self, number: int, members: Sequence[Member]) -> None:
        """Set the workers that write checkpoints with that generation number, in this order."""
        self._writers[number] = self._layout = members
        if len(self._writers) > GENERATIONS:
            del self._writers[min(self._writers)]

    def begin(self, step: int, number: int, writers: Sequence[str]) -> None:
        """Begin a checkpoint written by these workers after they have left their world."""
        self._saving.begin(step, number, writers)

    def wrote(self, told: Written, living: Collection[str]) -> None:
        """Handle a worker's written share, or its failure to write one."""
        if told.outage is not None:
            self._journal.outages.failed(WRITER, told.outage)
        members = self._writers.get(told.generation)
        if members is not None:
            self._saving.begin(told.step, told.generation, [member.worker for member in members])
        elif not self._saving.knows(told.step, told.generation):
            log.warning(
                "refused: a share of step %d in generation %d, which has no writers", told.step, told.generation
            )
            return
        if self._saving.given_up(told.step, told.generation):
            # The last writers may come late, and so may have heard this before they began.
            self._publisher.discard(name_of(told.step, told.generation))
            self._settled(told.step, told.generation)
            return
        self._give_up(self._saving.written(told, living))

    def make(self) -> None:
        """Publish the checkpoints whose shares are all written, as far as their steps are committed."""
        for shares in self._saving.whole(self._journal.committed):
            try:
                manifest = self._manifest(shares)
            except TaskError as error:
                self._give_up([Abandoned(shares[0].step, shares[0].generation, str(error))])
                continue
            self._publishing.add(manifest.name)
            self._publisher.publish(manifest)

    def left(self, name: str, number: int, copied: int) -> None:
        """Record that a worker left the generation with that number, with its state copied up to step `copied`."""
        self._give_up(self._saving.left(name, number, copied))

    def lost(self, living: Collection[str]) -> None:
        """Record that only these workers are left."""
        self._give_up(self._saving.lost(living))

    def wait_no_longer(self, why: str) -> None:
        """Give up the checkpoints whose shares are not all written."""
        self._give_up(self._saving.give_up_all(why))

    def drop(self, manifest: Manifest) -> None:
        """Stop using this checkpoint, without removing it."""
        self._publisher.drop(manifest)

    def go_back(self, generation: int, step: int) -> None:
        """Continue from that step: checkpoints above it no longer count."""
        self._resumptions.append((generation, step))
        self._publisher.forget(self._resumptions)
        self._give_up(self._saving.give_up_void(self._resumptions))

    def restart_clock(self) -> None:
        """Restart the time until the next checkpoint."""
        self._last, self._wished = time.monotonic(), None

    def close(self) -> None:
        """Begin nothing more."""
        self._publisher.close()

    def _manifest(self, shares: Sequence[Written]) -> Manifest:
        order, first = self._order, shares[0]
        files, tensors = joined([told.share for told in shares if told.share is not None])
        return Manifest(
            run=order.plan.job.name,
            step=first.step,
            generation=first.generation,
            time=first.time,
            job=json.loads(json.dumps(yaml.safe_load(order.job_yaml), default=str), parse_constant=str),
            task_sha256=order.task_sha256,
            versions=order.versions,
            data={
                "fingerprint": order.plan.index.fingerprint,
                "rows": order.plan.index.rows,
                "samples": self._journal.samples(first.step),
            },
            layout=[asdict(member) for member in self._writers.get(first.generation, self._layout)],
            random={"keyed_by": "seed, step, shard, microbatch, layer", "seed": order.plan.job.seed},
            metrics={
                name: value
                for name, value in (first.metrics or self._journal.figures(first.step)).items()
                if math.isfinite(value)
            },
            stall_s=max(told.stall_s for told in shares),
            tree=whole_tree([told.tree for told in shares if told.tree is not None]),
            files=files,
            tensors=tensors,
        )

    def _published(self, published: Published) -> None:
        manifest = published.manifest
        self.restart_clock()
        self._publishing.discard(manifest.name)
        if published.error:
            self._journal.not_saved(manifest.step, published.error)
        elif void(manifest.name, self._resumptions):
            self._journal.not_saved(manifest.step, "the run has resumed from an earlier step meanwhile")
        else:
            self._journal.outages.worked(WRITER)
            self._journal.saved(manifest.step, time.time() - manifest.time, manifest.stall_s)
            self._told_saved(manifest.step)
        self._settled(manifest.step, manifest.generation)

    def _give_up(self, abandoned: Sequence[Abandoned]) -> None:
        for one in abandoned:
            self.restart_clock()
            self._journal.not_saved(one.step, one.why)
            self._publisher.discard(name_of(one.step, one.generation))
            self._settled(one.step, one.generation)
