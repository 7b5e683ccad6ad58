"""`validate` says how fast steps will be, and whether more workers pay."""

from __future__ import annotations

from raytrain_plus.planner.expected import expected_steps
from raytrain_plus.planner.layer_profile import LinkSpeed
from tests.unit.planner.profiles import FAST, MB, adam, job


def test_more_workers_pay_for_long_passes() -> None:
    [line] = expected_steps(job(), adam(MB), 0.1, 4, link=FAST, cores=16.0)
    # 12 shards of 0.1 s.
    assert line == "expected, if all workers are on this machine: 0.83 steps/s with 1 worker, 3.3 steps/s with 4"


def test_two_workers_on_a_small_model_are_slower_and_it_says_so() -> None:
    first, warning = expected_steps(job(), adam(10 * MB), 1e-4, 2, link=LinkSpeed(1e-4, 1e9), cores=2.0)
    assert "with 1 worker" in first
    assert warning.startswith("warning: 2 workers do not pay on this machine: their sums and the rest of a step take ")
    assert warning.endswith("one is as fast here")


def test_workers_that_share_a_core_do_not_pay() -> None:
    _, warning = expected_steps(job(), adam(1000), 0.1, 4, link=FAST, cores=1.0)
    assert "4 share 1 core; one is as fast here" in warning


def test_one_worker_is_compared_with_none() -> None:
    assert len(expected_steps(job(), adam(1000), 0.1, 1, link=FAST, cores=1.0)) == 1
