"""When a member switches to another way, and what it says of it."""

from __future__ import annotations

from raytrain_plus.training.exchange.header import Flags
from raytrain_plus.training.step.nccl_switch import COMPARED, Switch

READY, NOT_READY = Flags(), Flags(forming=True)


class Way:
    def __init__(self, forming: bool = True) -> None:
        self.forming = forming
        self.why_never = ""
        self.used = 0

    @property
    def switched(self) -> bool:
        return self.used > 0

    def use_formed(self) -> None:
        self.used += 1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_all_ways_are_used_after_the_first_step_in_which_nobody_is_unready() -> None:
    ways = [Way(), Way()]
    switch = Switch(ways)
    assert switch.forming
    ways[0].forming = False
    assert switch.forming
    ways[1].forming = False
    # Another member is not ready yet.
    assert not switch.forming
    assert switch.made(0, NOT_READY, 0.1) == ()
    assert [one.used for one in ways] == [0, 0]
    assert switch.made(1, READY, 0.1) == ()
    assert [one.used for one in ways] == [1, 1]
    assert switch.used


def remarks(before_s: float, after_s: float) -> list[str]:
    """What is said of so many steps before and after the switch, the first of which take long."""
    way, clock = Way(), Clock()
    switch = Switch([way], clock)
    found = list(switch.made(10, NOT_READY, 9.0))
    found += switch.made(11, NOT_READY, before_s)
    clock.now = 3.21
    found += switch.made(12, READY, before_s)
    way.forming = False
    for step in range(13, 13 + 2 * COMPARED):
        found += switch.made(step, READY, 9.0 if step == 13 else after_s)
    return [one.text for one in found]


def test_it_says_once_what_is_gained() -> None:
    assert remarks(0.040, 0.010) == [
        "NCCL is used from step 14 on; it formed in 3.2 s, in which the workers made 3 steps through the host's memory "
        "instead of waiting. NCCL pays: a step takes 10 ms instead of 40 ms"
    ]


def test_it_says_if_nothing_is_gained() -> None:
    [said] = remarks(0.040, 0.0395)
    assert said.endswith(
        "NCCL gains nothing here: a step takes 39.5 ms, and 40 ms without it; leave out `collective: nccl`"
    )


def test_it_says_once_why_there_will_be_no_other_way() -> None:
    ways = [Way(), Way()]
    switch = Switch(ways)
    ways[1].why_never = "unhandled system error"
    [said] = [one.text for step in range(5) for one in switch.made(step, NOT_READY, 0.1)]
    assert said.startswith("NCCL does not form on a worker (unhandled system error): ")
    assert [one.used for one in ways] == [0, 0]


def test_of_one_way_nothing_is_said() -> None:
    switch = Switch([Way(forming=False)])
    assert [one for step in range(50) for one in switch.made(step, READY, 0.1)] == []
