"""What is said of the use of experts, and in which steps."""

import doctest
import math

import pytest

from raytrain_plus.observe import expert_use as module
from raytrain_plus.observe.expert_use import EVERY_STEP, ExpertReports, ExpertUse


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(module).failed == 0


def test_shares_are_of_the_choices() -> None:
    use = ExpertUse(load=[3, 0, 6, 3], dropped=3, entropy=1.25, capacity=1.0)
    assert use.fields() == {"load": [3, 0, 6, 3], "max_vio": 1.0, "dropped": 0.25, "entropy": 1.25}
    assert ExpertUse(load=[7] * 3, dropped=0, entropy=0.0, capacity=None).max_vio == 0


def test_the_first_steps_are_reported_then_one_a_second_and_the_last() -> None:
    now = 0.0
    reports = ExpertReports(100, lambda: now)
    found = []
    for step in range(100):
        now += 0.125
        if reports.due(step):
            found.append(step)
    assert found[:EVERY_STEP] == list(range(EVERY_STEP))
    assert found[EVERY_STEP:] == [*range(17, 99, 8), 99]


@pytest.mark.parametrize("hours", [1, 1000])
def test_a_long_run_has_hardly_more_reports_than_a_short_one(hours: int) -> None:
    now = 0.0
    reports = ExpertReports(10**9, lambda: now)
    count = 0
    # The steps between are not due, as far as this clock goes.
    for step in range(36_000):
        now += hours / 10
        count += reports.due(step + EVERY_STEP)
    assert 300 < count < 110 + 101 * math.log(hours * 36)
