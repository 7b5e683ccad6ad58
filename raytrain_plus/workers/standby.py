"""Keep a process on a node that has imported a worker's modules, and replaces a worker whose process died there.

That saves the seconds in which a process starts and imports, most of all while others keep the machine busy.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from raytrain_plus.membership.timeouts import ANSWER_S, LOAD_S
from raytrain_plus.workers.imports import Imports

log = logging.getLogger(__name__)


def nodes_with_standby(nodes: Mapping[str, str]) -> set[str]:
    """Return the nodes that get a standby, given the node of each member: those with several members, or the only one.

    If a node has one of many members, it is most often the node that is lost, and then its standby is, too. Otherwise
    the others train on while the new process starts, with CPUs of its own.

    >>> nodes_with_standby({"a": "x"}), sorted(nodes_with_standby({"a": "x", "b": "y", "c": "y"}))
    ({'x'}, ['y'])
    """
    counts = Counter(nodes.values())
    return {node for node, count in counts.items() if count > 1 or len(counts) == 1}


@dataclass(slots=True)
class Standby:
    """A process that is not a worker yet."""

    actor: Any
    live: Future[Any]
    """Done once its process is gone."""
    loaded: Future[Any]
    """Done once it has imported all."""
    began: float
    """When it was started, in seconds by the clock of `Standbys`."""
    asked: float = 0.0
    """When it was asked last whether it responds."""
    answer: Future[Any] | None = None
    """The answer to that."""

    def left_s(self, now: float) -> float:
        """Return for how many seconds it may still load or owe an answer; 0 or less if it does not respond."""
        if not self.loaded.done():
            return self.began + LOAD_S - now
        if self.answer is not None and not self.answer.done():
            return self.asked + ANSWER_S - now
        return math.inf


class Standbys:
    """Hold at most one standby on each node."""

    def __init__(
        self,
        start: Callable[[str], tuple[Any, Future[Any]]],
        end: Callable[[Any], None],
        imports: Imports,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin without standbys.

        `start` starts one on a node, and returns its actor and what is done once its process is gone. `end` ends it.
        `clock`: seconds.
        """
        self._start, self._end, self._imports, self._clock = start, end, imports, clock
        self._on: dict[str, Standby] = {}

    def keep(self, nodes: Collection[str]) -> None:
        """Keep one standby on each of `nodes`; end all others."""
        for node, standby in list(self._on.items()):
            if node not in nodes or not self._usable(standby):
                del self._on[node]
                self._end(standby.actor)
        for node in nodes:
            if node not in self._on:
                actor, live = self._start(node)
                loaded = actor.load.remote(self._imports).future()
                self._on[node] = Standby(actor, live, loaded, self._clock())

    def waits(self, node: str) -> bool:
        """Return whether a usable standby waits on that node; it may still be importing, or owe an answer."""
        return node in self._on and self._usable(self._on[node])

    def ask(self, node: str) -> None:
        """Ask the standby of a node, which may be needed soon, whether it responds; not while it imports."""
        standby = self._on[node]
        if standby.loaded.done() and (standby.answer is None or standby.answer.done()):
            standby.asked, standby.answer = self._clock(), standby.actor.respond.remote().future()

    def take(self, node: str) -> Standby | None:
        """Remove the standby of a node and return it; end one that does not respond, and return None."""
        standby = self._on.pop(node, None)
        if standby is None or self._usable(standby):
            return standby
        if not standby.live.done():
            log.warning("the standby on node %s does not respond, so it is ended", node[:12])
        self._end(standby.actor)
        return None

    def _usable(self, standby: Standby) -> bool:
        return not standby.live.done() and standby.left_s(self._clock()) > 0

    def close(self) -> None:
        """End all standbys."""
        self.keep(())
