"""A run of two workers that follows a script, with a controller that may be killed at any point. Not a test itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_plus.controller.record.aside import Aside
from raytrain_plus.controller.record.journal import Beginning
from raytrain_plus.controller.record.run_record import FormedGroup, RunRecord
from raytrain_plus.data.ledger import ledger_files
from raytrain_plus.data.ledger.ledger import NOTE
from raytrain_plus.data.ledger.ledger_files import LedgerFiles
from raytrain_plus.membership.group_state import Group, Limits
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.membership.sizes import SizeTable
from raytrain_plus.membership.view import form_view
from raytrain_plus.observe import run_events
from raytrain_plus.observe.run_events import EventLog, read_events
from raytrain_plus.result import Result
from raytrain_plus.runs.folder import Fence, claims_of
from raytrain_plus.runs.history import Past, is_void, load_history
from raytrain_plus.storage.interface import Folder
from raytrain_plus.training.exchange.step_records import Evaluated, Record, Remark, StepRecord
from raytrain_plus.workers.messages import Charter, Export, WorkerLocation
from tests.support.listeners import FakeListeners

SHARDS = 2
NOTES = np.zeros(SHARDS, NOTE).tobytes()
NAMES = ("worker-0", "worker-1")
BEGINNING = Beginning("name: x\n", {}, {"rows": 80}, "here", "run/1", "node")
LIMITS = Limits(sizes=SizeTable(minimum=1, maximum=2, shards=SHARDS), spares=0, steps=99, max_failures=None, expected=2)


class Killed(BaseException):
    """The controller's process is gone."""


class Kills:
    """Kills controllers at points at which they have written something, or are about to."""

    def __init__(self, patch: pytest.MonkeyPatch, at: Collection[int]) -> None:
        """Kill at the points of these numbers, counted from 0; nothing is written in the background."""
        self.at, self.points = at, 0
        for module in (ledger_files, run_events):
            patch.setattr(module, "PERIOD_S", 10_000.0)
        patch.setattr(Aside, "later", lambda aside, act, failing: None)
        write, enter = EventLog.write, LedgerFiles._write

        def told(log: EventLog, kind: str, **how: Any) -> Any:
            event = write(log, kind, **how)
            self.pass_point()
            return event

        def entered(files: LedgerFiles, part: Any) -> None:
            self.pass_point()
            enter(files, part)
            self.pass_point()

        patch.setattr(EventLog, "write", told)
        patch.setattr(LedgerFiles, "_write", entered)

    def pass_point(self) -> None:
        self.points += 1
        if self.points - 1 in self.at:
            raise Killed


