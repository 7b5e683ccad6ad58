"""Manage the checkpoints of one run: when one is due, which are in progress, and which the run can resume from."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

import yaml

from raytrain_plus.controller.checkpoints.checkpoint_publisher import Published, Publisher
from raytrain_plus.controller.checkpoints.open_checkpoints import Abandoned, Saving
from raytrain_plus.controller.record.journal import Journal
from raytrain_plus.controller.record.run_record import RunRecord
from raytrain_plus.controller.run import Handlers, Run
from raytrain_plus.controller.run_order import RunOrder
from raytrain_plus.errors import RaytrainError, RunError
from raytrain_plus.membership import events as e
from raytrain_plus.membership.group_state import Phase, cover, members_in
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.membership.owners import Owners, senders
from raytrain_plus.membership.pieces import Pieces, union
from raytrain_plus.membership.view import Member, View
from raytrain_plus.runs.history import Past
from raytrain_plus.state.stages import whole_tree
from raytrain_plus.state.stored.manifest import Manifest, join_shares, name_of, void
from raytrain_plus.storage.folders.claimed import Claimed
from raytrain_plus.storage.outage import outage_of
from raytrain_plus.workers.messages import ShareOf, Written

WRITER = "checkpoints"
GENERATIONS = 32
"""Number of newest generations whose late shares of a checkpoint are still accepted."""

log = logging.getLogger(__name__)


def publisher_of(run: Claimed, order: RunOrder, journal: Journal, done: Callable[[Published], None]) -> Publisher:
    """Return the publisher of this run's checkpoints; `done` gets each outcome, on the publisher's thread."""
    past, checkpoint = order.past or Past(), order.plan.job.checkpoint
    return Publisher(
        run,
        past.found,
        checkpoint.keep,
        order.plan.job.best,
        journal.settle,
        done,
        ours=journal.check_fence,
        failed=lambda error, wanted: journal.outages.failed(WRITER, outage_of(error, run, wanted)),
    )


class Checkpoints:
    """The checkpoint state on the controller's thread; the publisher does what takes long on its own thread."""

    def __init__(self, run: Run, publisher: Publisher) -> None:
        order, clock = run.order, run.clock
        self._folder, self._order = run.folder, order
        self._record, self._journal = run.record, run.journal
        self._loop, self._machine, self._partitions = run.loop, run.machine, run.partitions
        self._host, self._clock = run.host, clock
        self._publisher = publisher
        self._every_s = order.plan.job.checkpoint.every_s
        self._saving = Saving()
        self._publishing: set[str] = set()
        self._writers: dict[int, Sequence[Member]] = {}
        self._lacking: dict[int, Pieces] = {}
        """By a generation's number, the pieces of the state that none of its writers has; only if there are any."""
        self._layout: Sequence[Member] = ()
        self._resumptions = list((order.past or Past()).resumptions)
        self._failure = -1, ""
        """The last step whose state was not saved, and why."""
        self._last = clock.now()
        self._requested_in: int | None = None
        """The generation in which a checkpoint was requested."""

    @property
    def handles(self) -> Handlers:
        """See `Handling`."""
        return {e.Keep: self.keep_for_drain, Written: self.wrote, Published: self.published}

    @property
    def newest(self) -> Manifest | None:
        """The newest checkpoint that is complete and can be used, as far as is known."""
        return self._publisher.newest

    @property
    def durable(self) -> int:
        """The step of the newest checkpoint; -1 if there is none."""
        return self._publisher.durable

    @property
    def publishing(self) -> bool:
        """Whether a checkpoint whose shares are written is being published; older ones may be removed then."""
        return bool(self._publishing)

    @property
    def busy(self) -> bool:
        """Whether any checkpoint is in progress."""
        return bool(self._saving) or self.publishing

    @property
    def writers(self) -> Sequence[str]:
        """The workers that write shares of checkpoints in progress."""
        return self._saving.writers

    def why_unsaved(self, step: int) -> str:
        """Return why the state after `step` is in no complete checkpoint."""
        if self.busy:
            return "the checkpoint was not complete when the run ended"
        return self._failure[1] if self._failure[0] == step and self._failure[1] else "no worker could write it"

    def complete(self, step: int) -> Manifest | None:
        """Return the newest complete checkpoint of the state after `step`; None if there is none."""
        return next((one for one in self._publisher.complete if one.step == step), None)

    def has(self, step: int, metric: str) -> bool:
        """Return whether a complete checkpoint has the state after `step` with that metric."""
        return any(one.step == step and metric in one.metrics for one in self._publisher.complete)

    def request_in_time(self, now: float) -> None:
        """Request a checkpoint, once per generation, if the last one is too old."""
        group = self._machine.group
        if group.phase is not Phase.TRAIN or self._requested_in == group.generation or self.busy:
            return
        if self._every_s is not None and now - self._last > self._every_s:
            self._requested_in = group.generation
            # The header carries one member's request to all: a second request could arrive after the first is
            # fulfilled.
            self._loop.tell(members_in(group)[0], "save", group.generation)

    def formed(self, number: int, members: Sequence[Member]) -> None:
        """Set the workers that write checkpoints with that generation number, in this order."""
        self._writers[number] = self._layout = members
        if len(self._writers) > GENERATIONS:
            del self._writers[min(self._writers)]
        self._lacking = {at: lacking for at, lacking in self._lacking.items() if at >= min(self._writers)}

    def take_over(self, number: int, view: View, owners: Owners) -> None:
        """Continue with a generation of that number whose members have their parts from another controller."""
        self.formed(number, view.members)
        self.shares(number, [view.shape.stage(seat) for seat in range(view.shape.size)], owners)

    def take_share(self, name: str, told: Written, complete: Mapping[str, Manifest], saved: Collection[str]) -> None:
        """Handle a worker's share of a checkpoint whose end it has not heard of, at the death of another controller.

        `complete`: the checkpoints that are; `saved`: those of which the record says so.
        """
        checkpoint = name_of(told.step, told.generation)
        if manifest := complete.get(checkpoint):
            if checkpoint not in saved and not self._saving.knows(told.step, told.generation):
                self._record.saved(told.step, self._clock.unix() - manifest.time, manifest.stall_s, checkpoint)
            self._loop.tell(name, "settled", told.step, told.generation)
        else:
            self.wrote(told)

    def shares(self, number: int, stages: Sequence[Stage], owners: Owners) -> list[ShareOf]:
        """Return the parts of writers that hold these stages, in the checkpoints with that generation number.

        `owners`: the rows whose optimizer's state each of them holds, if that is sharded.
        """
        holders, claim = self._partitions.holders(stages), self._folder.claim
        limits = self._machine.group.limits
        written = list(senders(limits.rows, limits.row_bytes, owners).values()) if owners else [None] * len(stages)
        lacking = limits.pieces(Stage()) - union(map(limits.held, stages, written))
        if lacking:
            self._lacking[number] = lacking
        return [
            ShareOf(generation=number, writer=writer, writers=len(stages), holders=holders, rows=rows, claim=claim)
            for writer, rows in enumerate(written)
        ]

    def keep_for_drain(self, command: e.Keep) -> None:
        """Request a checkpoint of state whose holders will all leave."""
        self.keep(command.step)

    def keep(self, step: int) -> bool:
        """Request a checkpoint from the holders of the state after `step` in no world; return whether they have it all.

        Only workers whose processes live count: the group may not have heard of a loss yet.
        """
        group = self._machine.group
        limits, workers = group.limits, group.workers
        able = [name for name, worker in workers.items() if worker.state == "idle" and name in self._loop]
        stages = {name: workers[name].stage or Stage() for name in able if workers[name].holds == step}
        offers = [(name, stage, limits.held(stage, workers[name].owned)) for name, stage in stages.items()]
        if not stages or cover(group, offers)[1]:
            return False
        # A number that no generation has: the remains of an earlier attempt may exist under the old one.
        number = self._record.numbers.begin(group.generation)
        # An event has that number before a checkpoint has it: else events would seem to be missing.
        self._record.saving(step, 0, 0, None)
        self._saving.begin(step, number, list(stages))
        owners = {
            name: limits.owned_rows(stage, workers[name].owned)
            for name, stage in (stages.items() if limits.rows else ())
        }
        for name, share in zip(stages, self.shares(number, list(stages.values()), owners), strict=True):
            failed = partial(self._not_kept, name)
            self._loop.ask(name, "keep", self._host.actor, share, failed=failed)
        return True

    def wrote(self, told: Written) -> None:
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
            # It was begun for another controller, and will never be complete.
            self._publisher.discard(name_of(told.step, told.generation))
            self._settled(told.step, told.generation)
            return
        if self._saving.given_up(told.step, told.generation):
            # The last writers may come late, and so may have heard this before they began.
            self._publisher.discard(name_of(told.step, told.generation))
            self._settled(told.step, told.generation)
            return
        if (writer := self._saving.writer(told)) is not None:
            told = replace(told, time=self._record.reports.on_our_clock(writer, told.time))
        self._give_up(self._saving.written(told, self._machine.group.workers))

    def make(self) -> None:
        """Publish the checkpoints whose shares are all written, as far as their steps are committed."""
        for shares in self._saving.whole(self._record.committed):
            try:
                manifest = self._manifest(shares)
            except RaytrainError as error:
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
        self._last, self._requested_in = self._clock.now(), None

    def close(self) -> None:
        """Begin nothing more."""
        self._publisher.close()

    def _manifest(self, shares: Sequence[Written]) -> Manifest:
        number = shares[0].generation
        if lacking := self._lacking.get(number):
            raise RunError(f"its writers lack a part of the state ({', '.join(lacking.names)}); please report this")
        return manifest_of(self._order, self._record, self._writers.get(number, self._layout), shares)

    def published(self, published: Published) -> None:
        """Handle the outcome of a checkpoint whose shares were written."""
        manifest = published.manifest
        self.restart_clock()
        self._publishing.discard(manifest.name)
        if published.error:
            self._not_saved(manifest.step, published.error)
        elif void(manifest.name, self._resumptions):
            self._not_saved(manifest.step, "the run has resumed from an earlier step meanwhile")
        else:
            self._journal.outages.worked(WRITER)
            self._record.saved(manifest.step, self._clock.unix() - manifest.time, manifest.stall_s, manifest.name)
            self._machine.feed(e.Saved(manifest.step))
        self._settled(manifest.step, manifest.generation)

    def _give_up(self, abandoned: Sequence[Abandoned]) -> None:
        for one in abandoned:
            self.restart_clock()
            self._not_saved(one.step, one.why)
            self._publisher.discard(name_of(one.step, one.generation))
            self._settled(one.step, one.generation)

    def _not_saved(self, step: int, why: str) -> None:
        self._failure = step, why
        self._record.not_saved(step, why)

    def _settled(self, step: int, number: int) -> None:
        """Announce that a checkpoint is no longer in progress: the next one may begin."""
        for name in self._loop:
            self._loop.tell(name, "settled", step, number)

    def _not_kept(self, name: str, error: RaytrainError) -> None:
        self.wait_no_longer(f"{name} could not copy its state: {error}")


