"""Say what a run with too few workers waited for. Pure."""

from __future__ import annotations

from collections.abc import Collection

from raytrain_plus.membership.group_state import Group, preparing
from raytrain_plus.membership.timeouts import PREPARE_S


def awaited(group: Group, homeless: Collection[str]) -> tuple[str, str]:
    """Return how long a gathering group waited and for what, in words, and what its user can do; empty if nothing.

    `homeless`: the workers for which Ray has found no room.
    """
    states = {name: worker.state for name, worker in group.workers.items() if not worker.leaving}
    roomless = sum(state == "coming" and name in homeless for name, state in states.items())
    found = {
        "Ray has found no room for": roomless,
        "Ray has not started, with all that it imports, the process of": list(states.values()).count("coming")
        - roomless,
        "the task, its data and its model are not yet prepared on": list(states.values()).count("up"),
        "a warm-up step has not ended on": list(states.values()).count("warming_up"),
    }
    said = " and ".join(f"{what} {count} worker{'s' * (count > 1)}" for what, count in found.items() if count)
    remedies = ["free resources or add machines"] * bool(roomless)
    # Workers that prepare have a limit of their own, which is no setting.
    limit = f"{PREPARE_S:g} s" if preparing(group) else "elastic.wait_s"
    if not preparing(group):
        remedies.append("raise elastic.wait_s if the machines are busy or slow to start")
    return f"within {limit}" + (f": {said}" if said else ""), ", or ".join(remedies)
