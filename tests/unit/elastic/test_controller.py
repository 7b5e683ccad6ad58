"""What the controller's thin code decides by itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from raytrain_plus.elastic.controller import Controller


def test_a_message_of_another_generation_is_refused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    controller = object.__new__(Controller)
    controller._group = SimpleNamespace(generation=3)  # type: ignore[assignment]
    assert not controller._stale(3, "a report of worker-1")
    assert controller._stale(2, "a report of worker-1")
    assert caplog.messages == ["refused: a report of worker-1 in generation 2; the present one is 3"]


def test_a_notice_for_a_node_that_hosts_nobody_is_logged_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    controller = object.__new__(Controller)
    controller._group = SimpleNamespace(workers={})  # type: ignore[assignment]
    controller._places, controller._draining = {}, {}
    controller._noticed({"abc": None})
    assert caplog.messages == ["node abc, which hosts no worker of this run, will leave"]
