"""What a run tells: who follows gets every event, in order, however far back it begins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raytrain_plus.elastic import journal as module
from raytrain_plus.elastic.journal import Journal
from raytrain_plus.past import Past
from raytrain_plus.runfolder import Fence
from raytrain_plus.storage.local import LocalFolder
from raytrain_plus.workers.plan import Place


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(batch_size=8, rows=80, end=None, past=Past())
    made.open(tmp_path / "run", Fence(LocalFolder(tmp_path / "run"), 0), "name: x\n", {}, "here", {})
    yield made
    made.close()


def test_who_follows_from_far_back_gets_what_memory_has_forgotten(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT", 5)
    for number in range(40):
        journal.will_leave(f"node-{number}", None)
    assert len(journal._told) <= 10
    got: list[str] = []
    cursor = 0
    while cursor < 41:
        events = journal.follow(cursor, 1)
        cursor += len(events)
        got += [event["kind"] if "node" not in event else event["node"] for event in events]
    assert got == ["run_started", *(f"node-{number}" for number in range(40))]
    assert journal.follow(41, 0.01) == []


def test_a_workers_clock_is_known_to_the_length_of_the_call(journal: Journal) -> None:
    journal.came(Place(worker="a", pid=1, node="n", address="127.0.0.1"))
    journal.clocked("a", clock_s=1000.15, asked=1000.1, answered=1000.3)
    assert journal._offsets["a"] == 0.0
    journal.clocked("a", clock_s=900.0, asked=1000.1, answered=1000.3)
    assert journal._offsets["a"] == pytest.approx(100.2)
