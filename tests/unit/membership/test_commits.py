"""Every step commits once and in order, whatever the order of the reports."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.membership.commits import Commits


@dataclass(frozen=True)
class Record:
    step: int
    by: str = ""


def test_a_step_waits_for_every_member() -> None:
    commits: Commits[Record] = Commits(["a", "b"], first_step=0)
    assert commits.report("a", [Record(0)]) == []
    assert commits.report("b", [Record(0, "b")]) == [Record(0, "b")]


def test_a_later_step_proves_the_one_before() -> None:
    commits: Commits[Record] = Commits(["a", "b"], first_step=0)
    assert [record.step for record in commits.report("a", [Record(0), Record(1), Record(2)])] == [0, 1]


@given(st.integers(1, 4), st.integers(1, 12), st.randoms(use_true_random=False), st.integers(0, 5))
def test_once_and_in_order(members: int, steps: int, order: object, first: int) -> None:
    names = [f"w{i}" for i in range(members)]
    commits: Commits[Record] = Commits(names, first_step=first)
    reports = [(name, Record(step)) for name in names for step in range(first, first + steps)]
    order.shuffle(reports)  # type: ignore[attr-defined]
    told = [record.step for name, record in reports for record in commits.report(name, [record])]
    assert told == list(range(first, first + steps))


def test_after_a_loss_steps_of_a_living_member_are_committed_and_later_ones_dropped() -> None:
    commits: Commits[Record] = Commits(["a", "b"], first_step=0)
    commits.report("a", [Record(0), Record(1), Record(2)])
    assert commits.next_step == 2
    commits.report("b", [Record(0)])
    assert commits.applied == 2
    # Step 2 was applied by `a` alone, which is gone; `b` holds step 1.
    assert commits.regroup(["b", "c"], held=1) == []
    assert (commits.next_step, commits.applied) == (2, 1)
    assert commits.report("b", [Record(2)]) == []
    assert commits.report("c", [Record(2)]) == [Record(2)]
    # Had `a` lived, its step would have counted.
    commits.report("b", [Record(3)])
    assert commits.regroup(["b"], held=3) == [Record(3)]


def test_recomputed_steps_are_committed_once() -> None:
    commits: Commits[Record] = Commits(["a"], first_step=0)
    assert [record.step for record in commits.report("a", [Record(0), Record(1), Record(2)])] == [0, 1, 2]
    # Only a copy of step 0 existed.
    assert commits.regroup(["b"], held=0) == []
    assert commits.report("b", [Record(1), Record(2)]) == []
    assert commits.report("b", [Record(3)]) == [Record(3)]
