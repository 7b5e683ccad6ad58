"""The values that Ray's gauges get; a failure of theirs does not affect the run."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_plus.controller.record import metrics as module
from raytrain_plus.controller.record.metrics import PERIOD_S, Metrics

STEPS, TIME = "raytrain_steps", "raytrain_step_seconds"


class FakeGauge:
    """Ray's gauge, without Ray."""

    told: list[tuple[str, float, dict[str, str]]]
    broken = False

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert description
        self.name, self.keys = name, tag_keys

    def set_default_tags(self, tags: dict[str, str]) -> FakeGauge:
        self.tags = tags
        return self

    def set(self, value: float, tags: dict[str, str]) -> None:
        if self.broken:
            raise RuntimeError("no agent")
        assert set({**self.tags, **tags}) == set(self.keys)
        self.told.append((self.name, value, {**self.tags, **tags}))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(module, "Gauge", FakeGauge)
    monkeypatch.setattr(FakeGauge, "told", [], raising=False)
    return FakeGauge.told


def test_all_gauges_are_set_each_time_because_ray_forgets_them(told: list[Any]) -> None:
    metrics = Metrics("digits")
    metrics.show({(STEPS, ()): 1.0, (TIME, ("worker-0", "1")): 2.0})
    worker = {"run": "digits", "worker": "worker-0", "stage": "1"}
    assert told == [(STEPS, 1.0, {"run": "digits"}), (TIME, 2.0, worker)]
    told.clear()
    metrics.show({(STEPS, ()): 3.0, (TIME, ("worker-0", "1")): 2.0})
    assert told == [(STEPS, 3.0, {"run": "digits"}), (TIME, 2.0, worker)]


def test_an_update_is_due_periodically(told: list[Any]) -> None:
    now = 100.0
    metrics = Metrics("digits", clock=lambda: now)
    assert metrics.due
    metrics.show({})
    assert not metrics.due
    now += PERIOD_S
    assert metrics.due


def test_a_refusal_of_ray_is_logged_once_and_the_run_continues(
    told: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeGauge, "broken", True)
    metrics = Metrics("digits")
    metrics.show({(STEPS, ()): 1.0})
    assert not metrics.due
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the run continues without them" in caplog.text
