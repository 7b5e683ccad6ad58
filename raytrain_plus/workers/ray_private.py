"""The one place that uses what Ray does not promise to keep. Where it is not there any more, less is known.

Seen working in Ray 2.55 to 2.61. Each function says what its callers go without, and warns once a call when it has to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import ray

SEEN = ((2, 55), (2, 61))
"""The oldest and the newest Ray in which this was seen working."""

T = TypeVar("T")


def draining_nodes() -> dict[str, float | None]:
    """Nodes that will leave: node id -> Unix seconds of the deadline, None where there is none.

    Without it a node's going is met as a loss, when it goes.
    """

    def ask() -> dict[str, float | None]:
        from ray._private.state import state

        return {node: ms / 1000 if ms else None for node, ms in state.get_draining_nodes().items()}

    return _or(ask, {}, "a draining node is only noticed when it is gone")


def most_there_can_be() -> dict[str, float] | None:
    """The most of each resource that an autoscaler may bring the cluster to; None where there is no autoscaler.

    Without it every cluster counts as one that cannot grow before a run starts.
    """

    def ask() -> dict[str, float] | None:
        from ray._private.state import state

        most = state.get_max_resources_from_cluster_config()
        return None if most is None else {name: float(amount) for name, amount in most.items()}

    return _or(ask, None, "nothing is known of an autoscaler")


def _or(ask: Callable[[], T], without: T, consequence: str) -> T:
    try:
        return ask()
    except (ImportError, AttributeError, TypeError) as error:
        newest = ".".join(map(str, SEEN[1]))
        told: Any = logging.getLogger(__name__)
        told.warning("Ray %s (newest seen: %s) has no %s: %s", ray.__version__, newest, error, consequence)
        return without
