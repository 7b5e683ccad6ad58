"""Start workers, and prepare them until they can join."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from raytrain_plus.controller.group.lost_workers import Losses
from raytrain_plus.controller.group.monitor import Monitor
from raytrain_plus.controller.run import Handlers, Run
from raytrain_plus.errors import DataChanged, InputError, RaytrainError
from raytrain_plus.membership import events as e
from raytrain_plus.membership.pieces import Piece, Pieces
from raytrain_plus.membership.timeouts import PREPARE_S
from raytrain_plus.storage.probe import Probe
from raytrain_plus.workers.messages import PreparedReport, WorkerLocation

log = logging.getLogger(__name__)


class Arrivals:
    """Starts workers, has them prepare, and reports them to the machine once they are ready."""

    def __init__(self, run: Run, losses: Losses, monitor: Monitor) -> None:
        self.loop, self.machine, self.record = run.loop, run.machine, run.record
        self.roster, self.partitions, self.pulses, self.clock = run.roster, run.partitions, run.pulses, run.clock
        self.losses, self.monitor = losses, monitor
        self.plan = run.order.plan
        """The plan as workers get it."""
        self.data_changed: DataChanged | None = None
        """Why the run has failed, though it stops as if asked to: a worker found changed data before it joined."""
        self._trying = ""
        """The worker that tries the task, or has tried it. While it does, it is preparing, and the first group waits.
        """

    @property
    def handles(self) -> Handlers:
        """See `Handling`."""
        return {e.Start: self.start, e.WarmUp: self.warm_up}

    def begin(self, probe: Probe | None) -> None:
        """Have workers on nodes that come later check the `probe` too."""
        self.plan = replace(self.plan, probe=probe)

    def start(self, command: e.Start) -> None:
        """Start workers."""
        for name in command.workers:
            self.loop.later(command.delay_s, partial(self._start, name))

    def warm_up(self, command: e.WarmUp) -> None:
        """Have a worker run a warm-up step."""
        name = command.worker
        self.loop.ask(name, "warm_up", then=partial(self._warmed_up, name), failed=partial(self._cold, name))

    def _start(self, name: str) -> None:
        if name not in self.machine.group.workers:
            return
        self.loop.start(name)
        self._expect(name)

    def _expect(self, name: str) -> None:
        """Wait until a worker's process has come up; a process that takes too long is replaced."""
        self.loop.ask(name, "location", then=partial(self._came, name))
        self._watch(name)

    def _watch(self, name: str) -> None:
        if not self._expected(name):
            return
        left_s = self.loop.start_left_s(name)
        if left_s > 0:
            self.loop.later(left_s, partial(self._watch, name))
            return
        log.warning("%s has not come up in time, so another process is started in its place", name)
        self.loop.restart(name)
        self._expect(name)

    def _expected(self, name: str) -> bool:
        worker = self.machine.group.workers.get(name)
        return name in self.loop and worker is not None and worker.state == "coming"

    def _came(self, name: str, location: WorkerLocation) -> None:
        if not self._expected(name):
            return
        self.roster.record_location(location)
        self.record.reports.joined(location)
        # Asked once the process is there, so that the answer is quick.
        self.loop.ask(name, "clock", then=partial(self._clocked, name, self.clock.unix()))
        self.pulses.add(name, self.clock.now())
        self.machine.feed(e.Up(name, location.node))
        if self.monitor.is_draining(location.node):
            self.machine.feed(e.Notice(name))
        plan = replace(self.plan, sights=self.roster.sights(location.node), trial=self._is_to_try(name))
        then, failed = partial(self._prepared, name), partial(self._unprepared, name)
        self.loop.ask(name, "prepare", plan, PREPARE_S, then=then, failed=failed)

    def _is_to_try(self, name: str) -> bool:
        """Return whether a worker is to try the task: the first one, or if it is lost, the next that comes."""
        if self.machine.group.generation >= 0 or self._trying in self.loop:
            return False
        self._trying = name
        return True

    def _clocked(self, name: str, asked: float, clock_s: float) -> None:
        self.record.reports.clocks.read(name, clock_s, asked, self.clock.unix())

    def _prepared(self, name: str, ready: PreparedReport) -> None:
        if other := self._with_other_gpu(ready.gpu):
            what = f"the GPU of {name} is {ready.gpu}, but that of {other} is {self.roster.ready[other].gpu}"
            remedy = "set it to the type that Ray gives one of them, such as H100: all workers are then on such nodes"
            self._unprepared(name, InputError(what, "workers.accelerator", "GPUs of one model", remedy))
            return
        self.roster.prepared(name, ready)
        group = self.machine.group
        if (ready.layers or ready.rows) and group.generation < 0:
            counts, parts = group.limits.sizes.stage_counts, group.limits.parts
            unfit: frozenset[tuple[int, int]] = frozenset()
            rows = Pieces.of(Piece(name, 0, count) for name, (count, _, _) in ready.rows.items())
            if ready.layers:
                counts, unfit = self.partitions.fit(counts, group.workers)
                parts = self.partitions.parts(rows)
            row_bytes = {name: size for name, (_, size, _) in ready.rows.items()}
            self.machine.feed(e.Fitted(counts, parts, rows, row_bytes, unfit))
        self.machine.feed(e.Ready(name, -1))

    def _with_other_gpu(self, gpu: str) -> str | None:
        """Return a prepared worker with another GPU model; None if there is none, or the job names the type."""
        if self.plan.job.workers.accelerator is not None:
            return None
        ready = self.roster.ready
        return next((one for one in self.machine.group.workers if one in ready and ready[one].gpu != gpu), None)

    def _unprepared(self, name: str, error: RaytrainError) -> None:
        if self.machine.group.generation < 0:
            raise error
        if isinstance(error, DataChanged):
            self._fail(error)
        else:
            self.losses.lost(name, str(error))

    def _warmed_up(self, name: str, _: None) -> None:
        self.machine.feed(e.Ready(name, None))

    def _cold(self, name: str, error: RaytrainError) -> None:
        if isinstance(error, DataChanged):
            self._fail(error)
        else:
            self.losses.lost(name, f"its warm-up step failed: {error}")

    def _fail(self, error: DataChanged) -> None:
        """Stop at the next step boundary; the run has failed."""
        self.data_changed = error
        self.monitor.stop(e.Stop())
