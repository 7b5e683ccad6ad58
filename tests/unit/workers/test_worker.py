"""What a worker makes of a copy of the state that does not come as it was sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")

from raytrain_plus.errors import Interrupted
from raytrain_plus.state.transfer import Snapshot, digest
from raytrain_plus.workers import worker as module
from raytrain_plus.workers.worker import Worker

TENSORS = {"param/x": ("float32", (2,), np.arange(8, dtype=np.uint8))}
WHOLE = Snapshot(4, TENSORS, b"values", digest(4, TENSORS, b"values"))


def fetched(monkeypatch: pytest.MonkeyPatch, sent: Snapshot) -> Snapshot:
    monkeypatch.setattr(module.ray, "wait", lambda references, timeout: (references, []))
    monkeypatch.setattr(module.ray, "get", lambda reference: sent)
    return Worker("worker-0")._fetch(0, "a reference")


def test_a_whole_copy_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fetched(monkeypatch, WHOLE) is WHOLE


@pytest.mark.parametrize("changes", [{"step": 5}, {"values": b"others"}, {"tensors": {}}])
def test_a_damaged_copy_is_refused(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    with pytest.raises(Interrupted, match="came damaged"):
        fetched(monkeypatch, replace(WHOLE, **changes))


def test_torchs_own_words_for_too_little_memory_are_understood() -> None:
    import torch

    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert "out of memory (RuntimeError): " in str(module._users_error(caught.value))
