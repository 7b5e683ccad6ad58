"""Runs as in `ends`, in which the controller may die at any moment, too: another one takes its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from raytrain_plus.controller.run_order import Closing
from raytrain_plus.controller.succession import take
from raytrain_plus.data.ledger.ledger_files import entries_of_part
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.result import Result
from raytrain_plus.runs.history import is_void, load_history
from raytrain_plus.training.exchange.step_records import StepRecord
from raytrain_plus.workers.messages import AdoptionReport, Outcome
from tests.unit.controller.ends import Accused, Ends, Expected
from tests.unit.controller.fakes import FakeWorkers, location_of, ready_of
from tests.unit.controller.simulated_worker import ROWS, Process, weights_in, whole_state


class Falls(Ends):
    """A run whose controller may die."""

    falls = 0
    """How often it may die yet."""
    fallen = 0

    def moves(self) -> Iterator[tuple[float, str, Callable[[], None]]]:
        yield from super().moves()
        engine: Any = self.engine
        if engine.journal.opened:
            if engine.journal._outlets._parts._pending:
                yield 0.5, "the ledger is written", self.write_ledger
            if self.falls:
                yield self.deadly, "the controller dies", self.fall

    def write_ledger(self) -> None:
        """Have the ledger written as far as steps are committed, and the workers hear of it."""
        engine: Any = self.engine
        engine.journal._outlets._parts.flush()
        durable = self.engine.record.durable
        for process in self.processes.values():
            process.kept = [
                (number, one) for number, one in process.kept if not isinstance(one, StepRecord) or one.step > durable
            ]

    @property
    def events(self) -> list[dict[str, Any]]:
        return list(read_events(self.run))

    def act(self, name: str) -> None:
        process = self.processes[name]
        if process.calls[0][0] == "restore":
            process.why = "interrupted"
        super().act(name)

    def hear(self) -> None:
        super().hear()
        # Those that the controller has ended.
        self.processes = {name: process for name, process in self.processes.items() if name in self.workers}
        for worker, method, arguments in self.workers.calls[self.rejoined :]:
            if method == "copy_to" and worker in self.processes:
                self._send_again(self.processes[worker])
            if method == "rejoin" and worker in self.processes:
                process = self.processes[worker]
                part = process.part
                called = any(method == "serve" for method, _ in process.calls)
                if part is not None and part.left and not called:
                    assert part.assignment.generation == arguments[0]
                    self.workers.answer(worker, "rejoin", self.outcome(process, process.why, process.member))
        self.rejoined = len(self.workers.calls)

    rejoined = 0

    def _send_again(self, process: Process) -> None:
        part = process.part
        if part is None or part.left or process.sends:
            return
        own = (part.assignment.layers.stage, part.assignment.generation)
        process.sends = [step for (step, stage), made in process.copies.items() if (stage, made) == own][-1:]

    def came_out(self, name: str, outcome: Outcome) -> None:
        for method in ("serve", "rejoin"):
            if self.workers.owes(name, method):
                self.workers.answer(name, method, outcome)
                return

    def answer(self, name: str, method: str, answer: Any) -> None:
        if self.workers.owes(name, method):
            self.workers.answer(name, method, answer)

    def fall(self) -> None:
        """Have the controller die, and another one take its place."""
        self.falls -= 1
        self.fallen += 1
        if self.draw.random() < 0.5:
            # What it has asked last may arrive, or not.
            self.hear()
        before: Any = self.engine
        before.journal._outlets.abandon()
        before.journal._outlets._log.close()
        before.journal._aside._threads.shutdown(wait=True, cancel_futures=True)
        living = {name: process for name, process in self.processes.items() if not self.workers.owes(name, "location")}
        self.processes = living
        self.workers = FakeWorkers()
        self.workers.reports = lambda: {name: self.report_of(name, process) for name, process in living.items()}
        self.heard = self.rejoined = 0
        order, left = take(self.run, self.order, self.workers, "run/1", self.fallen, self.time.clock.unix)
        self.order = order
        if isinstance(left, Result):
            before._ending.closing = Closing(result=left, error=None)
            return
        self.engine = self.engine_of(order)
        self.attach()
        if left is None:
            self.workers.shutdown()
            self.processes.clear()
            self.engine.begin(None)
        else:
            self.engine.take_over(left, None)
        self.turn()

    def report_of(self, name: str, process: Process) -> AdoptionReport:
        """Return what a worker says to a controller that adopts it."""
        part = process.part
        # It has been called into a generation in which it has not begun.
        called = [arguments[1] for method, arguments in process.calls if method == "serve"]
        charter = called[-1].charter if called else None if part is None else part.assignment.charter
        ready: dict[str, Any] = {"layers": tuple(self.layers), "room": 1 << 20} if self.layers else {}
        if self.rows:
            weights = weights_in(whole_state(-1, self.layers, 1))
            ready["rows"] = dict.fromkeys(weights, (ROWS, 8, 8))
        return AdoptionReport(
            location=location_of(name),
            clock_s=1e9 + self.time.now,
            ready=ready_of(**ready),
            charter=charter,
            joined=part is not None and part.joined and not called,
            inside=bool(called) or (part is not None and not part.left),
            outcome=self.outcome(process, process.why, process.member),
            copies=tuple((step, stage, made) for (step, stage), made in process.copies.items()),
            written=process.told,
            records=tuple(process.kept),
        )

    def check_end(self, result: Result, expected: Expected) -> None:
        super().check_end(result, expected)
        steps: dict[int, int] = {}
        for event in read_events(self.run):
            if event["kind"] == "resumed":
                steps = {step: count for step, count in steps.items() if step <= event["step"]}
            elif event["kind"] == "step_committed":
                steps[event["step"]] = steps.get(event["step"], 0) + 1
        if set(steps.values()) - {1} or len(steps) != result.steps:
            raise Accused(f"steps that were told more than once, or never: {steps}")
        void = load_history(self.run).resumptions
        entries = [entry for name in self.run.files("ledger") for entry in entries_of_part(self.run, name)]
        entered = sorted(step for number, step in entries if not is_void(number, step, void))
        if entered != list(range(result.steps)):
            raise Accused(f"the ledger has steps {entered} of {result.steps}")
