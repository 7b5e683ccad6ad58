"""Runs in which anything may happen at any moment, until they have ended: saving, evaluating, stopping, handing over.

The controller is the real one, without Ray (`fakes.Run`), and so are the checkpoints in its folder. Its threads work
when their turn comes. What others may lose is what a worker's process holds (`simulated_worker`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch

from raytrain_plus.audit.audit_record import read_record
from raytrain_plus.controller.group.formation import InWorld
from raytrain_plus.controller.group.members import Reported
from raytrain_plus.errors import Interrupted, WorkerLost
from raytrain_plus.job.settings import Checkpoint, EarlyStop, Elastic, Evaluate, Job, KeepBest, Parallel
from raytrain_plus.membership import events as e
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.membership.pieces import Piece
from raytrain_plus.parallel.pipeline.partition import Layer
from raytrain_plus.result import Result
from raytrain_plus.runs.history import load_history
from raytrain_plus.runs.status import status
from raytrain_plus.state.stages import all_but, own_tensors
from raytrain_plus.state.stored.checkpoint import read_tensors, survey, write_share
from raytrain_plus.state.stored.manifest import FOLDER, Manifest, best_of, name_of, parse_manifest, void
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.training.exchange.early_stop import verdict
from raytrain_plus.training.exchange.header import either
from raytrain_plus.training.exchange.step_records import Activity, StepRecord
from raytrain_plus.workers.messages import Assignment, Layers, Outcome, Sent, Written
from tests.unit.controller.fakes import LaterThread, Run, job_of
from tests.unit.controller.simulated_worker import (
    METRIC,
    ROWS,
    Member,
    Part,
    Process,
    Shared,
    copies_of,
    entries_of,
    tree_of,
    weights_in,
    whole_state,
)

MOST = 3_000
"""The most moves of a run."""


class Accused(AssertionError):
    """A run ended otherwise than it should have, or its folder says what is not true."""


class Ends(Run):
    """A run that is drawn by chance, move by move, to its end."""

    def __init__(
        self,
        folder: Path,
        job: Job,
        draw: Random,
        metric: Callable[[int], float],
        deaths: int,
        stops: int,
        layers: Sequence[Layer] = (),
        rows: bool = False,
    ) -> None:
        """Begin or resume the run in this folder.

        `metric`: the held-out metric of each step's state. `deaths`, `stops`: how often a worker may die, and the run
        may be told to stop. `layers`: those of a model in stages or slices. `rows`: the optimizer's state is sharded.
        """
        self.draw, self.metric, self.deaths, self.stops = draw, metric, deaths, stops
        self.job, self.layers, self.rows = job, layers, rows
        self.processes: dict[str, Process] = {}
        self.heard = 0
        self.sums: dict[tuple[int, str, int], Any] = {}
        """What a sum of the current generation came to, for members that have not received it."""
        self.trace: list[str] = []
        self.deadly = draw.choice((0.05, 0.15, 0.5))
        """How likely a worker is to die at any moment."""
        self.checked = set[str]()
        self.run = LocalFolder(folder)
        super().__init__(folder, job, load_history(self.run) if folder.exists() else None)
        self.attach()
        self.begin()

    def attach(self) -> None:
        """Run the controller's threads when their turn comes."""
        self.publisher, self.exporter = LaterThread(), LaterThread()
        engine: Any = self.engine
        engine._checkpoints._publisher._thread = self.publisher
        engine._exporter._thread = self.exporter
        self.workers.exports = self._export

    # What the controller asks

    def hear(self) -> None:
        """Hand the controller's calls to the workers."""
        while self.heard < len(self.workers.calls):
            worker, method, arguments = self.workers.calls[self.heard]
            self.heard += 1
            if worker not in self.workers:
                continue
            process = self.processes.setdefault(worker, Process())
            part = process.part
            own = part is not None and bool(arguments) and arguments[0] == part.assignment.generation
            if method in ("take", "interrupt", "pause", "save") and part is not None and own:
                self.tell(part, method, arguments)
            if method == "interrupt":
                self.workers.answer(worker, method, Activity(doing="leaving", since_s=0.0, limit_s=99.0))
            elif method == "settled":
                if part is not None:
                    part.history.append((method, arguments))
                process.settled.add(arguments)
                if process.open == arguments:
                    process.open = None
                if process.told is not None and (process.told.step, process.told.generation) == arguments:
                    process.told = None
            elif method == "copied":
                generation, step = arguments
                kept = {at: made for at, made in process.copies.items() if (made, at[0]) >= (generation, step)}
                process.copies = kept
            elif method == "copy_to":
                process.buddy = None if arguments[1] is None else arguments[1].name
            elif method == "writing":
                self.workers.answer(worker, method)
            elif method == "has_copy":
                self.workers.answer(worker, method, self._has(process, *arguments))
            elif method == "stand_aside":
                self.workers.answer(worker, method)
            elif method in ("serve", "keep", "restore", "show", "warm_up", "finish", "recall"):
                process.calls.append((method, arguments))

    def _has(self, process: Process, step: int, stage: Stage) -> bool:
        return (process.holds, process.stage) == (step, stage) or (step, stage) in process.copies

    def layers_of(self, stage: Stage) -> Layers:
        engine: Any = self.engine
        found: Layers = engine._arrivals.partitions.layers(stage)
        return found

    def held(self, step: int, stage: Stage) -> dict[str, torch.Tensor]:
        """Return the tensors of a stage's state after `step`."""
        whole = whole_state(step, self.layers, self.job.parallel.slices)
        return own_tensors(whole, all_but(self.layers_of(stage).others))

    def _export(self, worker: str, method: str, arguments: tuple[Any, ...]) -> Any:
        if worker in self.processes and self.deaths and self.draw.random() < 0.1:
            self.kill(worker, turn=False)
        if worker not in self.processes:
            raise WorkerLost(f"{worker} died")
        process, (step, stage) = self.processes[worker], arguments[:2]
        if not self._has(process, step, stage):
            raise Interrupted("it has no such state")
        tensors = self.held(step, stage)
        if method == "inventory":
            # A copy is of a state with all its rows.
            owned = process.owned if (process.holds, process.stage) == (step, stage) else None
            return [entry for name, value in tensors.items() for entry in entries_of(name, value, owned)]
        pieces: Sequence[Piece] = arguments[2]
        found = []
        for name, first, last in pieces:
            value = tensors[name]
            rows = value[first:last] if value.dim() else value
            found.append(np.frombuffer(rows.numpy().tobytes(), np.uint8))
        return found

    # What may happen

    def moves(self) -> Iterator[tuple[float, str, Callable[[], None]]]:
        """Yield what may happen next: how likely it is, its name, and what it does."""
        for name, process in self.processes.items():
            part, member = process.part, process.member
            if self.workers.owes(name, "location"):
                yield 4.0, f"{name} arrives", partial(self.arrive, name)
            able = process.free or (process.calls and process.calls[0][0] != "keep")
            if process.calls and able and (part is None or part.left):
                yield 4.0, f"{name} does {process.calls[0][0]}", partial(self.act, name)
            for shared in process.writes[:1]:
                yield 2.0, f"{name} writes step {shared.step}", partial(self.write, name)
            for step in process.sends[:1]:
                yield 2.0, f"{name} sends step {step}", partial(self.send, name)
            if part is None or part.left:
                continue
            if not part.joined and self._can_join(part, process):
                yield 4.0, f"{name} joins", partial(self.join_one, name)
            if member is None:
                continue
            if part.reported < len(member.records):
                yield 3.0, f"{name} reports", partial(self.report_all, name)
            if member.why:
                yield 4.0, f"{name} leaves: {member.why}", partial(self.leave_one, name)
            elif member.waits is not None and (waited := self._sum_for(part, member)) is not None:
                yield 4.0, f"{name} gets {waited}", partial(self.receive, name, waited)
        if self._complete() is not None:
            yield 4.0, "a sum is complete", self.complete_sum
        if self.publisher.waiting:
            yield 2.0, "the publisher works", lambda: self.publisher.waiting.pop(0)()
        if self.exporter.waiting:
            yield 2.0, "the exporter works", lambda: self.exporter.waiting.pop(0)()
        if self.deaths:
            for name in self.processes:
                if not self.workers.owes(name, "location"):
                    yield self.deadly, f"{name} dies", partial(self.kill, name)
        if self.stops and self.engine.machine.group.generation >= 0:
            yield 0.1, "stop", self.stop

    def stop(self) -> None:
        self.stops -= 1
        self.engine.loop.put(e.Stop())

    def arrive(self, name: str) -> None:
        ready: dict[str, Any] = {"layers": tuple(self.layers), "room": 1 << 20} if self.layers else {}
        if self.rows:
            weights = weights_in(whole_state(-1, self.layers, 1))
            ready["rows"] = dict.fromkeys(weights, (ROWS, 8, 8))
        self.prepare(name, **ready)
        self.processes[name].holds = -1

    def kill(self, name: str, *, turn: bool = True) -> None:
        self.deaths -= 1
        self.trace.append(f"{name} dies")
        del self.processes[name]
        self.workers.die(name, "killed")

    def act(self, name: str) -> None:
        """Have a training thread do the next thing that it was asked."""
        process = self.processes[name]
        method, arguments = process.calls.pop(0)
        if method == "serve":
            assignment: Assignment = arguments[1]
            process.part, process.member = Part(assignment, process.open, process.free), None
            process.buddy = None if assignment.buddy is None else assignment.buddy.name
            process.sends.clear()
            self.hear_early(name, process.part)
            return
        answer: Any = None
        if method == "keep":
            assert process.holds is not None
            assert process.stage is not None
            process.free, process.open = False, (process.holds, arguments[1].generation)
            process.writes.append(Shared(process.holds, arguments[1], {}, self.layers_of(process.stage)))
        elif method == "restore":
            manifest, layers, owned = arguments
            process.holds, process.stage, process.owned = manifest.step, layers.stage, owned
        elif method == "warm_up":
            process.holds = process.stage = process.owned = None
        elif method == "recall":
            _, step = arguments
            assert process.stage is not None
            if (step, process.stage) in process.copies:
                process.holds, process.owned = step, None
            answer = self.outcome(process, "interrupted")
        elif method == "show":
            answer = None
        else:
            raise AssertionError(method)
        self.answer(name, method, answer)

    def answer(self, name: str, method: str, answer: Any) -> None:
        """Answer a call of the controller."""
        self.workers.answer(name, method, answer)

    def hear_early(self, name: str, part: Part) -> None:
        """Hand a worker what it was told of a generation before its part in it began."""
        for worker, method, arguments in self.workers.calls[: self.heard]:
            told = worker == name and method in ("take", "interrupt", "pause", "save")
            if told and arguments[0] == part.assignment.generation:
                self.tell(part, method, arguments)

    def tell(self, part: Part, method: str, arguments: tuple[Any, ...]) -> None:
        """Tell a worker something of its part in the current generation."""
        if method == "take":
            part.takes = tuple(source.removeprefix("snapshot of ") for source in arguments[1])
        else:
            part.history.append((method,))

    def outcome(self, process: Process, why: Any, member: Member | None = None, records: Sequence[Any] = ()) -> Outcome:
        generation = -1 if process.part is None else process.part.assignment.generation
        own = [step for (step, stage), made in process.copies.items() if (stage, made) == (process.stage, generation)]
        return Outcome(
            holds=process.holds,
            why=why,
            stage=process.stage,
            owned=process.owned,
            copy=max(own, default=None),
            records=records,
            copied=-1 if member is None else member.saved,
            saved_as=-1 if process.part is None else process.part.assignment.share.generation,
            state_sha256="ab" if why == "finished" else None,
        )

    def _can_join(self, part: Part, process: Process) -> bool:
        if ("interrupt",) in part.history:
            return True
        lacks = part.assignment.lacks
        if lacks in (None, "initial"):
            return True
        if part.takes is None:
            return False
        # Those that give wait for those that take, as long as they live.
        return all(name in self.processes for name in part.takes)

    def join_one(self, name: str) -> None:
        """Have a worker take the state and join its world; or leave before, if it was told so."""
        process = self.processes[name]
        part = process.part
        assert part is not None
        if ("interrupt",) in part.history:
            lacks, stage = part.assignment.lacks, part.assignment.layers.stage
            if lacks == "initial" or (lacks == "newer" and process.stage != stage):
                # What it holds makes room for what it is to hold.
                process.holds = process.stage = process.owned = None
            self._left(name, "interrupted")
            return
        assignment = part.assignment
        stage = assignment.layers.stage
        owned = assignment.owners[assignment.ring.rank] if assignment.owners else None
        before = assignment.first_step - 1
        if assignment.lacks is None and before >= 0:
            assert (process.holds, process.stage) == (before, stage), "it was believed to have the state"
        if assignment.lacks == "stage":
            part.before = process.holds, process.stage, process.owned
        process.holds, process.stage, process.owned = before, stage, owned
        part.joined = True
        self.engine.loop.put(InWorld(name, assignment.generation, 0.1, 0))
        self.replay(name)

    def replay(self, name: str) -> None:
        """Run a member's loop up to the end of its history."""
        process = self.processes[name]
        part = process.part
        assert part is not None
        before = process.member
        member = Member(part, self.job, self.engine._order.plan.steps, self.metric)
        member.run()
        process.member = member
        process.holds = member.applied
        # One that is interrupted hears nothing more of its generation, but its process does.
        process.open = None if member.open in process.settled else member.open
        shares, copied = (0, 0) if before is None else (len(before.shares), len(before.copied))
        layers = part.assignment.layers
        process.writes += [Shared(step, part.assignment.share, found, layers) for step, found in member.shares[shares:]]
        process.free = not process.writes
        for step in member.copied[copied:]:
            process.copies[step, layers.stage] = part.assignment.generation
            process.sends.append(step)

    def _sum_for(self, part: Part, member: Member) -> tuple[str, Any] | None:
        """Return what ends a member's wait, if it is there."""
        waits = member.waits
        assert waits is not None
        # What came since the last replay is heard first.
        if len(part.history) > member.heard:
            return "news", None
        found = self.sums.get((part.assignment.generation, waits.what, waits.step))
        return None if found is None else (waits.what, found)

    def receive(self, name: str, waited: tuple[str, Any]) -> None:
        part = self.processes[name].part
        assert part is not None
        if waited[0] != "news":
            part.history.append(waited)
        self.replay(name)

    def _complete(self) -> tuple[int, str, int] | None:
        """Return a sum of which all members have given their parts, if there is one that is not complete."""
        view = self.engine.machine.group
        parts = [self.processes[name] for name in view.seats if name in self.processes]
        if len(parts) < len(view.seats) or not parts:
            return None
        waits = []
        for process in parts:
            part, member = process.part, process.member
            if part is None or part.left or member is None or member.waits is None:
                return None
            if part.assignment.generation != view.generation or member.waits.what == "checkpoint":
                return None
            if view.shape.layout != (1, 1) and ("interrupt",) in part.history:
                return None
            waits.append((part.assignment.generation, member.waits.what, member.waits.step))
        return waits[0] if len(set(waits)) == 1 and waits[0] not in self.sums else None

    def complete_sum(self) -> None:
        key = self._complete()
        assert key is not None
        members = [self.processes[name].member for name in self.engine.machine.group.seats]
        flags = [member.waits.flags for member in members if member is not None and member.waits is not None]
        raised = [one for one in flags if one is not None]
        self.sums[key] = either(raised) if key[1] == "step" else key[2]
        if self.engine.machine.group.shape.layout != (1, 1):
            # In stages nobody applies a step before all have its sums, and can finish it.
            for name in self.engine.machine.group.seats:
                self.receive(name, (key[1], self.sums[key]))

    def part_of(self, name: str) -> Part:
        part = self.processes[name].part
        assert part is not None
        return part

    def report_all(self, name: str) -> None:
        process = self.processes[name]
        assert process.member is not None
        part = self.part_of(name)
        records = self.on_our_clock(process.member.records[part.reported :])
        part.reported = len(process.member.records)
        process.kept += [(part.assignment.share.generation, record) for record in records]
        self.engine.loop.put(Reported(name, part.assignment.generation, records))

    def on_our_clock(self, records: Sequence[Any]) -> list[Any]:
        """Return records as if they were made now, by the clock of this run."""
        now = 1e9 + self.time.now
        return [replace(one, time=now) if isinstance(one, StepRecord) else one for one in records]

    def leave_one(self, name: str) -> None:
        process = self.processes[name]
        assert process.member is not None
        self._left(name, process.member.why, process.member)

    def _left(self, name: str, why: str, member: Member | None = None) -> None:
        process, part = self.processes[name], self.part_of(name)
        part.left = True
        process.sends.clear()
        if part.before is not None and (member is None or member.applied < part.assignment.first_step):
            held = part.before[1]
            assert held is not None
            assert process.stage is not None
            if process.stage.of > held.of or process.stage.ranks > held.ranks or process.owned is not None:
                process.holds, process.stage, process.owned = part.before
        records = [] if member is None else self.on_our_clock(member.records[part.reported :])
        process.kept += [(part.assignment.share.generation, record) for record in records]
        process.why = why
        self.came_out(name, self.outcome(process, why, member, records))

    def came_out(self, name: str, outcome: Outcome) -> None:
        """Tell the controller how a member came out."""
        self.workers.answer(name, "serve", outcome)

    def send(self, name: str) -> None:
        """Have a copy of a worker's state arrive at its buddy."""
        process = self.processes[name]
        step, part = process.sends.pop(0), self.part_of(name)
        stage, generation = part.assignment.layers.stage, part.assignment.generation
        if process.buddy is not None:
            if process.buddy not in self.processes:
                process.sends.insert(0, step)
                self.engine.turn(0)
                return
            self.processes[process.buddy].copies[step, stage] = generation
        sent = Sent(worker=name, buddy=process.buddy or "", generation=generation, step=step, bytes=1, stall_s=0.0)
        self.engine.loop.put(sent)

    def write(self, name: str) -> None:
        """Have a share written and reported."""
        process = self.processes[name]
        shared = process.writes.pop(0)
        share = shared.share
        tensors = own_tensors(
            whole_state(shared.step, self.layers, self.job.parallel.slices), all_but(shared.layers.others)
        )
        written = write_share(
            self.run, name_of(shared.step, share.generation), share.writer, share.writers, copies_of(tensors, share)
        )
        if process.part is not None and not process.part.left:
            process.part.history.append(("wrote",))
        process.free = True
        told = Written(
            step=shared.step,
            generation=share.generation,
            writer=share.writer,
            writers=share.writers,
            share=written,
            tree=tree_of(tensors, share),
            weights=dict.fromkeys(weights_in(tensors), True),
            metrics=shared.metrics,
            time=1e9 + self.time.now,
            stall_s=0.0,
            error="",
        )
        if (shared.step, share.generation) not in process.settled:
            process.told = told
        self.engine.loop.put(told)

    # The walk

    def walk(self) -> Result:
        """Let things happen until the run has ended, and check what it leaves."""
        for _ in range(MOST):
            self.hear()
            if self.engine.closing is not None:
                break
            ways = list(self.moves())
            if ways:
                _, what, act = self.draw.choices(ways, [weight for weight, _, _ in ways])[0]
                self.trace.append(what)
                act()
                self.turn(0.01)
            else:
                self.trace.append("time passes")
                self.turn(1.0)
            self.check_manifests()
        else:
            raise Accused(f"a run of {MOST} moves that does not end")
        assert self.engine.closing is not None
        result = self.engine.closing.result
        self.engine.close()
        self.check_manifests()
        return result

    def manifests(self) -> list[Manifest]:
        files = [name for name in self.run.files(FOLDER) if name.endswith(".json")]
        return [parse_manifest(self.run.read(file), Path(file).stem) for file in files]

    def check_manifests(self) -> None:
        """Check that every checkpoint that there is has the whole state of its step."""
        for manifest in self.manifests():
            if manifest.name in self.checked:
                continue
            self.checked.add(manifest.name)
            expected = whole_state(manifest.step, self.layers, self.job.parallel.slices)
            found = read_tensors(self.run, manifest, dict.fromkeys(manifest.tensors))
            if found.keys() != expected.keys():
                raise Accused(f"checkpoint {manifest.name} lacks {sorted(expected.keys() - found.keys())}")
            for name, (_, _, data) in found.items():
                if data.tobytes() != expected[name].numpy().tobytes():
                    raise Accused(f"{name} in {manifest.name} is of another step")

    def check_end(self, result: Result, expected: Expected) -> None:
        """Check that a run ended where it should, and that its folder says so."""
        told = status(self.run)
        if told.incomplete_from is not None or told.state != result.status:
            raise Accused(f"the record is called incomplete: {told.lines()}")
        record = read_record(self.run)
        for manifest in self.manifests():
            if not void(manifest.name, record.resumptions) and record.lacks(manifest.step, manifest.generation):
                raise Accused(f"the audit accuses the run: {manifest.name}, of generation {record.generation}")
        if result.status == "stopped":
            kept = result.saved_step is not None and result.saved_step + 1 == result.steps
            if not kept and result.unsaved is None and result.steps:
                raise Accused("a stopped run lost its state without a word")
            return
        if (result.status, result.error) != ("finished", None):
            raise Accused(f"the run {result.status}: {result.error}")
        ended = (result.steps, result.stopped_early is not None, result.model_step)
        if ended != (expected.steps, expected.early, expected.model):
            raise Accused(f"the run ended with {ended}, not {expected}")
        exported = safetensors.torch.load_file(Path(result.path) / "model.safetensors")
        if any(bool((value != float(expected.model)).any()) for value in exported.values()):
            raise Accused("the exported model is of another step")
        last = any(one.step == expected.steps - 1 for one in self.manifests())
        said = any(event["kind"] == "checkpoint_failed" or event["kind"] == "noted" for event in self.events)
        if not last and not said:
            raise Accused("the last state was not saved, without a word")
        if expected.best is None or (expected.best == expected.steps - 1 and not last):
            return
        best = best_of([one.manifest for one in survey(self.run, record.resumptions) if one.manifest is not None])
        if best is None or best.step != expected.best:
            raise Accused(f"the best state is that of step {expected.best}; saved: {best and best.step}")


