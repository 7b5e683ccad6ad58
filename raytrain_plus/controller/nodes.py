"""Looks after the nodes of a run, on a thread of its own, because Ray may take its time: who leaves, who is silent."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Collection, Mapping

import ray

from raytrain_plus.ray_compat import draining_nodes

POLL_S = 0.5
"""Seconds between two looks."""
KNOCK_S = 0.5
"""Limit of taking a connection."""

log = logging.getLogger(__name__)


class Nodes:
    """Tells of what it sees from its thread."""

    def __init__(
        self,
        silent: Callable[[], Collection[str]],
        draining: Callable[[Mapping[str, float | None]], None],
        lost: Callable[[str], None],
    ) -> None:
        """`silent` gives the nodes to knock at, and `lost` is told of one that does not answer.

        `draining` is told who will leave, and when in Unix seconds where that is known, each time that it changes.
        """
        self._silent = silent
        self._draining = draining
        self._lost = lost
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="nodes", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def close(self) -> None:
        """Looks no more; returns at once."""
        self._over.set()

    def _watch(self) -> None:
        seen: dict[str, float | None] = {}
        known = True
        while not self._over.wait(POLL_S):
            try:
                if known:
                    now = draining_nodes()
                    # A Ray that cannot tell never will.
                    known = now is not None
                    if now is not None and now != seen:
                        seen = now
                        self._draining(now)
                for node in self._silent():
                    if not (_answers(node) or _answers(node)):
                        self._lost(node)
            except Exception:
                # Ray's own head may be out of reach for a moment.
                log.warning("cannot look after the nodes; trying again", exc_info=True)


def _answers(node: str) -> bool:
    """Whether somebody takes a connection where the node's Ray listens."""
    for entry in ray.nodes():
        if entry["NodeID"] == node:
            if not entry["Alive"]:
                return False
            try:
                where = (entry["NodeManagerAddress"], entry["NodeManagerPort"])
                socket.create_connection(where, timeout=KNOCK_S).close()
                return True
            except OSError:
                return False
    return False
