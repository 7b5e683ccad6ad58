"""A conversion of data says how far it is, and nothing if another process converts."""

from __future__ import annotations

import io
import time

import pytest

from raytrain_plus.observe.views import conversion_view as module
from raytrain_plus.observe.views.conversion_view import conversion_view


def test_lines_say_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    with conversion_view(stream, "rows.csv", True) as told:
        for seconds in range(12):
            told(seconds * 1_000_000, 12_000_000)
            now[0] += 1
    said = stream.getvalue().splitlines()
    assert said[:3] == [
        "rows.csv has changed since it was converted: converting it again",
        "converting rows.csv to Parquet: 5.0 MB of 12.0 MB, 1.0 MB/s",
        "converting rows.csv to Parquet: 10.0 MB of 12.0 MB, 1.0 MB/s",
    ]
    assert said[3].startswith("converted rows.csv, 12.0 MB, in 12.0 s with up to ")


@pytest.mark.parametrize("converts", [False, True])
def test_a_short_conversion_or_that_of_another_process_says_nothing(converts: bool) -> None:
    stream = io.StringIO()
    with conversion_view(stream, "rows.csv", again=not converts) as told:
        if converts:
            told(1, 1)
    assert stream.getvalue() == ""
    assert module.SHORT_S > 0.5
