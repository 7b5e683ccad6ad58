"""Requests affect only their own generation."""

from __future__ import annotations

import pytest

from raytrain_plus.errors import Interrupted
from raytrain_plus.training.exchange.thread_control import Control


def test_requests_affect_only_their_generation() -> None:
    control = Control()
    control.begin(3)
    control.interrupt(2)
    control.pause(2)
    control.check()
    assert not control.pause_requested()
    control.interrupt(4)
    control.pause(4)
    # Generation 3 is over by then: a worker still in it leaves.
    with pytest.raises(Interrupted):
        control.check()
    control.begin(4)
    assert control.interrupted()
    assert control.pause_requested()
    control.begin(5)
    control.check()
    assert not control.pause_requested()


def test_activity_has_its_age_and_limit() -> None:
    control = Control()
    control.set_limit(30.0)
    control.enter("computing")
    activity = control.activity()
    assert (activity.doing, activity.limit_s) == ("computing", 30.0)
    assert activity.since_s >= 0
    # The limit is the one set when the activity began.
    control.set_limit(1.0)
    assert control.activity().limit_s == 30.0
