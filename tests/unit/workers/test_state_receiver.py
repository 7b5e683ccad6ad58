"""A state is taken from a donor only as it was given, for the step for which it was requested."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ObjectLostError

from raytrain_plus.errors import Interrupted
from raytrain_plus.state.transfer import Snapshot, snapshot_digest
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.workers.states.state_receiver import ReceivedStates

TENSORS = {"param/x": ("float32", (2,), np.arange(8, dtype=np.uint8))}
WHOLE = Snapshot(4, TENSORS, b"values", snapshot_digest(4, TENSORS, b"values"))


class Store:
    """Ray's object store; what is sent arrives at the `tries`th look."""

    def __init__(self, sent: Any, tries: int = 1, control: Control | None = None) -> None:
        self.sent, self.tries, self.control = sent, tries, control

    def wait(self, references: list[str], timeout: float) -> tuple[list[str], list[str]]:
        self.tries -= 1
        if self.tries <= 0:
            return references, []
        if self.control is not None:
            self.control.interrupt(0)
        return [], references

    def get(self, reference: str) -> Snapshot:
        if isinstance(self.sent, Exception):
            raise self.sent
        found: Snapshot = self.sent
        return found


def taken(sent: Any, step: int = 4, tries: int = 1) -> Snapshot:
    control = Control()
    control.begin(0)
    received = ReceivedStates(control, Store(sent, tries))
    received.fetch(0, ["a reference"])
    [found] = received.take(0, step)
    return found


def test_a_whole_copy_is_taken() -> None:
    assert taken(WHOLE) is WHOLE
    assert taken(WHOLE, tries=3) is WHOLE


@pytest.mark.parametrize("changes", [{"step": 5}, {"values": b"others"}, {"tensors": {}}])
def test_a_damaged_copy_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Interrupted, match="arrived damaged"):
        taken(replace(WHOLE, **changes))


def test_a_copy_of_another_step_is_refused() -> None:
    with pytest.raises(Interrupted, match="the donor's state is of step 4, not 3"):
        taken(WHOLE, step=3)


def test_a_lost_copy_is_no_error_of_this_worker() -> None:
    with pytest.raises(Interrupted, match="the donor's state did not arrive: ObjectLostError"):
        taken(ObjectLostError("00" * 28, None, ""))


def test_nobody_waits_for_a_copy_once_the_generation_is_over() -> None:
    control = Control()
    control.begin(0)
    received = ReceivedStates(control, Store(WHOLE, 100, control))
    received.fetch(0, ["a reference"])
    control.begin(1)
    with pytest.raises(Interrupted, match="the group changes"):
        received.take(0, 4)
    # Another copy for it is not even looked at.
    ReceivedStates(control, None).fetch(0, ["a reference"])
    control.interrupt(1)
    with pytest.raises(Interrupted, match="the group is changing"):
        received.take(1, 4)
