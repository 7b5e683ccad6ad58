"""Keep a process on a node that has imported a worker's modules, and replaces a worker whose process died there.

That saves the seconds in which a process starts and imports, most of all while others keep the machine busy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from raytrain_plus.workers.imports import Imports


def nodes_with_standby(nodes: Mapping[str, str]) -> set[str]:
    """Return the nodes that get a standby, given the node of each member: those with several members, or the only one.

    If a node has one of many members, it is most often the node that is lost, and then its standby is, too.

    >>> nodes_with_standby({"a": "x"}), sorted(nodes_with_standby({"a": "x", "b": "y", "c": "y"}))
    ({'x'}, ['y'])
    """
    counts = Counter(nodes.values())
    return {node for node, count in counts.items() if count > 1 or len(counts) == 1}


@dataclass(frozen=True, slots=True)
class _Standby:
    """A process that is not a worker yet."""

    actor: Any
    live: Future[Any]
    """Done once its process is gone."""


class Standbys:
    """Hold at most one standby on each node."""

    def __init__(self, start: Callable[[str], Any], end: Callable[[Any], None], imports: Imports) -> None:
        """Begin without standbys. `start` starts the actor of one on a node, `end` ends it."""
        self._start, self._end, self._imports = start, end, imports
        self._on: dict[str, _Standby] = {}

    def keep(self, nodes: Collection[str]) -> None:
        """Keep one standby on each of `nodes`; end all others."""
        for node, standby in list(self._on.items()):
            if node not in nodes or standby.live.done():
                del self._on[node]
                self._end(standby.actor)
        for node in nodes:
            if node not in self._on:
                actor = self._start(node)
                self._on[node] = _Standby(actor, actor.live.remote().future())
                actor.load.remote(self._imports)

    def waits(self, node: str) -> bool:
        """Return whether a standby lives on that node; it may still be importing."""
        return node in self._on and not self._on[node].live.done()

    def take(self, node: str) -> Any:
        """Remove the standby of a node and return its actor."""
        return self._on.pop(node).actor

    def close(self) -> None:
        """End all standbys."""
        self.keep(())
