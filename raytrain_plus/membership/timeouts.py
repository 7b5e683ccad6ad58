"""Compute how long each phase of a group may last. Pure."""

from __future__ import annotations

from raytrain_plus.membership.group_state import Group, Phase, free, preparing

START_S = 25.0
"""Seconds after which a process that has not come up as a worker is replaced by another, twice as many each time.

They count from when there is room for it. The default of `elastic.wait_s` leaves time for the second process.
"""
LOAD_S = 30.0
"""Maximum seconds from the start of a standby until it has imported all; later, a new process is no slower."""
ANSWER_S = 1.0
"""Maximum seconds until a standby answers, once it has imported all."""
PREPARE_S = 600.0
"""Maximum seconds to import the task, make the data if a node lacks it, and build the model."""
SETTLE_S = 5.0
"""Seconds to wait for more workers once the minimum is there."""
FORM_S = 30.0
"""Maximum seconds to form a world."""
BYTES_PER_S = 20e6
"""The slowest rate at which a copy of the state may travel, beyond `FORM_S`."""
LEAVE_BEFORE_S = 2.0
"""Seconds before its node goes at which a worker leaves, if need be in the middle of a step, which is then
recomputed."""
PAUSE_BEFORE_S = 10.0
"""Seconds before its node goes at which a worker without a replacement stops, so that its state can be kept."""
EXPORT_S = 120.0
"""Maximum seconds without an advance while the model is exported and the last checkpoint is written."""
PAUSE_SHARE = 0.7
"""Share of a stopped run's grace time spent waiting for a step boundary; what follows needs the rest."""
LEAVE_SHARE = 0.85
"""Share of that time at which the workers that can leave a broken world have done so."""


def clock_of(group: Group) -> object:
    """Return what the current phase's clock measures: the clock restarts whenever this value changes."""
    if group.phase is Phase.GATHER:
        # Each worker that advances to a new state is a reason to wait for the others.
        return group.phase, tuple(sorted((name, worker.state) for name, worker in group.workers.items()))
    return group.phase, group.generation


def limit_s(group: Group, wait_s: float, state_bytes: int) -> float | None:
    """Return the seconds after which the current phase is late; None if only hang detection bounds it.

    The end of a run (`CLOSE`) may last as long as its writes advance: its seconds count from the last advance.
    """
    if group.phase is Phase.GATHER:
        if any(worker.state == "restoring" for worker in group.workers.values()):
            return PREPARE_S + state_bytes / BYTES_PER_S
        if preparing(group):
            return PREPARE_S
        return SETTLE_S if len(free(group)) >= group.limits.sizes.fewest else wait_s
    if group.phase is Phase.JOIN:
        return FORM_S + state_bytes / BYTES_PER_S
    return EXPORT_S + state_bytes / BYTES_PER_S if group.phase is Phase.CLOSE else None


def stop_limit_s(group: Group, grace_s: float, aside: bool = False) -> float | None:
    """Return the phase's limit once the run is to stop: seconds since the stop request, out of `grace_s`.

    The group waits for a boundary first; then workers that can leave the world do so. Workers that still compute are
    then asked to provide their state `aside` of that step, until the end of the grace time. It does not limit what is
    written after that.
    """
    share = {
        Phase.JOIN: PAUSE_SHARE,
        Phase.PAUSE: PAUSE_SHARE,
        Phase.LEAVE: 1.0 if aside else LEAVE_SHARE,
    }.get(group.phase)
    return None if share is None else share * grace_s
