"""All members of a generation begin to sum by NCCL with the same sum, whichever of them are killed, and when.

Each case visits every state that events can lead to, in any order: NCCL forms or fails on a member, a member begins a
step, takes the result of a sum, dies, hears that it must leave, leaves.
"""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest

from raytrain_plus.collective import nccl_forming, nccl_world
from raytrain_plus.membership.group_state import Limits
from raytrain_plus.membership.sizes import SizeTable
from tests.unit.membership.switch_explorer import (
    Moves,
    Staged,
    Switch,
    begin_staged,
    ended_staged,
    explore,
    moves_staged,
)
from tests.unit.membership.switching import SHARDS, Thread, check_moments, moment


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Tensors of floating numbers count as those of the device, and the thread that forms NCCL runs when told to."""
    monkeypatch.setattr(nccl_world, "on_host", lambda tensor: not tensor.is_floating_point())
    monkeypatch.setattr(nccl_world.NcclWorld, "_connect", lambda self, formed, left: None)
    monkeypatch.setattr(
        nccl_forming, "threading", SimpleNamespace(Thread=Thread, Event=threading.Event, Lock=threading.Lock)
    )
    caplog.set_level(logging.ERROR, "raytrain_plus")


@pytest.mark.parametrize(
    ("minimum", "maximum", "spares", "steps", "given", "states"),
    [
        # Both may die, one after the other or at once, and others start in their places.
        (1, 2, 0, 3, {"kills": 2, "fails": 1, "arrivals": 2}, 40_000),
        # A spare takes the place of the dead one, and its state from the survivor.
        (2, 2, 1, 3, {"kills": 1, "fails": 1}, 10_000),
        pytest.param(1, 3, 0, 3, {"kills": 1}, 40_000, marks=pytest.mark.slow),
        pytest.param(1, 3, 0, 2, {"kills": 1, "fails": 1}, 50_000, marks=pytest.mark.slow),
    ],
)
def test_members_switch_together(
    minimum: int, maximum: int, spares: int, steps: int, given: dict[str, int], states: int
) -> None:
    limits = Limits(
        sizes=SizeTable(minimum, maximum, SHARDS),
        spares=spares,
        steps=steps,
        max_failures=None,
        expected=maximum + spares,
    )
    switch = Switch(limits)
    found = explore(switch.begin(**given), switch.moves, switch.ended)
    print(f"{found} states")
    assert found > states
    assert check_moments() > 10
    assert len(switch.switched) > 1, "those who go on without the dead switch again"
    assert switch.killed == set(range(maximum + 1)), "before the switch, when some have made it, and after it"


@pytest.mark.slow
def test_stages_whose_steps_overlap_switch_between_two_windows() -> None:
    """A stage has flagged, and is past its passes of a window's last step, while the other sums the step before."""
    switched: set[int] = set()

    def moves(here: Staged) -> Moves[Staged]:
        switched.add(sum("n" in moment(number).ways for _, number, _ in here.members))
        return moves_staged(here)

    found = explore(begin_staged(4, kills=1), moves, ended_staged)
    print(f"{found} states")
    assert found > 200_000
    assert switched == {0, 1, 2, 3, 4}
    assert check_moments() > 10
