"""Forecast costs of a partition."""

from __future__ import annotations

import pytest

from raytrain_plus.parallel.pipeline.forecast import forecast
from raytrain_plus.parallel.pipeline.partition import Layer

EVEN = [Layer(name, 0.03, 1000, 10, 7) for name in "abcd"]


def test_the_bubble_of_even_stages_is_that_of_the_formula() -> None:
    for stages, microbatches in ((2, 4), (4, 16)):
        for schedule in ("gpipe", "1f1b"):
            found = forecast(EVEN, schedule, stages, microbatches)  # type: ignore[arg-type]
            assert found.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert forecast(EVEN, "zero-bubble", 2, 8).bubble < forecast(EVEN, "1f1b", 2, 8).bubble


def test_each_stage_has_its_layers_and_in_flight_activations() -> None:
    first, last = forecast(EVEN, "1f1b", 2, 4).stages
    assert (first.layers, last.layers) == ((("a", "b"),), (("c", "d"),))
    assert (first.parameters, first.seconds) == (20, 0.06)
    # Two microbatches at the front, one at the end.
    assert (first.bytes, last.bytes) == (2000 + 2 * 14, 2000 + 14)
    assert [one.bytes for one in forecast(EVEN, "gpipe", 2, 4).stages] == [2000 + 4 * 14] * 2


def test_an_uneven_model_waits_for_its_slowest_stage() -> None:
    found = forecast([Layer("a", 0.01, 0), Layer("b", 0.03, 0)], "1f1b", 2, 1000)
    assert found.bubble == pytest.approx(1 / 3, abs=0.01)
