"""Collect the faults that an audit finds."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

KEPT = 100
"""Maximum faults of one kind that are described; the rest are only counted. Every entry of a ledger can be wrong."""


class Faults:
    """The faults found: descriptions of the first ones of each kind, and the number of all."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.count = 0

    def add(self, *found: str) -> None:
        """Add faults of one kind."""
        self.add_many(len(found), found)

    def add_many(self, count: int, found: Iterable[str]) -> None:
        """Add `count` faults of one kind; only those that are kept are described."""
        self.found += itertools.islice(found, KEPT)
        self.count += count
