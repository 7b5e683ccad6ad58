"""The ledger's files are complete up to some step at any moment, small, and report failed writes."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_plus.data.ledger import ledger_files
from raytrain_plus.data.ledger.ledger import NOTE, step_sum
from raytrain_plus.data.ledger.ledger_files import SCHEMA, LedgerFiles
from raytrain_plus.data.paths.page_checksum import without_checksums
from raytrain_plus.errors import RunError
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.storage.interface import Folder


def notes(step: int, shards: int = 12, rows: int = 5, weights: str = "rows") -> bytes:
    draw = np.random.default_rng(step)
    made = np.zeros(shards, NOTE)
    made["start"], made["rows"], made["weight"] = step * rows, rows, rows
    # A sum modulo 2^64 of uniform numbers is uniform.
    made["ids"] = draw.integers(0, 2**64, shards, np.uint64)
    if weights != "rows":
        tokens = draw.normal(150 * rows, (rows * 100**2 / 12) ** 0.5, shards).round()
        made["weight"] = tokens if weights == "tokens" else tokens * draw.random(shards)
    return made.tobytes()


def ledger(run: Folder) -> pa.Table:
    return pa.concat_tables([pq.read_table(pa.BufferReader(run.read(name))) for name in sorted(run.files("ledger"))])


def test_every_step_is_there_once_and_parts_end(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_files, "PART_STEPS", 10)
    written = LedgerFiles(run)
    for step in range(35):
        written.add(3 if step < 20 else 4, step, notes(step))
        if step % 7 == 0:
            written.flush()
    written.close()
    table = ledger(run).sort_by([("step", "ascending"), ("shard", "ascending")])
    assert table.schema.equals(SCHEMA)
    assert table.column("step").to_pylist() == [step for step in range(35) for _ in range(12)]
    assert table.column("shard").to_pylist() == list(range(12)) * 35
    assert table.column("start").to_pylist() == [step * 5 for step in range(35) for _ in range(12)]
    assert table.column("generation").to_pylist() == [3] * 240 + [4] * 180
    ids = [np.frombuffer(notes(step), NOTE)["ids"].tolist() for step in range(35)]
    assert table.column("ids").to_pylist() == [one % 2**31 for of_step in ids for one in of_step]
    assert table.column("step_ids").to_pylist() == [
        int(step_sum(np.array(of_step, np.uint64))) if shard == 0 else None for of_step in ids for shard in range(12)
    ]
    assert sorted(run.files()) == [
        "ledger/00000003-000000000000.parquet",
        "ledger/00000003-000000000010.parquet",
        "ledger/00000004-000000000020.parquet",
        "ledger/00000004-000000000030.parquet",
    ]


def test_it_is_written_in_the_background(run: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_files, "PERIOD_S", 0.01)
    written = LedgerFiles(run)
    written.add(0, 0, notes(0))
    deadline = time.monotonic() + 10
    while not run.files():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert ledger(run).num_rows == 12
    written.close()


@pytest.mark.parametrize(
    ("shards", "rows", "weights", "most"),
    [
        *(
            (shards, 8192, "rows", 64 << 10)
            for shards in (1, 4, 6, 7, 8, 12, 16, 64, 65, 66, 97, 98, 130, 131, 195, 196, 900)
        ),
        (12, 2, "rows", 64 << 10),
        (1024, 2, "rows", 85 * 1024),
        pytest.param(4096, 8192, "rows", 85 * 4096, marks=pytest.mark.slow),
        (12, 8192, "tokens", (64 << 10) + 2 * 12_000),
        (64, 5, "tokens", (64 << 10) + 2 * 64_000),
        (64, 2, "any", (64 << 10) + int(7.2 * 64_000)),
    ],
)
def test_a_ledger_is_as_small_as_the_docstring_says(
    tmp_path: Path, shards: int, rows: int, weights: str, most: int
) -> None:
    run = LocalFolder(tmp_path)
    written = LedgerFiles(run)
    for step in range(1000):
        written.add(0, step, notes(step, shards, rows, weights))
    written.close()
    assert sum(part.bytes for part in run.files().values()) <= most
    assert without_checksums([tmp_path / name for name in run.files()]) == ()


def test_sums_of_ids_keep_all_of_their_bits(run: Folder) -> None:
    made = np.zeros(3, NOTE)
    made["ids"] = [2**64 - 1, 0, 2**62 + 1]
    written = LedgerFiles(run)
    written.add(0, 0, made.tobytes())
    written.close()
    assert ledger(run).column("ids").to_pylist() == made["ids"].tolist()
    assert ledger(run).column("step_ids").to_pylist() == [int(step_sum(made["ids"])), None, None]


def test_entries_are_kept_until_they_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_files, "PERIOD_S", 0.01)
    run = LocalFolder(tmp_path)
    written = LedgerFiles(run)
    (tmp_path / "ledger").touch()
    written.add(0, 0, notes(0))
    with pytest.raises(OSError, match="ledger"):
        written.flush()
    written.add(0, 1, notes(1))
    (tmp_path / "ledger").unlink()
    written.close()
    assert sorted(set(ledger(run)["step"].to_pylist())) == [0, 1]


def test_nothing_is_written_if_before_raises(tmp_path: Path) -> None:
    run = LocalFolder(tmp_path)
    seen: list[int] = []

    def before() -> None:
        seen.append(len(run.files()))
        if len(seen) == 1:
            raise OSError("not yet")

    written = LedgerFiles(run, before)
    written.add(0, 0, notes(0))
    with pytest.raises(OSError, match="not yet"):
        written.flush()
    assert not run.files()
    written.add(0, 1, notes(1))
    written.flush()
    # Without anything to write, `before` is not called.
    written.close()
    assert seen == [0, 0]
    assert sorted(set(ledger(run)["step"].to_pylist())) == [0, 1]


def test_add_raises_once_writing_is_forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_files, "PERIOD_S", 0.01)

    def overtaken() -> None:
        raise RunError("another controller has taken this run over")

    def enter() -> None:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            written.add(0, 0, notes(0))
            time.sleep(0.01)

    written = LedgerFiles(LocalFolder(tmp_path), overtaken)
    with pytest.raises(RunError, match="taken this run over"):
        enter()
    written.abandon()
    assert not LocalFolder(tmp_path).files()


def test_abandoned_entries_are_never_written(run: Folder) -> None:
    written = LedgerFiles(run)
    written.add(0, 0, notes(0))
    written.abandon()
    written.close()
    assert not run.files()
