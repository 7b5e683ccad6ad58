"""Switch from the host's memory to NCCL, all members of a generation at once, and say what that gains."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

from raytrain_plus.collective.world import SwitchableTransport
from raytrain_plus.training.exchange.header import Flags
from raytrain_plus.training.exchange.step_records import Remark

COMPARED = 20
"""How many steps after the switch are compared with those before it."""
GAINS = 0.97
"""A step is faster if it takes at most this share of the time of another one."""


class Switch:
    """Switches after the first step in which no member says that it is not ready; see `World.forming`."""

    def __init__(self, ways: Sequence[SwitchableTransport], clock: Callable[[], float] = time.monotonic) -> None:
        """Begin a generation, whose worlds are `ways`."""
        self._ways = ways
        self._clock = clock
        self._begun = clock()
        self._pending = self.forming
        """Whether there is anything to switch to that this member has not seen all use."""
        self._formed_s = 0.0
        self._from = 0
        self._bridged = 0
        """The steps before the switch."""
        self._before: deque[float] = deque(maxlen=5 * COMPARED)
        """The seconds of the last ones of them, and of those after the switch."""
        self._after: list[float] = []

    @property
    def used(self) -> bool:
        """Whether all have switched to anything."""
        return any(one.switched for one in self._ways)

    @property
    def forming(self) -> bool:
        """Whether this member is not ready."""
        return any(one.forming for one in self._ways)

    def made(self, step: int, flags: Flags, seconds: float) -> tuple[Remark, ...]:
        """Switch if the flags of this step, which took so long, say so. Return what users should know."""
        if not flags.forming:
            for one in self._ways:
                one.use_formed()
        if not self._pending:
            return ()
        why = next((one.why_never for one in self._ways if one.why_never), "")
        if why:
            self._pending = False
            return (never(why),)
        if not self._from:
            self._bridged += 1
            self._before.append(seconds)
            if not flags.forming:
                self._formed_s, self._from = self._clock() - self._begun, step + 1
            return ()
        self._after.append(seconds)
        if len(self._after) < COMPARED:
            return ()
        self._pending = False
        return (pays(self._from, self._formed_s, self._bridged, list(self._before), self._after),)


def never(why: str) -> Remark:
    """Return that NCCL has not formed on a worker, and why."""
    return Remark(
        "nccl failed",
        f"NCCL does not form on a worker ({why}): tensors of GPUs pass through the host's memory instead, which "
        "computes the same and takes longer. `raytrain doctor` on its machine says what NCCL lacks",
    )


def pays(first: int, formed_s: float, bridged: int, before: Sequence[float], after: Sequence[float]) -> Remark:
    """Return what NCCL, used from step `first` on, has gained, given the seconds of steps before and after.

    `bridged`: how many steps were made while it formed.
    """
    # The first ones of each kind load kernels, and connect.
    old, new = (statistics.median(found[1:] or found) for found in (before, after))
    steps = f"{bridged} step{'s' * (bridged > 1)}"
    verdict = (
        f"NCCL pays: a step takes {1e3 * new:.3g} ms instead of {1e3 * old:.3g} ms"
        if new <= GAINS * old
        else f"NCCL gains nothing here: a step takes {1e3 * new:.3g} ms, and {1e3 * old:.3g} ms without it; leave out "
        "`collective: nccl`"
    )
    return Remark(
        "nccl",
        f"NCCL is used from step {first + 1} on; it formed in {formed_s:.1f} s, in which the workers made {steps} "
        f"through the host's memory instead of waiting. {verdict}",
    )
