"""Form a generation: the rendezvous of its worlds, and each member's assignment."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from raytrain_plus.collective.invitation import Invitation
from raytrain_plus.collective.member_credentials import Credentials
from raytrain_plus.collective.rendezvous import RendezvousServer
from raytrain_plus.controller.checkpoints.checkpointing import Checkpoints
from raytrain_plus.controller.checkpoints.restoring import Restoring
from raytrain_plus.controller.event_loop import stale
from raytrain_plus.controller.group.members import Members
from raytrain_plus.controller.group.state_copies import Replication
from raytrain_plus.controller.record.run_record import FormedGroup
from raytrain_plus.controller.roster.donors import DonorPart, donor_parts
from raytrain_plus.controller.run import Handlers, Run
from raytrain_plus.membership import events as e
from raytrain_plus.membership.pieces import Pieces
from raytrain_plus.membership.view import View
from raytrain_plus.workers.messages import Assignment, Charter, ShareOf

COLLECTIVE_S = 3600.0
"""Maximum seconds of a collective in a worker that hears nothing; otherwise the controller decides, and much sooner."""

FIRST_STANDBY_S = 10.0
"""Seconds from the first view to the start of its standbys: a run that ends before needs none, and keeps its pace."""
STANDBY_S = 3.0
"""Those from any other view: workers that are about to join come first."""

Addresses = frozenset[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class InWorld:
    """A worker is in its world, and has the state."""

    worker: str
    generation: int
    form_s: float
    """Seconds that the world took to form."""
    moved_bytes: int
    """Bytes of the state that came from other workers."""


@dataclass
class _Worlds:
    """The current generation's view and the rendezvous servers of its worlds."""

    view: View
    rings: list[RendezvousServer] = field(default_factory=list)
    replicas: list[RendezvousServer] = field(default_factory=list)
    slowest_s: float = 0.0
    """The longest time that a joined member took to form its worlds."""
    moved_bytes: int = 0
    """Bytes of the state that its members got from others."""
    told: bool = False
    """Whether the record has the view."""

    def close(self) -> None:
        """Close the rendezvous servers."""
        for server in (*self.rings, *self.replicas):
            server.close()