class ScriptedRun:
    """The workers, which live on, and the record of the controller that lives now."""

    def __init__(self, run: Folder) -> None:
        self.run = run
        self.kept: dict[str, list[tuple[int, Record]]] = {name: [] for name in NAMES}
        self.charter: Charter | None = None
        self.generation = -1
        self.time = 1000.0
        self.listeners: list[FakeListeners] = []
        self.heard: list[dict[str, Any]] = []
        """What a follower has heard, whichever controller told it."""
        self.dead = False
        self.deaths = 0
        """Deaths of controllers in the present act."""
        self.record = self._record(Past())
        self.passed: Callable[[], None] = lambda: None

    def _record(self, past: Past) -> RunRecord:
        record = RunRecord(self.run, batch_size=8, rows=80, end=None, past=past, clock=lambda: self.time)
        for number, name in enumerate(NAMES):
            record.reports.joined(WorkerLocation(worker=name, pid=number, node="n", address="127.0.0.1"))
        self.listeners.append(FakeListeners())
        return record

    def open(self) -> None:
        self.record.open(Fence(self.run, 0), BEGINNING, self.listeners[-1])

    def hear(self) -> None:
        """Let the follower hear of all that is told by now."""
        while news := self.record.journal.follow(len(self.heard), 0):
            self.heard += news

    def join(self, first_step: int, again: int = -1, *, replaced: bool = False) -> None:
        """Form the next generation; it makes the steps up to `again` again, though they stay committed.

        `replaced`: all members are new processes, which know of no earlier step.
        """
        if replaced:
            self.kept = {name: [] for name in NAMES}
        record, generation = self.record, self.generation + 1
        if again < first_step and first_step - 1 < record.committed:
            made, evaluated = record.committed, min(record.evaluated, first_step - 1)
            record.go_back(first_step - 1, generation, None, made, evaluated)
        number = record.numbers.of(generation)
        record.regroup(self.time, NAMES, first_step - 1, generation)
        group = Group(limits=LIMITS, generation=generation, shape=Shape(2), seats=NAMES, again=again)
        self.charter = Charter(group=group, number=number, first_step=first_step, partitions={})
        self.generation = generation

    def formed(self) -> None:
        """Record that the members are in their world; the controller may die before it has."""
        self.passed()
        view = form_view(self.generation, NAMES, Shape(2), SHARDS)
        self.record.formed(
            self.time, FormedGroup(view, [], "torch", dict.fromkeys(NAMES, 10), form_s=0.1, moved_bytes=0)
        )

    def make(self, name: str, *made: StepRecord | Evaluated | Remark) -> None:
        """Have a worker make this and report it."""
        assert self.charter is not None
        self.kept[name] += [(self.charter.number, one) for one in made]
        self.record.report(name, made)
        durable = self.record.durable
        self.kept[name] = [
            (number, one) for number, one in self.kept[name] if not isinstance(one, StepRecord) or one.step > durable
        ]

    def flush(self) -> None:
        """Make durable what is told and entered."""
        self.record.journal.settle()

    def finish(self) -> Result:
        """End the run."""
        export = Export(step=self.record.committed, show=None, state_sha256="ab")
        result = self.record.finish("x", "finished", None, export, 0.0)
        self.record.journal.close()
        return result

    def die(self) -> None:
        """Leave nothing of the controller but what it has written."""
        self.deaths, self.dead = self.deaths + 1, True
        outlets = self.record.journal._outlets
        for writer in (outlets._parts, getattr(outlets._log, "_lines", None)):
            if hasattr(writer, "_periodic"):
                writer._periodic.stop()
        if (file := getattr(getattr(outlets._log, "_lines", None), "_file", None)) is not None:
            file.close()

    def adopt(self) -> None:
        """Have another controller take the workers over."""
        assert self.charter is not None
        fence = Fence(self.run, claims_of(self.run))
        self.dead = False
        past = load_history(self.run)
        self.record = self._record(past)
        self.record.adopt(fence, BEGINNING, self.listeners[-1], self.charter, self.kept)
        self.record.journal.adopted(BEGINNING.node, NAMES)
        if past.formed < self.charter.number:
            self.formed()


Act = tuple[str, Callable[[ScriptedRun], Any]]
"""The kind of an act, and what it does."""


def perform(run: ScriptedRun, script: Sequence[Act]) -> Any:
    """Do all of a script, and return what the last act returns; when a controller is killed, another one adopts."""
    returned = None
    for kind, act in script:
        charter = run.charter
        while True:
            try:
                if run.dead:
                    run.adopt()
                # A report is kept, and a generation that its members know is formed; all else is requested again.
                if (kind in ("join", "finish") and run.charter is charter) or not run.deaths:
                    returned = act(run)
                break
            except Killed:
                run.die()
        run.hear()
        run.deaths = 0
    return returned


def step(number: int, time: float, **changes: Any) -> StepRecord:
    made = StepRecord(step=number, rows=8, loss=1.0 + number, seconds=0.25, waited_s=0.0, time=time, notes=NOTES)
    return replace(made, **changes)


def entries(run: Folder, resumptions: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield generation and step of each entry of the ledger that is not void."""
    for name in sorted(run.files("ledger")):
        table = pq.read_table(pa.BufferReader(run.read(name)), columns=["generation", "step", "shard"])
        for row in table.to_pylist():
            if row["shard"] == 0 and not is_void(row["generation"], row["step"], resumptions):
                yield row["generation"], row["step"]


def steps_told(run: Folder, resumptions: Sequence[tuple[int, int]]) -> list[int]:
    """Return the steps of the events that are not void, in the order of the log."""
    return [
        event["step"]
        for event in read_events(run)
        if event["kind"] == "step_committed" and not is_void(event["generation"], event["step"], resumptions)
    ]


@contextlib.contextmanager
def killed_at(*points: int) -> Iterator[Kills]:
    """Kill controllers at these points."""
    with pytest.MonkeyPatch.context() as patch:
        yield Kills(patch, points)