@dataclass(frozen=True, slots=True)
class Expected:
    """How an undisturbed run ends."""

    steps: int
    early: bool
    model: int
    best: int | None


def expected_of(job: Job, steps: int, metric: Callable[[int], float]) -> Expected:
    """Return how a run of that job should end."""
    if job.best is None or job.evaluate is None:
        return Expected(steps, False, steps - 1, None)
    every = job.evaluate.every_steps
    evaluated = [step for step in range(steps) if (step + 1) % every == 0 or step == steps - 1]
    found = verdict(job.best, {step: {METRIC: metric(step)} for step in evaluated})
    last = steps - 1 if found.over is None else found.over
    model = found.best if isinstance(job.best, EarlyStop) and found.best is not None else last
    return Expected(last + 1, found.over is not None, model, found.best)


LAYERS = tuple(Layer(name, 1.0, 64, parameters=8) for name in "ab")
SLICED = tuple(Layer(name, 1.0, 64, parameters=8, sliced_bytes=32, sliced_parameters=4) for name in "ab")


class Case(NamedTuple):
    """A job, and what its workers say of its model."""

    job: Job
    layers: tuple[Layer, ...] = ()
    rows: bool = False


def case_of(draw: Random) -> Case:
    """Draw a layout, when checkpoints are made, and what evaluations decide."""
    one, two = Parallel(pipeline=2), Parallel(pipeline=2, schedule="gpipe")
    divided = Parallel(sharded="optimizer", holders=draw.choice((1, 2)))
    parallel, workers, layers = draw.choice(
        (
            (Parallel(), (1, draw.choice((1, 2))), ()),
            (one, (draw.choice((1, 2)), 2), LAYERS),
            (two, (2, 4), LAYERS),
            (Parallel(tensor=2), (draw.choice((1, 2)), draw.choice((2, 4))), SLICED),
            (divided, (draw.choice((1, 2)), 2), ()),
        )
    )
    rule = draw.choice(("stop", "stop", "best", "best", "none"))
    evaluated = rule != "none" or draw.random() < 0.3
    best = KeepBest(metric=METRIC, mode=draw.choice(("min", "max"))) if rule == "best" else None
    job = job_of(
        *workers,
        draw.choice((0, 0, 1)),
        steps=draw.randrange(3, 10),
        parallel=parallel,
        evaluate=Evaluate(path="x", every_steps=draw.randrange(1, 4)) if evaluated else None,
        early_stop=EarlyStop(metric=METRIC, patience=draw.randrange(1, 4)) if rule == "stop" else None,
        checkpoint=Checkpoint(
            every_steps=draw.choice((None, 1, 2, 3, 7)),
            every_s=draw.choice((None, 0.05)),
            keep=draw.choice((1, 2)),
            keep_best=best,
        ),
        elastic=Elastic(copy_every=draw.choice((1, 2, 10))),
    )
    return Case(job, layers, parallel.sharded != "none")
