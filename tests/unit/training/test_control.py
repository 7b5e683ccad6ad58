"""Wishes reach the generation they are for, and no other."""

from __future__ import annotations

import pytest

from raytrain_plus.errors import Interrupted
from raytrain_plus.training.control import Control


def test_a_wish_for_an_earlier_generation_has_no_effect_and_one_that_comes_early_waits() -> None:
    control = Control()
    control.begin(3)
    control.interrupt(2)
    control.pause(2)
    control.check()
    assert not control.pausing()
    control.interrupt(4)
    control.pause(4)
    # Generation 3 is over by then: who is still in it leaves.
    with pytest.raises(Interrupted):
        control.check()
    control.begin(4)
    assert control.interrupted()
    assert control.pausing()
    control.begin(5)
    control.check()
    assert not control.pausing()


def test_activity_says_since_when_and_for_how_long_it_may() -> None:
    control = Control()
    control.patience(30.0)
    control.enter("computing")
    activity = control.activity()
    assert (activity.doing, activity.limit_s) == ("computing", 30.0)
    assert 0 <= activity.since_s < 5
    # The limit is that of the moment when it began.
    control.patience(1.0)
    assert control.activity().limit_s == 30.0
