"""How long each phase of a group may last. Pure."""

from __future__ import annotations

from raytrain_plus.membership.group import Group, Phase, free, preparing

PREPARE_S = 600.0
"""Limit of importing the task, making the data where a node lacks it, and building the model."""
SETTLE_S = 5.0
"""How long more workers than the fewest are waited for, once these are there."""
FORM_S = 30.0
"""Limit of forming a world."""
BYTES_PER_S = 20e6
"""The slowest that a copy of the state may travel, beyond `FORM_S`."""
LEAVE_BEFORE_S = 2.0
"""How long before its machine goes a worker leaves, if need be in the midst of a step, which is made again."""
PAUSE_BEFORE_S = 10.0
"""How long before its machine goes a worker that nobody can replace stops, for its state to be kept."""
EXPORT_S = 120.0
"""Limit of handing the model over."""
PAUSE_SHARE = 0.25
"""Of the time that a stopped run has, what it waits for a step boundary."""
CLOSE_SHARE = 0.65
"""Of the same, when all must be written: the driver takes the rest to go, most of a second."""


def clock_of(group: Group) -> object:
    """What a phase's clock measures: it starts anew whenever this changes."""
    if group.phase is Phase.GATHER:
        # Every worker that gets further is a reason to wait for the others.
        return group.phase, tuple(sorted((name, worker.state) for name, worker in group.workers.items()))
    return group.phase, group.generation


def limit_s(group: Group, wait_s: float, state_bytes: int) -> float | None:
    """Seconds after which the present phase is late; None where only the hang rule bounds it."""
    if group.phase is Phase.GATHER:
        if any(worker.state == "restoring" for worker in group.workers.values()):
            return PREPARE_S + state_bytes / BYTES_PER_S
        if preparing(group):
            return PREPARE_S
        return SETTLE_S if len(free(group)) >= group.limits.minimum else wait_s
    if group.phase is Phase.JOIN:
        return FORM_S + state_bytes / BYTES_PER_S
    return EXPORT_S + state_bytes / BYTES_PER_S if group.phase is Phase.CLOSE else None


def stop_limit_s(group: Group, grace_s: float, aside: bool = False) -> float | None:
    """The same, once the run is to stop: seconds since then, of the `grace_s` that it has.

    A boundary is waited for first; then the world is left, by those who can. Those who compute still are asked to give
    the state out `aside` of that, and have a little longer for it.
    """
    share = {
        Phase.JOIN: PAUSE_SHARE,
        Phase.PAUSE: PAUSE_SHARE,
        Phase.LEAVE: PAUSE_SHARE + (0.2 if aside else 0.1),
        Phase.CLOSE: CLOSE_SHARE,
    }.get(group.phase)
    return None if share is None else share * grace_s