class Formation:
    """Forms one generation after another; holds the rendezvous servers of the current one."""

    def __init__(
        self,
        run: Run,
        checkpoints: Checkpoints,
        restoring: Restoring,
        replication: Replication,
        members: Members,
        open_run: Callable[[], None],
    ) -> None:
        """Prepare to form generations.

        `open_run` opens the run's folder. Only the first generation does so: nothing is wrong then with what was
        requested.
        """
        self.loop, self.machine = run.loop, run.machine
        self.record, self.journal = run.record, run.journal
        self.roster, self.partitions, self.pulses = run.roster, run.partitions, run.pulses
        self.clock, self.host, self.best = run.clock, run.host, run.best
        self.collective = run.order.plan.collective
        self.checkpoints, self.restoring, self.replication = checkpoints, restoring, replication
        self.members, self.open_run = members, open_run
        self._now: _Worlds | None = None

    @property
    def handles(self) -> Handlers:
        """See `Handling`."""
        return {e.Join: self.join, e.Formed: self.formed, InWorld: self.joined}

    def join(self, command: e.Join) -> None:
        """Form the worlds of a view, and have its members train in them."""
        view = command.view
        if not self.journal.opened:
            self.open_run()
        self.journal.renew()
        if not command.again:
            self.restoring.go_back_to(command.first_step - 1, view.generation)
        number = self.record.numbers.of(view.generation)
        self.checkpoints.formed(number, view.members)
        names = [member.worker for member in view.members]
        self.record.regroup(self.clock.unix(), names, command.first_step - 1, view.generation)
        if self._now is not None:
            threading.Thread(target=self._now.close, name="close rendezvous", daemon=True).start()
        self._now = worlds = _Worlds(view)
        self.members.begin(view)
        shape = view.shape
        lines = shape.lines("replica")
        rings = self._by_seat(worlds.rings, "stage", view, lines)
        replicas = self._by_seat(worlds.replicas, "replica", view, shape.lines("stage", "tensor_rank"))
        sources = self._sources(command)
        others = {name: [one for one in taken if one.worker != name] for name, taken in sources.items()}
        given = self._snapshots((one for taken in others.values() for one in taken), command)
        gives = Counter(source.worker for source in given)
        self.replication.begin(view)
        stages = [shape.stage(seat) for seat in range(shape.size)]
        shares = self.checkpoints.shares(number, stages, command.owners)
        ring_of = {seat: [view.members[other].worker for other in line] for line in lines for seat in line}
        # The same for all, though a checkpoint may become complete at any moment.
        saved = self.best is not None and self.checkpoints.has(command.first_step - 1, self.best.metric)
        charter = Charter(
            group=self.machine.group,
            number=number,
            first_step=command.first_step,
            partitions=self.partitions.chunks,
        )
        for seat, member in enumerate(view.members):
            replica = replicas[seat] if replicas[seat].size > 1 else None
            own = tuple(one for one in sources.get(member.worker, ()) if one.worker == member.worker)
            owners = tuple(command.owners[name] for name in ring_of[seat]) if command.owners else ()
            given_here = gives[member.worker]
            self._assign(command, seat, rings[seat], replica, given_here, shares[seat], own, owners, saved, charter)
            if member.worker in sources:
                taken = tuple(given[source] for source in others[member.worker])
                # A separate call, which ends: a reference lives as long as the call that received it.
                self.loop.tell(member.worker, "take", view.generation, taken)

    def take_over(self, view: View, told: bool) -> None:
        """Continue with a view that another controller has formed, or was forming; its rendezvous servers are gone.

        `told`: whether the record has it.
        """
        self._now = _Worlds(view, told=told)

    def joined(self, message: InWorld) -> None:
        """Record that a member is in its worlds."""
        if stale(self.machine.group, message.generation, f"{message.worker} joined"):
            return
        if self._now is not None:
            self._now.slowest_s = max(self._now.slowest_s, message.form_s)
            self._now.moved_bytes += message.moved_bytes
        self.machine.feed(e.Joined(message.worker, message.generation))

    def formed(self, command: e.Formed) -> None:
        """Record that all members are in their worlds and have the state."""
        if self._now is None:
            return
        view = self._now.view
        names = {member.worker for member in view.members}
        spares = [
            name
            for name, worker in self.machine.group.workers.items()
            if name not in names and not worker.leaving and worker.state in ("idle", "warming_up")
        ]
        self.replication.formed()
        self._stand_by_later(view)
        if self._now.rings or self._now.replicas:
            published = self.published()
            for member in view.members:
                # Another controller, which may take this one's place, could not tell them where to cut their worlds.
                self.loop.tell(member.worker, "formed", view.generation, *published)
        if self._now.told:
            return
        self.record.formed(
            self.clock.unix(),
            FormedGroup(
                view,
                spares,
                self.collective,
                params=self.partitions.parameters(view),
                form_s=self._now.slowest_s,
                moved_bytes=self._now.moved_bytes,
                repartitioned=self.partitions.replaces(view.shape.stages),
                optimizer_bytes=self.roster.held_bytes(self.machine.group.owners),
                slices=self.partitions.slices,
            ),
        )

    def _stand_by_later(self, view: View) -> None:
        self.loop.later(STANDBY_S if view.generation else FIRST_STANDBY_S, partial(self._stand_by, view))

    def _stand_by(self, view: View) -> None:
        """Keep standbys for the members of a view that live, if it is still the current one."""
        if self._now is not None and self._now.view is view:
            # A controller that has adopted the group never met those that had died before.
            names = (one.worker for one in view.members if one.worker in self.machine.group.workers)
            self.loop.stand_by({name: self.roster.node(name) for name in names})

    def cancel(self) -> None:
        """Tell members that wait for others that these will not come."""
        if self._now is not None:
            for server in (*self._now.rings, *self._now.replicas):
                server.cancel()

    def published(self) -> tuple[Addresses, Addresses]:
        """Return the addresses at which members listen so far: in the worlds of stages, and in those of replicas."""
        if self._now is None:
            return frozenset(), frozenset()
        return _published(self._now.rings), _published(self._now.replicas)

    def close(self) -> None:
        """Cancel what is being formed, and stop serving."""
        if self._now is not None:
            self.cancel()
            self._now.close()

    def _assign(
        self,
        command: e.Join,
        seat: int,
        ring: Invitation,
        replica: Invitation | None,
        gives: int,
        share: ShareOf,
        own: Sequence[DonorPart],
        owners: tuple[Pieces, ...],
        saved: bool,
        charter: Charter,
    ) -> None:
        view, name = command.view, command.view.members[seat].worker
        assignment = Assignment(
            generation=view.generation,
            layers=self.partitions.layers(view.shape.stage(seat)),
            ring=ring,
            replica=replica,
            shards=view.members[seat].shards,
            first_step=command.first_step,
            lacks=command.lacks.get(name),
            own_copies=tuple((source.stage, source.layers, source.rows) for source in own),
            gives=gives,
            buddy=self.replication.buddy(name),
            copies=self.replication.copying,
            evaluated=self.record.evaluated,
            history=self.record.history if self.best else {},
            saved=saved,
            share=share,
            seat=seat,
            charter=charter,
            owners=owners,
            incomplete=command.incomplete,
        )
        self.pulses.left(name, self.clock.now())
        then = self.members.came_out(name, view.generation)
        self.loop.ask(name, "serve", self.host.actor, assignment, then=then)

    def _sources(self, command: e.Join) -> dict[str, tuple[DonorPart, ...]]:
        """Return, for each member that lacks parts of the state, their sources."""
        view, workers, limits = command.view, self.machine.group.workers, self.machine.group.limits
        stages = {member.worker: view.shape.stage(seat) for seat, member in enumerate(view.members)}
        takers = {
            name: limits.held(stages[name], command.owners.get(name))
            for name, what in command.lacks.items()
            if what != "initial"
        }
        if not takers:
            return {}
        holding = {
            name: limits.held(stage, workers[name].owned)
            for name in takers
            if command.lacks[name] in ("stage", "rows") and (stage := workers[name].stage)
        }
        self.replication.check(command.donors, command.first_step - 1)
        step = command.first_step - 1
        providers = {
            # A copy is of a stage that one worker held with all its rows.
            (name, stage): limits.held(stage, worker.owned if (worker.holds, worker.stage) == (step, stage) else None)
            for name, stage in command.donors
            for worker in [workers[name]]
        }
        piece_bytes = {**self.partitions.layer_bytes, **limits.row_bytes}
        return donor_parts(takers, holding, providers, piece_bytes, limits.rows)

    def _snapshots(self, sources: Iterable[DonorPart], command: e.Join) -> dict[DonorPart, Any]:
        """Return references to these parts of the state that a view begins with."""
        generation, step, stale = self.machine.group.generation, command.first_step - 1, command.stale
        return {
            one: self.loop.tell(one.worker, "snapshot", generation, step, one.stage, one.layers, one.rows, stale)
            # Members that lack the same share one.
            for one in dict.fromkeys(sources)
        }

    def _by_seat(
        self, servers: list[RendezvousServer], kind: str, view: View, lines: Iterable[Sequence[int]]
    ) -> dict[int, Invitation]:
        """Return each seat's invitation to the world of its line; `kind` begins the names of these worlds."""
        found: dict[int, Invitation] = {}
        for number, line in enumerate(lines):
            members = [view.members[seat].worker for seat in line]
            invitations = self._invitations(servers, f"{kind}{number}-g{view.generation}", members)
            found |= zip(line, invitations, strict=True)
        return found

    def _invitations(self, servers: list[RendezvousServer], world: str, members: Sequence[str]) -> list[Invitation]:
        """Return the invitations to one world of the current generation, by rank; its server is added to `servers`."""
        addresses = [self.roster.address(name) for name in members]
        where, credentials = (self.host.address, 0), [Credentials()] * len(members)
        # A single member needs nobody's address.
        if len(members) > 1:
            server = RendezvousServer(self.host.address, len(members), set(addresses))
            servers.append(server)
            where = (self.host.address, server.start())
            credentials = [server.credentials(rank) for rank in range(len(members))]
        return [
            Invitation(
                generation=self.machine.group.generation,
                name=world,
                rank=rank,
                size=len(members),
                address=address,
                server=where,
                timeout_s=COLLECTIVE_S,
                credentials=credentials[rank],
            )
            for rank, address in enumerate(addresses)
        ]


def _published(servers: Sequence[RendezvousServer]) -> Addresses:
    """Return the addresses at which the members of these worlds listen."""
    return frozenset(place for server in servers for places in server.published().values() for place in places)
