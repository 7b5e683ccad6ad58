"""The ledger's files: complete up to some step at any moment, small, and loud where they cannot be written."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_plus.data import parts
from raytrain_plus.data.ledger import NOTE
from raytrain_plus.data.parts import SCHEMA, Parts


def notes(step: int, shards: int = 12, rows: int = 5) -> bytes:
    made = np.zeros(shards, NOTE)
    made["start"], made["rows"], made["weight"] = step * rows, rows, rows
    made["ids"] = np.random.default_rng(step).integers(0, 2**32, (shards, rows)).sum(axis=1)
    return made.tobytes()


def ledger(folder: Path) -> pa.Table:
    files = sorted((folder / "ledger").glob("*.parquet"))
    return pa.concat_tables([pq.read_table(file) for file in files])


def test_every_step_is_there_once_and_parts_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_STEPS", 10)
    written = Parts(tmp_path)
    for step in range(35):
        written.add(3 if step < 20 else 4, step, notes(step))
        if step % 7 == 0:
            written.flush()
    written.close()
    table = ledger(tmp_path)
    assert table.schema.equals(SCHEMA)
    assert table.column("step").to_pylist() == [step for step in range(35) for _ in range(12)]
    assert table.column("shard").to_pylist() == list(range(12)) * 35
    assert table.column("start").to_pylist() == [step * 5 for step in range(35) for _ in range(12)]
    assert table.column("generation").to_pylist() == [3] * 240 + [4] * 180
    expected = np.concatenate([np.frombuffer(notes(step), NOTE)["ids"] for step in range(35)])
    assert table.column("ids").to_pylist() == expected.tolist()
    assert [file.name for file in sorted((tmp_path / "ledger").iterdir())] == [
        "00000003-000000000000.parquet",
        "00000003-000000000010.parquet",
        "00000004-000000000020.parquet",
        "00000004-000000000030.parquet",
    ]


def test_it_is_written_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PERIOD_S", 0.01)
    written = Parts(tmp_path)
    written.add(0, 0, notes(0))
    deadline = time.monotonic() + 10
    while not list((tmp_path / "ledger").glob("*.parquet")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert ledger(tmp_path).num_rows == 12
    written.close()


def test_a_thousand_steps_of_a_small_job_take_less_than_64_kib(tmp_path: Path) -> None:
    written = Parts(tmp_path)
    for step in range(1000):
        written.add(0, step, notes(step))
    written.close()
    assert sum(file.stat().st_size for file in (tmp_path / "ledger").iterdir()) < 64 << 10


def test_what_cannot_be_written_is_kept_until_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PERIOD_S", 0.01)
    written = Parts(tmp_path)
    (tmp_path / "ledger").rename(tmp_path / "elsewhere")
    written.add(0, 0, notes(0))
    with pytest.raises(OSError, match="ledger"):
        written.flush()
    written.add(0, 1, notes(1))
    (tmp_path / "elsewhere").rename(tmp_path / "ledger")
    written.close()
    assert sorted(set(pq.read_table(tmp_path / "ledger")["step"].to_pylist())) == [0, 1]
