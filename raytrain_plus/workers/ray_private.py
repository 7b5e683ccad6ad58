"""The one place that uses what Ray does not promise to keep. Where it is not there any more, less is known."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import ray

SEEN = "2.60"
"""The newest Ray in which this was seen working."""

T = TypeVar("T")


def draining_nodes() -> dict[str, float | None] | None:
    """Nodes that will leave: node id -> Unix seconds of the deadline, None where it has none.

    None where this Ray does not tell: a node's going is met as a loss then, when it goes.
    """

    def ask() -> dict[str, float | None] | None:
        from ray._private.state import state

        return {node: ms / 1000 if ms else None for node, ms in state.get_draining_nodes().items()}

    return _or_nothing(ask, "a node that will leave is noticed when it is gone")


def most_there_can_be() -> dict[str, float] | None:
    """The most of each resource that an autoscaler may bring the cluster to; None where none is known."""

    def ask() -> dict[str, float] | None:
        from ray._private.state import state

        most = state.get_max_resources_from_cluster_config()
        return None if most is None else {name: float(amount) for name, amount in most.items()}

    return _or_nothing(ask, "a cluster counts as one that cannot grow, before a run starts")


def _or_nothing(ask: Callable[[], T | None], consequence: str) -> T | None:
    try:
        return ask()
    except (ImportError, AttributeError, TypeError) as error:
        logging.getLogger(__name__).warning(
            "Ray %s lacks what was there in %s (%s): %s", ray.__version__, SEEN, error, consequence
        )
        return None
