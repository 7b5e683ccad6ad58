"""Wire the controller's parts together, and run them: everything of the controller but Ray.

Each part says which of the state machine's commands, and which messages in the inbox, it `handles`, by their type: who
looks for the references of a command finds the machine, which gives it, and the part, which carries it out.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable
from typing import Any

from raytrain_plus.controller.adopting import Adoption
from raytrain_plus.controller.checkpoints.checkpointing import Checkpoints, publisher_of
from raytrain_plus.controller.checkpoints.restoring import Restoring
from raytrain_plus.controller.ending import Ending
from raytrain_plus.controller.event_loop import TICK_S, Clock, EventLoop, Host, WorkerGroup
from raytrain_plus.controller.executor import Executor
from raytrain_plus.controller.group.arrivals import Arrivals
from raytrain_plus.controller.group.formation import Formation
from raytrain_plus.controller.group.lost_workers import Losses
from raytrain_plus.controller.group.members import Members
from raytrain_plus.controller.group.model_hand_over import Exporter, ModelHandOver
from raytrain_plus.controller.group.monitor import Monitor, NodeWatch
from raytrain_plus.controller.group.state_copies import Replication
from raytrain_plus.controller.opening import beginning_of, open_run, record_of
from raytrain_plus.controller.record.listeners import Listeners
from raytrain_plus.controller.record.metrics import Metrics
from raytrain_plus.controller.roster.partitions import Partitions
from raytrain_plus.controller.roster.roster import Roster
from raytrain_plus.controller.run import Run, merged
from raytrain_plus.controller.run_order import Closing, RunOrder
from raytrain_plus.controller.succession import Hopeless, Succession
from raytrain_plus.errors import RaytrainError, RunError, StaleController
from raytrain_plus.membership.group_state import Limits
from raytrain_plus.observe.trackers.listened import Listened
from raytrain_plus.observe.trackers.trackers import check_installed
from raytrain_plus.runs.folder import Fence, check_writable, claimed_by
from raytrain_plus.storage.address import split
from raytrain_plus.storage.folders.claimed import Claimed
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.probe import Probe, leave_probe

PAUSED_S = 3.0
"""Seconds between two looks at the clock from which on the process may have been stopped."""
HALT_S = 5.0
"""Maximum seconds until what the controller does at a moment is done."""


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
        listeners: Callable[[Listened, str, Any], Listeners],
    ) -> None:
        """Wire the parts for the run of this order; `began`: Unix seconds at which Ray was available."""
        self._listeners = listeners
        self._halting, self._halted = threading.Event(), threading.Event()
        self._stale = False
        """Whether a worker has refused this controller, because it obeys another one."""
        self._order, self._clock, self._host = order, clock, host
        self._turned = clock.now()
        """When it last looked at the clock."""
        self._workers, self._nodes, self._metrics = workers, nodes, metrics
        self.run_folder = folder = Claimed(open_folder(order.plan.folder))
        self.loop = loop = EventLoop(workers, clock)
        self.record = record = record_of(order, folder, clock.unix)
        self.journal = journal = record.journal
        publisher = publisher_of(folder, order, journal, loop.put)
        self.machine = machine = Executor(limits, publisher.durable)
        roster = Roster()
        partitions = Partitions(order.plan.job, roster, order.sizes)
        run = Run(order, folder, loop, machine, record, partitions, roster, clock, host)

        self._exporter = Exporter(folder, workers.begin, journal.check_fence, loop.put, journal.outages)
        self._checkpoints = checkpoints = Checkpoints(run, publisher)
        restoring, replication = Restoring(run, checkpoints), Replication(run)
        members = Members(run, checkpoints, replication)
        self._formation = formation = Formation(run, checkpoints, restoring, replication, members, self._open_run)
        self._hand_over = hand_over = ModelHandOver(run, self._exporter, replication, restoring, checkpoints, members)
        losses = Losses(run, checkpoints, hand_over)
        self._monitor = monitor = Monitor(run, formation, members, losses, checkpoints, hand_over, nodes)
        self._arrivals = arrivals = Arrivals(run, losses, monitor)
        self._ending = ending = Ending(run, members, arrivals, hand_over, began)
        self._adoption = Adoption(run, machine, formation, members, replication, checkpoints, restoring, listeners)

        self.handlers = merged(
            [
                arrivals,
                formation,
                members,
                monitor,
                losses,
                replication,
                checkpoints,
                restoring,
                hand_over,
                ending,
                machine,
            ]
        )
        """What handles each command of the machine, and each message."""
        loop.serve(self.handlers)
        machine.serve(self.handlers, replication.look)

    @property
    def closing(self) -> Closing | None:
        """How the run has ended; None while it has not."""
        return self._ending.closing

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to stop."""
        return self.machine.group.stopping

    def run(self, succession: Succession | None = None, begun: Callable[[], None] = lambda: None) -> Closing:
        """Run the job to its end. Input errors that only a worker can see are raised before a folder is made.

        `succession`: what it takes over; None if it begins with new workers. `begun` is called once the group is known.
        """
        # On a cluster this may be another machine than the one that checked the job.
        check_installed(self._order.plan.job.trackers)
        place, name = split(self.run_folder.address)
        with leave_probe(check_writable(place), name) as probe:
            try:
                self.begin(probe) if succession is None else self.take_over(succession, probe)
                begun()
                while self.closing is None:
                    if self._halting.is_set():
                        self._halted.set()
                        threading.Event().wait()
                    self.turn(TICK_S)
                return self.closing
            except Exception as failure:
                self._stale = isinstance(failure, StaleController)
                if succession is not None and not self.journal.opened and not self._stale:
                    self._take_up(succession.fence)
                self._fail(failure)
                raise
            finally:
                self.close()

    def give_up(self, left: Hopeless) -> Closing:
        """End a run that cannot be taken over, and its workers; return how it ends. Its folder says that, too.

        Raises `RunError` if that cannot be written.
        """
        try:
            self._take_up(left.fence)
            return Closing(result=self._ending.fail(str(left.error)), error=left.error)
        finally:
            self.close()

    def _take_up(self, fence: Fence) -> None:
        """Open the run's record only to end it."""
        # If that is impossible, the reason to end the run is what counts.
        with contextlib.suppress(RunError, OSError):
            self.run_folder.hold(fence.claim)
            self.record.take_up(fence, beginning_of(self._order, self._host))

    def begin(self, probe: Probe | None) -> None:
        """Start the first workers. Those on nodes that come later check the `probe` too."""
        self._arrivals.begin(probe)
        self._nodes.start(self.loop.put)
        self.machine.begin()
        self._monitor.begin()

    def take_over(self, left: Succession, probe: Probe | None) -> None:
        """Go on with the workers that another controller has left; those on nodes that come later check the `probe`."""
        self._arrivals.begin(probe)
        self._nodes.start(self.loop.put)
        self._adoption.adopt(left)
        self._monitor.begin()

    def halt(self) -> None:
        """Do nothing more, for ever: this process ends. Called by another thread; returns when that is so."""
        self._halting.set()
        self._halted.wait(HALT_S)

    def turn(self, wait_s: float) -> None:
        """Handle all that is in the inbox, wait up to `wait_s` if that is nothing, and look at the clock once."""
        if self._clock.now() - self._turned > PAUSED_S:
            # This process was stopped, and may have been replaced: look before anything is told.
            with contextlib.suppress(OSError):
                self.journal.check_fence()
        while self.closing is None and self.loop.hear(wait_s):
            wait_s = 0
            self._hand_over.look()
        now = self._clock.now()
        self.journal.renew()
        self._checkpoints.make()
        self._checkpoints.request_in_time(now)
        if self._metrics.due:
            newest = self._checkpoints.newest
            self._metrics.show(self.record.gauges.values(None if newest is None else newest.time))
        self.loop.fire(now)
        self._monitor.look(now)
        self._hand_over.look()
        self._turned = self._clock.now()

    def close(self) -> None:
        """Stop everything that still runs."""
        self._nodes.close()
        self._formation.close()
        self._exporter.close()
        if not self.replaced:
            self._workers.shutdown()
        self._checkpoints.close()
        self.journal.close()

    @property
    def replaced(self) -> bool:
        """Whether another process of this controller has taken over: the workers, and Ray's actor, are that one's."""
        if self._stale:
            return True
        with contextlib.suppress(RunError, OSError):
            self.journal.check_fence()
        return self.journal.lost and claimed_by(self.run_folder) == self._host.name

    def _fail(self, failure: Exception) -> None:
        if self.journal.opened:
            ours = "" if isinstance(failure, RaytrainError) else f"\n{traceback.format_exc()}"
            # If that cannot be written either, the first failure is the one to report.
            with contextlib.suppress(RunError):
                self._ending.fail(f"{failure}{ours}")

    def _open_run(self) -> None:
        open_run(self._order, self.run_folder, self.record, self._host, self._listeners)
        self._checkpoints.restart_clock()
