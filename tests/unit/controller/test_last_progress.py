"""Whether the last writes of a run advance, and how fast."""

from __future__ import annotations

import pytest

from raytrain_plus.controller.group.last_progress import RATE_S, Advance


def test_any_change_is_an_advance_and_none_is_a_stall() -> None:
    seen = Advance(100.0)
    seen.look({}, "export", 101.0)
    seen.look({"a": (0, 10)}, "export", 102.0)
    assert seen.since == 102.0
    seen.look({"a": (0, 10)}, "export", 105.0)
    assert seen.since == 102.0
    seen.look({"a": (4, 10)}, "export", 106.0)
    assert seen.since == 106.0
    # Another attempt at the same file.
    seen.look({"a": (0, 10)}, "export", 107.0)
    assert seen.since == 107.0
    # Nothing is written while the manifest is made.
    seen.look({"a": (0, 10)}, "manifest", 108.0)
    assert seen.since == 108.0


def test_the_rate_is_the_recent_one_and_falls_while_nothing_is_taken() -> None:
    seen = Advance(0.0)
    assert seen.rate(0.0) is None
    for second in range(3):
        seen.look({"a": (second * 100, 10_000)}, "", float(second))
    assert seen.rate(2.0) == 100.0
    assert seen.rate(4.0) == 50.0
    for second in range(3, 60):
        seen.look({"a": (200 + 7 * second, 10_000)}, "", float(second))
    assert seen.rate(59.0) == pytest.approx(7.0)
    assert len(seen._seen) <= RATE_S + 2
    seen.look({"a": (0, 10_000)}, "", 60.0)
    assert seen.rate(60.0) is None, "another attempt"
