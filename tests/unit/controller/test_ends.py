"""However runs end, their checkpoints are whole, their best state is kept, and their folders say what is true."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from raytrain_plus.controller.checkpoints import checkpointing
from raytrain_plus.controller.checkpoints.checkpointing import Checkpoints
from raytrain_plus.controller.record.generation_numbers import GenerationNumbers
from raytrain_plus.job.settings import Job
from raytrain_plus.membership import events, state_machine
from raytrain_plus.membership.group_state import Phase
from raytrain_plus.membership.pieces import Pieces
from raytrain_plus.membership.state_machine import Rule
from raytrain_plus.training.exchange.early_stop import Evaluations
from tests.unit.controller.ends import Accused, Ends, case_of, expected_of
from tests.unit.controller.simulated_worker import Writer


def run_to_its_end(folder: Path, seed: int) -> None:
    """Run one case, resumed as often as it is stopped, until it has finished. Raises `Accused`."""
    draw = Random(seed)
    case = case_of(draw)
    values = [float(draw.randrange(5)) for _ in range(20)]
    expected = expected_of(case.job, case.job.steps or 0, values.__getitem__)
    deaths, stops = draw.randrange(7), draw.choice((0, 1, 2))
    for _ in range(4):
        ends = Ends(folder, case.job, draw, values.__getitem__, deaths, stops, case.layers, case.rows)
        try:
            result = ends.walk()
            ends.check_end(result, expected)
        except Exception as error:
            error.add_note(f"seed {seed}, {case.job.parallel}; the last moves: {'; '.join(ends.trace[-40:])}")
            raise
        if result.status == "finished":
            return
        deaths, stops = ends.deaths, ends.stops
    raise Accused(f"seed {seed}: stopped more often than it was told to")


def many(tmp_path: Path, seeds: Iterable[int], matters: Callable[[Job], bool] = lambda job: True) -> None:
    """Run the cases of these seeds that matter."""
    for seed in seeds:
        if matters(case_of(Random(seed)).job):
            run_to_its_end(tmp_path / f"{seed}", seed)


def test_however_runs_end_their_checkpoints_are_whole_and_the_best_state_is_kept(tmp_path: Path) -> None:
    many(tmp_path, range(30))


def test_a_checkpoint_that_is_complete_after_the_group_went_back_is_the_one_that_it_reads(tmp_path: Path) -> None:
    many(tmp_path, [2930])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(8))
def test_so_do_many_more(tmp_path: Path, part: int) -> None:
    many(tmp_path, range(1000 + 500 * part, 1500 + 500 * part))


class Break(NamedTuple):
    """A break of the code, and the cases in which it matters."""

    act: Callable[[pytest.MonkeyPatch], None]
    matters: Callable[[Job], bool] = lambda job: True
    rare: bool = False
    """Whether many runs are needed to find it."""


def without_a_check(patch: pytest.MonkeyPatch) -> None:
    shares = Checkpoints.shares

    def unchecked(self: Any, *of: Any) -> Any:
        found = shares(self, *of)
        self._lacking.clear()
        return found

    patch.setattr(Checkpoints, "shares", unchecked)
    patch.setattr(checkpointing, "cover", lambda group, offers: ((), Pieces()))


def without_an_event(patch: pytest.MonkeyPatch) -> None:
    def begin_number(self: Any, generation: int) -> int:
        self._base += 1
        return self.of(generation)

    patch.setattr(GenerationNumbers, "begin", begin_number)


def all_at_once(patch: pytest.MonkeyPatch) -> None:
    begin = Evaluations.__init__

    def begun(self: Any, rule: Any, known: Any) -> None:
        begin(self, rule, {})
        for step in sorted(known):
            self.reach(step, known[step])

    patch.setattr(Evaluations, "__init__", begun)


def believed(patch: pytest.MonkeyPatch) -> None:
    rule = Rule(lambda group, event: (group, []), (Phase.CLOSE,))
    patch.setattr(state_machine, "TABLE", {**state_machine.TABLE, (Phase.CLOSE, events.Overwritten): rule})


def in_stages(job: Job) -> bool:
    return job.parallel.width > 1


def stops_early(job: Job) -> bool:
    return job.early_stop is not None


BREAKS = {
    "nobody asks whether the writers have all": Break(without_a_check, in_stages, rare=True),
    "the number of a last checkpoint is in no event": Break(without_an_event),
    "the best state is not waited for": Break(lambda patch: patch.setattr(Writer, "wait", lambda *_: None)),
    "no state is the best": Break(lambda patch: patch.setattr(Evaluations, "is_best", lambda *_: False)),
    "evaluations count before the state has reached them": Break(
        all_at_once, lambda job: in_stages(job) and stops_early(job), rare=True
    ),
    "a best state that could not be saved is not saved again": Break(
        lambda patch: patch.setattr(Checkpoints, "has", lambda *_: True)
    ),
    "the group believes that who reads the best state has the last one": Break(
        believed, lambda job: in_stages(job) and stops_early(job)
    ),
}


@pytest.mark.parametrize(
    "broken", [pytest.param(name, marks=[pytest.mark.slow] * one.rare) for name, one in BREAKS.items()]
)
def test_a_break_of_the_code_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    BREAKS[broken].act(monkeypatch)
    with pytest.raises(AssertionError):
        many(tmp_path, range(2000), BREAKS[broken].matters)
