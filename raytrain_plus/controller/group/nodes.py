"""Watch the nodes of a run for draining and unresponsive ones, on a thread, because Ray may answer slowly."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

import ray

from raytrain_plus.ray_compat import draining_nodes

POLL_S = 0.5
"""Seconds between two polls."""
KNOCK_S = 0.5
"""Maximum seconds to connect."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Draining:
    """Other nodes than before will leave: these, each with the Unix seconds if known."""

    nodes: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node that was suspected does not answer."""

    node: str


class Nodes:
    """Reports what it sees from its thread."""

    def __init__(self, over: threading.Event | None = None) -> None:
        """Watch no nodes until `start`; `over` ends the polling when it is set, and paces it."""
        self._suspected: Set[str] = frozenset()
        self._over = over or threading.Event()

    def start(self, put: Callable[[object], None]) -> None:
        """Start polling; `put` gets a `Draining` or a `NodeLost`, on the thread."""
        threading.Thread(target=self.watch, args=(put,), name="nodes", daemon=True).start()

    def suspect(self, nodes: Set[str]) -> None:
        """Probe these nodes, and no others, until told otherwise."""
        self._suspected = nodes

    def close(self) -> None:
        """Stop polling; return at once."""
        self._over.set()

    def watch(self, put: Callable[[object], None]) -> None:
        """Poll until closed."""
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
                        put(Draining(now))
                for node in self._suspected:
                    if not (_answers(node) or _answers(node)):
                        put(NodeLost(node))
            except Exception:
                # Ray's own head may be unreachable for a moment.
                log.warning("cannot check the nodes; trying again", exc_info=True)


def _answers(node: str) -> bool:
    """Return whether the node's Ray accepts a connection."""
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
