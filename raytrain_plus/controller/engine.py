"""Wire the controller's parts together, and run them: everything of the controller but Ray.

Messages and commands have one table each, from their type to their handler: `message_handlers` and `Executor.connect`.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from raytrain_plus.controller.checkpoints.checkpoint_publisher import Published
from raytrain_plus.controller.checkpoints.checkpointing import Checkpoints, publisher_of
from raytrain_plus.controller.checkpoints.restoring import Restoring
from raytrain_plus.controller.ending import Ending
from raytrain_plus.controller.event_loop import TICK_S, Clock, Died, EventLoop, Host, WorkerGroup
from raytrain_plus.controller.executor import Executor
from raytrain_plus.controller.group.arrivals import Arrivals
from raytrain_plus.controller.group.formation import Formation, Formed
from raytrain_plus.controller.group.last_progress import LastProgress
from raytrain_plus.controller.group.lost_workers import Losses
from raytrain_plus.controller.group.members import Members, Reported
from raytrain_plus.controller.group.model_hand_over import Exported, Exporter, ModelHandOver
from raytrain_plus.controller.group.monitor import Monitor, NodeWatch
from raytrain_plus.controller.group.nodes import Draining, NodeLost
from raytrain_plus.controller.group.state_copies import Replication
from raytrain_plus.controller.opening import open_run
from raytrain_plus.controller.record.journal import Journal
from raytrain_plus.controller.record.metrics import Metrics
from raytrain_plus.controller.roster.partitions import Partitions
from raytrain_plus.controller.roster.roster import Roster
from raytrain_plus.controller.run_order import Closing, RunOrder
from raytrain_plus.errors import RaytrainError, RunError
from raytrain_plus.membership import events as e
from raytrain_plus.membership.group_state import Limits
from raytrain_plus.membership.hang_detection import Pulses
from raytrain_plus.observe.trackers.trackers import check_installed
from raytrain_plus.runs.folder import check_writable
from raytrain_plus.runs.history import Past
from raytrain_plus.storage.address import split
from raytrain_plus.storage.folders.claimed import Claimed
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.probe import Probe, leave_probe
from raytrain_plus.workers.messages import Sent, Written


class Engine:
    """The controller without Ray: its parts, and the loop that runs them until the run has ended."""

    def __init__(
        self,
        order: RunOrder,
        limits: Limits,
        began: float,
        *,
        workers: WorkerGroup,
        nodes: NodeWatch,
        metrics: Metrics,
        host: Host,
        clock: Clock,
    ) -> None:
        """Wire the parts for the run of this order; `began`: Unix seconds at which Ray was available."""
        job = order.plan.job
        self._order, self._clock, self._host = order, clock, host
        self._workers, self._nodes, self._metrics = workers, nodes, metrics
        self.run_folder = run = Claimed(open_folder(order.plan.folder))
        self.loop = loop = EventLoop(workers, clock)
        self.journal = journal = journal_of(order, run, clock)
        publisher = publisher_of(run, order, journal, loop.put)
        self.machine = machine = Executor(limits, publisher.durable)
        self._exporter = Exporter(run, workers.begin, journal.check_fence, loop.put, journal.outages)
        roster, pulses = Roster(), Pulses()
        partitions = Partitions(job, roster, order.sizes)
        self._checkpoints = checkpoints = Checkpoints(
            run, order, journal, publisher, loop, machine, partitions, host, clock
        )
        restoring = Restoring(run, order.past, journal, checkpoints, loop, machine, partitions, order.plan.fresh_rates)
        replication = Replication(loop, machine, roster, journal, job.parallel.overlaps)
        members = Members(loop, machine, journal, pulses, checkpoints, replication, clock, job.best)
        self._formation = formation = Formation(
            loop, machine, journal, roster, partitions, pulses, checkpoints, restoring, replication, members, clock,
            host, self._open_run, order.plan.collective, job.best,
        )  # fmt: skip
        self._hand_over = hand_over = ModelHandOver(
            loop, machine, journal, self._exporter, replication, restoring, checkpoints, members, clock, partitions,
            job.best,
        )  # fmt: skip
        losses = Losses(loop, machine, journal, roster, pulses, checkpoints, hand_over, clock)
        self._monitor = monitor = Monitor(
            loop, machine, journal, roster, pulses, formation, members, losses, checkpoints, hand_over,
            LastProgress(loop, checkpoints, hand_over, journal), nodes, job.elastic, clock, host.node,
        )  # fmt: skip
        self._arrivals = arrivals = Arrivals(
            loop, machine, journal, roster, partitions, pulses, losses, monitor, clock, order.plan
        )
        self._ending = ending = Ending(journal, members, arrivals, hand_over, job.name, began)
        machine.connect(
            arrivals, formation, members, monitor, losses, replication, checkpoints, restoring, hand_over, ending
        )
        loop.serve(message_handlers(machine, members, formation, checkpoints, replication, hand_over, losses, monitor))

    @property
    def closing(self) -> Closing | None:
        """How the run has ended; None while it has not."""
        return self._ending.closing

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop."""
        return self.machine.group.stopping

    def run(self) -> Closing:
        """Run the job to its end. Input errors that only a worker can see are raised before a folder is made."""
        # On a cluster this may be another machine than the one that checked the job.
        check_installed(self._order.plan.job.trackers)
        place, name = split(self.run_folder.address)
        with leave_probe(check_writable(place), name) as probe:
            try:
                self.begin(probe)
                while self.closing is None:
                    self.turn(TICK_S)
                return self.closing
            except Exception as failure:
                self._fail(failure)
                raise
            finally:
                self.close()

    def begin(self, probe: Probe | None) -> None:
        """Start the first workers. Those on nodes that come later check the `probe` too."""
        self._arrivals.plan = replace(self._order.plan, probe=probe)
        self._nodes.start(self.loop.put)
        self.machine.begin()
        self._monitor.begin()

    def turn(self, wait_s: float) -> None:
        """Handle all that is in the inbox, wait up to `wait_s` if that is nothing, and look at the clock once."""
        while self.closing is None and self.loop.hear(wait_s):
            wait_s = 0
            self._hand_over.look()
        now = self._clock.now()
        self.journal.renew()
        self._checkpoints.make()
        self._checkpoints.request_in_time(now)
        if self._metrics.due:
            newest = self._checkpoints.newest
            self._metrics.show(self.journal.gauges.values(None if newest is None else newest.time))
        self.loop.fire(now)
        self._monitor.look(now)
        self._hand_over.look()

    def close(self) -> None:
        """Stop everything that still runs."""
        self._nodes.close()
        self._formation.close()
        self._exporter.close()
        self._workers.shutdown()
        self._checkpoints.close()
        self.journal.close()

    def _fail(self, failure: Exception) -> None:
        if self.journal.opened:
            ours = "" if isinstance(failure, RaytrainError) else f"\n{traceback.format_exc()}"
            # If that cannot be written either, the first failure is the one to report.
            with contextlib.suppress(RunError):
                self._ending.fail(f"{failure}{ours}")

    def _open_run(self) -> None:
        open_run(self._order, self.run_folder, self.journal, self._host)
        self._checkpoints.restart_clock()


def journal_of(order: RunOrder, run: Claimed, clock: Clock) -> Journal:
    """Return the journal of this run."""
    plan = order.plan
    rows, epochs = plan.data.rows, plan.job.epochs
    end = None if epochs is None else (plan.steps, epochs * rows)
    return Journal(run, plan.job.data.batch_size, rows, end, order.past or Past(), clock.unix)


def message_handlers(
    machine: Executor,
    members: Members,
    formation: Formation,
    checkpoints: Checkpoints,
    replication: Replication,
    hand_over: ModelHandOver,
    losses: Losses,
    monitor: Monitor,
) -> Mapping[type[Any], Callable[[Any], None]]:
    """Return the handler of each kind of message: workers' reports, deaths, threads' results, and users' requests."""
    return {
        Reported: members.reported,
        Formed: formation.joined,
        Written: checkpoints.wrote,
        Sent: replication.sent,
        Published: checkpoints.published,
        Exported: hand_over.exported,
        Died: losses.died,
        Draining: monitor.drains,
        NodeLost: losses.node_lost,
        e.Stop: monitor.stop,
        e.Rescale: machine.feed,
    }
