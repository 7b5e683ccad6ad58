"""What a dead controller's record lacks: found in the records of its workers, of the right generation, once."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_plus.controller.record.sums.lacking_steps import LackingSteps, lacking_steps
from raytrain_plus.errors import StepsLost
from raytrain_plus.membership.group_state import Group
from raytrain_plus.runs.history import Past
from raytrain_plus.training.exchange.step_records import Evaluated, Remark, StepRecord
from raytrain_plus.workers.messages import Charter
from tests.unit.controller.scripted_run import LIMITS, step


def charter(number: int, first_step: int, again: int = -1) -> Charter:
    group = Group(limits=LIMITS, generation=number, again=again)
    return Charter(group=group, number=number, first_step=first_step, partitions={})


def kept(*steps: tuple[int, int]) -> list[tuple[int, Any]]:
    return [(number, step(one, float(number))) for number, one in steps]


def shown(found: LackingSteps) -> list[tuple[int, str]]:
    """Return number and step of what is missing; evaluations begin with `e`."""
    return [
        (number, f"e{one.step}" if isinstance(one, Evaluated) else str(next(iter(one.values())).step))
        for number, one in found.missing
    ]


def further(found: LackingSteps) -> dict[str, list[int]]:
    return {
        worker: [record.step for record in records if isinstance(record, (StepRecord, Evaluated))]
        for worker, records in found.further.items()
    }


def test_each_of_the_two_gets_what_it_lacks_and_the_rest_is_reported() -> None:
    records = {"a": kept((0, 3), (0, 4), (0, 5), (0, 6)), "b": kept((0, 4), (0, 5))}
    found = lacking_steps(Past(recorded=0, committed=4), 2, charter(0, 0), records)
    assert (found.told, found.entered, found.to, found.back) == (4, 2, 4, False)
    assert shown(found) == [(0, "3"), (0, "4")]
    assert further(found) == {"a": [5, 6], "b": [5]}


def test_a_step_before_the_generation_is_committed_and_of_an_earlier_one() -> None:
    records = {"a": kept((1, 3), (1, 4), (2, 5)), "b": kept((2, 5))}
    found = lacking_steps(Past(recorded=1, committed=3), 3, charter(2, 5), records)
    assert (shown(found), further(found)) == ([(1, "4")], {"a": [5], "b": [5]})


def test_a_committed_step_that_nobody_has_is_lost() -> None:
    with pytest.raises(StepsLost, match="step 5 is committed, and neither the run's folder nor any living worker"):
        lacking_steps(Past(recorded=1, committed=3), 3, charter(2, 5), {"a": kept((2, 5))})


@pytest.mark.parametrize("told", [5, 7])
def test_steps_that_are_made_again_count_as_they_were_made_first(told: int) -> None:
    records = {"a": kept((1, 6), (1, 7), (2, 6)), "b": kept((2, 6))}
    # The group has the state after step 5, and had committed step 7.
    past = Past(recorded=1, committed=told)
    found = lacking_steps(past, 5, charter(2, 6, again=7), records)
    assert (found.back, found.to, shown(found)) == (False, 7, [(1, "6"), (1, "7")])
    assert further(found) == {"a": [], "b": []}
    # If all that made them first are dead, the group makes them again.
    found = lacking_steps(past, 5, charter(2, 6, again=7), {"b": kept((2, 6))})
    assert (found.back, found.told, found.to, shown(found), further(found)) == (False, told, 5, [], {"b": [6]})


def test_what_a_resumption_has_made_void_is_not_written() -> None:
    past = Past(recorded=2, committed=4, resumptions=((2, 4),))
    records = {"a": kept((1, 4), (1, 5), (1, 6)), "b": [*kept((1, 5), (1, 6)), (1, Evaluated(step=5, metrics={}))]}
    # The worker has not heard of the generation that went back.
    found = lacking_steps(past, 3, charter(1, 2), records)
    assert (found.back, found.to, shown(found), further(found)) == (False, 4, [(1, "4")], {"a": [], "b": []})
    # Nor of one from a step that it began with.
    past = Past(recorded=2, committed=0, resumptions=((2, 0),))
    assert lacking_steps(past, 0, charter(1, 2), {"a": kept((1, 2))}).to == 0


def test_a_group_that_has_gone_back_is_noticed_though_no_event_says_so() -> None:
    records = {"a": [*kept((1, 4), (1, 5), (2, 5)), (2, Evaluated(step=5, metrics={"loss": 1.0}))]}
    past = Past(recorded=1, committed=7, evaluated=6, metrics={1: {}, 6: {}})
    found = lacking_steps(past, 7, charter(2, 5), records)
    assert (found.back, found.told, found.entered, found.to, shown(found)) == (True, 4, 4, 4, [])
    assert further(found) == {"a": [5, 5]}
    # An evaluation of the state that it went back to counts.
    records["a"].append((1, Evaluated(step=4, metrics={"loss": 2.0})))
    assert shown(lacking_steps(past, 7, charter(2, 5), records)) == [(1, "e4")]
    # An event of that generation, or no step beyond, says that it did not.
    for other in (Past(recorded=2, committed=7), Past(recorded=1, committed=4)):
        assert not lacking_steps(other, 4, charter(2, 5), {"a": kept((2, 5), (2, 6), (2, 7))}).back


def test_evaluations_follow_their_steps_and_are_told_once() -> None:
    told = [(0, Evaluated(step=number, metrics={"loss": float(number)})) for number in (-1, 1, 3, 5)]
    records = {"a": [*told, *kept((0, 2), (0, 3), (0, 4))], "b": told[2:3]}
    found = lacking_steps(Past(recorded=0, committed=3, evaluated=-1, metrics={-1: {}}), 1, charter(0, 0), records)
    assert shown(found) == [(0, "e1"), (0, "2"), (0, "3"), (0, "e3")]
    assert further(found) == {"a": [5, 4], "b": []}
    # One of an earlier generation is not made again.
    again = lacking_steps(Past(recorded=0, committed=2), 2, charter(1, 3, again=5), {"a": told[3:]})
    assert (shown(again), again.to) == ([(0, "e5")], 2)


def test_what_belongs_to_no_step_is_reported_if_it_is_of_the_generation() -> None:
    remarks = [(number, Remark(str(number), "")) for number in (0, 1)]
    found = lacking_steps(Past(), -1, charter(1, 0), {"a": remarks})
    assert found.further == {"a": [remarks[1][1]]}
