"""Put the parts of a controller into the state in which a dead one has left the run, and go on from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raytrain_plus.controller.checkpoints.checkpointing import Checkpoints
from raytrain_plus.controller.checkpoints.restoring import Restoring
from raytrain_plus.controller.executor import Executor
from raytrain_plus.controller.group.formation import Formation
from raytrain_plus.controller.group.members import Members
from raytrain_plus.controller.group.state_copies import Replication
from raytrain_plus.controller.opening import continue_run
from raytrain_plus.controller.record.listeners import Listeners
from raytrain_plus.controller.run import Run
from raytrain_plus.controller.succession import Succession
from raytrain_plus.membership import events as e
from raytrain_plus.membership.adoption import adopt
from raytrain_plus.membership.view import form_view
from raytrain_plus.observe.trackers.listened import Listened
from raytrain_plus.runs.history import Past
from raytrain_plus.workers.messages import AdoptionReport, WorkerLocation

UNSEEN = "it ended while there was no controller"
"""The cause of a loss that no controller has seen."""


class Adoption:
    """Takes a run over. The members train meanwhile, and hear nothing of it unless something has happened to them."""

    def __init__(
        self,
        run: Run,
        machine: Executor,
        formation: Formation,
        members: Members,
        replication: Replication,
        checkpoints: Checkpoints,
        restoring: Restoring,
        listeners: Callable[[Listened, str, Any], Listeners],
    ) -> None:
        self._run, self._machine, self._formation = run, machine, formation
        self._members, self._replication, self._checkpoints = members, replication, checkpoints
        self._restoring, self._listeners = restoring, listeners

    def adopt(self, left: Succession) -> None:
        """Take the run over from its workers."""
        run, charter, past = self._run, left.charter, self._run.order.past or Past()
        for name, report in left.reports.items():
            self._meet(name, report, left)
        run.partitions.keep(charter.partitions)
        formed = charter.group
        view = form_view(formed.generation, formed.seats, formed.shape, formed.limits.sizes.shards)
        self._restoring.begun()
        self._members.begin(view)
        continue_run(left, run, self._listeners)
        requests = requests_of(past)
        self._miss(formed.seats, left, past)
        group, commands = adopt(
            formed,
            left.survivors,
            committed=run.record.committed,
            durable=self._checkpoints.durable,
            named=1 + max(past.named, *map(number_of, left.reports)),
            void_above=min((step for number, step in past.resumptions if number > charter.number), default=None),
            requests=requests,
        )
        self._machine.take_over(group, commands)
        self._formation.take_over(
            view, told=past.formed >= charter.number or not set(formed.seats) <= left.reports.keys()
        )
        self._replication.begin(view)
        self._checkpoints.take_over(charter.number, view, formed.owners)
        for name, report in left.reports.items():
            run.loop.adopt(name)
            if name not in formed.seats or report.charter is None or report.charter.number != charter.number:
                continue
            if report.inside:
                then = self._members.came_out(name, formed.generation)
                run.loop.ask(name, "rejoin", formed.generation, then=then)
            else:
                self._members.note(name, report.outcome)
        self._machine.begin()
        self._take_shares(left, past)
        if e.Stop() in requests:
            # For its limits of time.
            run.loop.put(e.Stop())

    def _meet(self, name: str, report: AdoptionReport, left: Succession) -> None:
        """Record where a worker is, and what it has reported of itself."""
        run = self._run
        run.roster.record_location(report.location)
        run.roster.prepared(name, report.ready)
        run.record.reports.joined(report.location)
        run.record.reports.clocks.read(name, report.clock_s, left.asked, left.answered)
        run.pulses.add(name, run.clock.now())

    def _miss(self, seats: Sequence[str], left: Succession, past: Past) -> None:
        """Record which members are gone, and the recovery that was in progress, if one was."""
        run, now = self._run, self._run.clock.unix()
        members = past.members if past.formed >= 0 else ()
        for member in members:
            if (cause := past.lost.get(member["worker"])) is not None:
                run.record.broken(now, f"{member['worker']} was lost: {cause}")
        for name in (one for one in seats if one not in left.reports and one not in past.lost):
            for member in members:
                if member["worker"] == name:
                    at = WorkerLocation(worker=name, pid=member["pid"], node=member["node"], address="")
                    run.record.reports.joined(at)
            run.record.lost(name, UNSEEN)
            run.record.broken(now, f"{name} was lost: {UNSEEN}")

    def _take_shares(self, left: Succession, past: Past) -> None:
        """Go on with the checkpoints in progress: the shares that are written, and whose end nobody has told."""
        complete = {one.name: one.manifest for one in past.found if one.manifest is not None}
        for name, report in left.reports.items():
            if report.written is not None:
                self._checkpoints.take_share(name, report.written, complete, past.saved)


def requests_of(past: Past) -> list[e.Stop | e.Rescale]:
    """Return what the run was asked for, as far as it still matters."""
    rescales = [request for request in past.requested if request["what"] == "rescale"][-1:]
    found: list[e.Stop | e.Rescale] = [e.Rescale(one["minimum"], one["maximum"], one["spares"]) for one in rescales]
    return [*found, e.Stop()] if any(request["what"] == "stop" for request in past.requested) else found


def number_of(worker: str) -> int:
    """Return the number in a worker's name."""
    return int(worker.rpartition("-")[2])
