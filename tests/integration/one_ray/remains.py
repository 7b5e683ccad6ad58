"""What a run leaves in Ray. Not a test itself."""

from __future__ import annotations

import time

import ray
from ray.util.placement_group import placement_group_table

from raytrain_plus.workers.run_actors import NAMESPACE, WORKERS


def places() -> list[str]:
    """Return the names of the placement groups that exist."""
    return sorted(one["name"] for one in placement_group_table().values() if one["state"] != "REMOVED")


def nothing_is_left(limit_s: float = 10) -> None:
    """Check that Ray has no actor and no placement group of a run any more."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        actors = [
            one["name"]
            for one in ray.util.list_named_actors(all_namespaces=True)
            if one["namespace"] in (NAMESPACE, WORKERS)
        ]
        if not actors and not places():
            return
        time.sleep(0.1)
    raise AssertionError(f"left behind: {actors}, {places()}")
