"""Watch the nodes of a run for draining and unresponsive ones, on a thread, because Ray may answer slowly."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Collection, Mapping

import ray

from raytrain_plus.ray_compat import draining_nodes

POLL_S = 0.5
"""Seconds between two polls."""
KNOCK_S = 0.5
"""Maximum seconds to connect."""

log = logging.getLogger(__name__)


class Nodes:
    """Reports what it sees from its thread."""

    def __init__(
        self,
        silent: Callable[[], Collection[str]],
        draining: Callable[[Mapping[str, float | None]], None],
        lost: Callable[[str], None],
    ) -> None:
        """`silent` returns the nodes to probe; `lost` gets each one that does not answer.

        `draining` gets the nodes that will leave, each with the Unix seconds if known, whenever that changes.
        """
        self._silent = silent
        self._draining = draining
        self._lost = lost
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="nodes", daemon=True)

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def close(self) -> None:
        """Stop polling; return at once."""
        self._over.set()

    def _watch(self) -> None:
        seen: dict[str, float | None] = {}
        known = True
        while not self._over.wait(POLL_S):
            try:
                if known:
                    now = draining_nodes()
                    # A Ray that cannot report draining nodes never will.
                    known = now is not None
                    if now is not None and now != seen:
                        seen = now
                        self._draining(now)
                for node in self._silent():
                    if not (_answers(node) or _answers(node)):
                        self._lost(node)
            except Exception:
                # Ray's own head may be unreachable for a moment.
                log.warning("cannot check the nodes; trying again", exc_info=True)


def _answers(node: str) -> bool:
    """Whether the node's Ray accepts a connection."""
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
