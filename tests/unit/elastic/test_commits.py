"""Every step commits once and in order, whatever the order of the reports."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from raytrain_plus.elastic.commits import Commits


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
