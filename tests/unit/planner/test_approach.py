"""The page's tables of approaches are those that the planner makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_plus.planner.approach import approaches, largest, scaling

PAGE = (Path(__file__).parents[3] / "jobs" / "parallel.md").read_text()


def test_the_page_scales_as_the_planner_says() -> None:
    assert scaling() in PAGE


def test_the_page_has_the_bytes_of_530_billion_parameters() -> None:
    for line in largest():
        assert f"- {line}" in PAGE


@pytest.mark.slow
def test_the_page_has_the_planned_approaches() -> None:
    assert approaches() in PAGE
