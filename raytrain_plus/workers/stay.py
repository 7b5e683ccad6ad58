"""Follow a worker's part in one generation, for the calls that come while its training thread is in there."""

from __future__ import annotations

from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from raytrain_plus.errors import StaleController
from raytrain_plus.workers.messages import Assignment, Outcome

Addresses = frozenset[tuple[str, int]]


class Stay:
    """One member's part in one generation, from `serve` on."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.joined = False
        """Whether it was in its worlds, with the state."""
        self.out: Future[Outcome] = Future()
        """Done once the training thread has come out."""
        self.rings: Addresses = frozenset()
        self.replicas: Addresses = frozenset()
        """Where the members listen, once all are in their worlds."""
        self._waits: Future[Any] = Future()

    def outcome(self) -> Outcome:
        """Wait until it has come out, and return how.

        Only the newest controller waits: raises `StaleController` as soon as another asks.
        """
        before, self._waits = self._waits, Future()
        now = self._waits
        before.set_result(None)
        wait([self.out, now], return_when=FIRST_COMPLETED)
        if not self.out.done():
            raise StaleController("a newer controller waits for the end of this generation")
        return self.out.result()
