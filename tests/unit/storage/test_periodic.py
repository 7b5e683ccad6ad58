"""A periodic call is stopped, also if it never ends."""

from __future__ import annotations

import threading

import pytest

from raytrain_plus.storage import periodic
from raytrain_plus.storage.periodic import PeriodicCall


def test_a_call_that_never_ends_is_not_waited_for_without_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic, "STOP_S", 0.05)
    began, ends = threading.Event(), threading.Event()

    def act() -> bool:
        began.set()
        return ends.wait(10)

    one = PeriodicCall(act, 0.0, 0.0, "ledger")
    one.start()
    assert began.wait(5)
    with pytest.raises(TimeoutError, match="the storage has not taken the ledger within"):
        one.stop()
    ends.set()
    one.stop()
