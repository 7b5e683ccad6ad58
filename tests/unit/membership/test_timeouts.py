"""The limits of each phase."""

from __future__ import annotations

from dataclasses import replace

from raytrain_plus.membership.group_state import Group, Limits, Phase, WorkerStatus
from raytrain_plus.membership.sizes import SizeTable
from raytrain_plus.membership.timeouts import EXPORT_S, FORM_S, PREPARE_S, SETTLE_S, clock_of, limit_s, stop_limit_s

LIMITS = Limits(sizes=SizeTable(1, 2, 2), spares=0, steps=4, max_failures=None, expected=2)
GROUP = Group(limits=LIMITS, workers={"a": WorkerStatus("coming"), "b": WorkerStatus("coming")})


def test_gathering_waits_for_workers_and_briefly_for_more_than_the_minimum() -> None:
    assert limit_s(GROUP, 60.0, 0) == 60.0
    up = replace(GROUP, workers={"a": WorkerStatus("up"), "b": WorkerStatus("coming")})
    assert limit_s(up, 60.0, 0) == PREPARE_S
    enough = replace(GROUP, workers={"a": WorkerStatus("idle", holds=-1), "b": WorkerStatus("coming")})
    assert limit_s(enough, 60.0, 0) == SETTLE_S
    assert len({clock_of(GROUP), clock_of(up), clock_of(enough)}) == 3


def test_a_large_state_has_longer_to_travel() -> None:
    joining = replace(GROUP, phase=Phase.JOIN)
    assert limit_s(joining, 60.0, 0) == FORM_S
    assert limit_s(joining, 60.0, 2_000_000_000) == FORM_S + 100
    assert clock_of(joining) != clock_of(replace(joining, generation=1))


def test_training_has_no_limit_and_closing_has_one() -> None:
    assert limit_s(replace(GROUP, phase=Phase.TRAIN), 60.0, 0) is None
    assert limit_s(replace(GROUP, phase=Phase.LEAVE), 60.0, 0) is None
    assert limit_s(replace(GROUP, phase=Phase.CLOSE), 60.0, 0) == EXPORT_S


def test_the_grace_of_a_stop_limits_the_way_to_a_step_boundary_and_no_write() -> None:
    limits = [stop_limit_s(replace(GROUP, phase=phase), 3.0) for phase in (Phase.JOIN, Phase.PAUSE, Phase.LEAVE)]
    assert limits == sorted(limits, key=lambda limit: limit or 0.0)
    assert all(limit is not None and limit < 3.0 for limit in limits)
    assert stop_limit_s(replace(GROUP, phase=Phase.CLOSE), 3.0) is None
    leaving = replace(GROUP, phase=Phase.LEAVE)
    asked, given_up = stop_limit_s(leaving, 3.0), stop_limit_s(leaving, 3.0, aside=True)
    assert asked is not None
    assert given_up is not None
    assert limits[1] is not None
    assert limits[1] < asked < given_up <= 3.0
