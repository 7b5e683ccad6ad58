"""Waits for operations: their order, their limit, and what ends them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from raytrain_plus.collective.world import Work, wait
from raytrain_plus.errors import Interrupted, WaitExpired


@dataclass
class Operation:
    """An operation that has ended when it was asked `looks` times; writes what happens into `said`."""

    name: str
    said: list[str]
    looks: int = 0
    after: Sequence[Work] = field(default_factory=list)

    def ended(self, within_s: float) -> bool:
        self.looks -= 1
        return self.looks < 0

    def finish(self) -> Work | None:
        self.said.append(self.name)
        return self.after[0] if self.after else None


def test_what_follows_starts_in_order_once_all_before_it_have_ended() -> None:
    """Whichever ends first: worlds that match operations by their order need the same order on all members."""
    said: list[str] = []
    works = [
        Operation(f"exchange {number}", said, 5 - number, [Operation(f"gather {number}", said, number)])
        for number in range(3)
    ]
    wait(works, "a test", 1)
    assert said == [*(f"exchange {number}" for number in range(3)), *(f"gather {number}" for number in range(3))]


def test_an_interrupt_ends_a_wait() -> None:
    said: list[str] = []
    with pytest.raises(Interrupted, match="stopped waiting for the sums"):
        wait([Operation("first", said), Operation("never", said, 10**9)], "the sums", 60, lambda: True)
    assert said == ["first"]


def test_a_wait_has_a_limit() -> None:
    with pytest.raises(WaitExpired, match=r"the sums did not complete within 0\.01 s"):
        wait([Operation("never", [], 10**9)], "the sums", 0.01)
