"""However often controllers die, runs end as they should, and their folders say what is true."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from raytrain_plus import Parallel
from raytrain_plus.controller import succession
from raytrain_plus.controller.checkpoints.restoring import Restoring
from raytrain_plus.controller.event_loop import EventLoop
from raytrain_plus.controller.group.formation import FIRST_STANDBY_S
from raytrain_plus.controller.record.run_record import RunRecord
from raytrain_plus.controller.succession import survivor_of
from tests.unit.controller.ends import Accused, case_of, expected_of
from tests.unit.controller.fakes import job_of
from tests.unit.controller.falls import Falls


def run_to_its_end(folder: Path, seed: int) -> int:
    """Run one case whose controllers die; return how often one did. Raises `Accused`."""
    draw = Random(seed)
    case = case_of(draw)
    values = [float(draw.randrange(5)) for _ in range(20)]
    expected = expected_of(case.job, case.job.steps or 0, values.__getitem__)
    deaths, stops, falls = draw.choice((0, 0, 2, 5)), draw.choice((0, 1)), draw.choice((1, 2, 4))
    fallen = 0
    for _ in range(3):
        run = Falls(folder, case.job, draw, values.__getitem__, deaths, stops, case.layers, case.rows)
        run.falls = falls
        try:
            result = run.walk()
            run.check_end(result, expected)
        except Exception as error:
            error.add_note(f"seed {seed}, {case.job.parallel}; the last moves: {'; '.join(run.trace[-40:])}")
            raise
        fallen += run.fallen
        if result.status == "finished":
            return fallen
        deaths, stops, falls = run.deaths, run.stops, run.falls
    raise Accused(f"seed {seed}: stopped more often than it was told to")


def test_however_often_controllers_die_runs_end_as_they_should(tmp_path: Path) -> None:
    assert sum(run_to_its_end(tmp_path / f"{seed}", seed) for seed in range(10)) > 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(4))
def test_so_they_do_in_many_more(tmp_path: Path, part: int) -> None:
    for seed in range(1000 + 250 * part, 1250 + 250 * part):
        run_to_its_end(tmp_path / f"{seed}", seed)


def nothing_completed(patch: pytest.MonkeyPatch) -> None:
    """The steps that a dead controller has not written are not in the record."""
    patch.setattr(RunRecord, "_complete", lambda self, lacks: None)


def nobody_rejoins(patch: pytest.MonkeyPatch) -> None:
    """Members that are inside are not asked how they come out."""
    ask = EventLoop.ask

    def asked(self: EventLoop, name: str, method: str, *arguments: Any, **options: Any) -> None:
        if method != "rejoin":
            ask(self, name, method, *arguments, **options)

    patch.setattr(EventLoop, "ask", asked)


def resumes(patch: pytest.MonkeyPatch) -> None:
    """The group is believed to begin anew at its next generation."""
    patch.setattr(Restoring, "begun", lambda self: None)


def stays_inside(patch: pytest.MonkeyPatch) -> None:
    """Who has come out counts as inside."""
    patch.setattr(succession, "survivor_of", lambda name, report: replace(survivor_of(name, report), left=None))


@pytest.mark.parametrize(
    ("broken", "seed"), [(nothing_completed, 2), (nobody_rejoins, 52), (resumes, 72), (stays_inside, 14)]
)
def test_a_break_of_the_code_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Callable[[pytest.MonkeyPatch], None], seed: int
) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        run_to_its_end(tmp_path, seed)


class LateReplacement(Falls):
    """A member dies together with the first controller, and whoever replaces it comes up late."""

    until = 0.0

    def moves(self) -> Iterator[tuple[float, str, Callable[[], None]]]:
        for weight, what, act in super().moves():
            if what == "the controller dies":
                if self.engine.record.committed >= 1:
                    yield 1e9, what, act
            elif self.time.now >= self.until or not what.endswith("arrives"):
                yield weight, what, act

    def fall(self) -> None:
        self.until = self.time.now + 2 * FIRST_STANDBY_S
        self.kill(next(iter(self.processes)), turn=False)
        super().fall()


def test_standbys_are_kept_for_those_who_live_when_a_controller_takes_over(tmp_path: Path) -> None:
    job = job_of(2, 2, steps=6, parallel=Parallel(sharded="optimizer"))
    run = LateReplacement(tmp_path / "run", job, Random(1), lambda _: 0.0, 1, 0, (), True)
    run.falls = 1
    run.check_end(run.walk(), expected_of(job, 6, lambda _: 0.0))
    assert run.fallen == 1
    assert run.workers.stood_by.keys() == {"worker-1"}