def manifest_of(order: RunOrder, record: RunRecord, layout: Sequence[Member], shares: Sequence[Written]) -> Manifest:
    """Return the manifest of a checkpoint of this run whose shares are all written; `layout`: the members then."""
    first = shares[0]
    files, tensors = join_shares([told.share for told in shares if told.share is not None])
    return Manifest(
        run=order.plan.job.name,
        step=first.step,
        generation=first.generation,
        time=first.time,
        job=json.loads(json.dumps(yaml.safe_load(order.job_yaml), default=str), parse_constant=str),
        task_sha256=order.task_sha256,
        versions=order.versions,
        data={
            "fingerprint": order.plan.data.fingerprint,
            "rows": order.plan.data.rows,
            "samples": record.samples(first.step),
        },
        layout=[asdict(member) for member in layout],
        random={"keyed_by": "seed, step, shard, microbatch, layer", "seed": order.plan.job.seed},
        metrics={
            name: value for name, value in (first.metrics or record.metrics(first.step)).items() if math.isfinite(value)
        },
        stall_s=max(told.stall_s for told in shares),
        tree={**whole_tree([told.tree for told in shares if told.tree is not None]), "weights": _weights(shares)},
        files=files,
        tensors=tensors,
    )


def _weights(shares: Sequence[Written]) -> dict[str, bool]:
    """Return the parameters of all writers, and whether the optimizer has a state of each."""
    names = sorted({name for told in shares for name in told.weights})
    return {name: any(told.weights.get(name, False) for told in shares) for name in names}
