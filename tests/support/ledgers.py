"""Ledgers of runs, and damage to them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_plus import Data, Job
from raytrain_plus.data.dataset import training_data
from raytrain_plus.data.ledger.ledger import NOTE
from raytrain_plus.data.ledger.ledger_files import LedgerFiles
from raytrain_plus.data.of_job import sample_order_of
from raytrain_plus.data.reading.reader import Batches
from raytrain_plus.data.reading.transform_block import RowReader
from raytrain_plus.data.reading.unit_cache import UnitCache
from raytrain_plus.storage.folders.local import LocalFolder


def write_data(folder: Path, sizes: list[int], group: int) -> None:
    folder.mkdir(parents=True)
    for number, size in enumerate(sizes):
        table = pa.table({"x": pa.array(np.arange(size, dtype=np.int64) + 1000 * number)})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=group)


def job_of(folder: Path, **changes: object) -> Job:
    data = Data(path=str(folder / "data"), batch_size=12, shards=4)
    return replace(Job(name="run", task="a:B", data=data, epochs=2, storage=str(folder)), **changes)  # type: ignore[arg-type]


def record(run: Path, generation: int, *steps: int, resumed: int | None = None) -> None:
    """Append events: a resumption, if any, and committed steps."""
    events = [] if resumed is None else [{"kind": "resumed", "step": resumed, "checkpoint": "x", "voided_to": 6}]
    events += [{"kind": "step_committed", "step": step} for step in steps]
    with (run / "events.ndjson").open("a") as file:
        file.writelines(json.dumps({"time": 0.0, "generation": generation, **event}) + "\n" for event in events)


def notes_of(job: Job, cache_mb: int = 0) -> list[np.ndarray]:
    """Return the notes of what the run's own readers deliver, step by step."""
    seen = training_data(job, [])
    rows = RowReader(source=seen, sample_order=sample_order_of(job, seen), seed=job.seed, transform=None, block_rows=4)
    made = [np.zeros(job.data.shards, NOTE) for _ in range(rows.sample_order.steps)]
    for shards in ((0, 2), (1, 3)) if job.data.shards == 4 else (range(job.data.shards),):
        feed = Batches(
            rows,
            shards=shards,
            first_step=0,
            microbatches=1,
            collate=len,
            cache=UnitCache(rows, cache_mb),
            make_stream=None,
        )
        with feed:
            for step in range(rows.sample_order.steps):
                for shard, batches in feed.get(step, 10).shards.items():
                    count = sum(batch.rows for batch in batches)
                    ids = sum(batch.ids for batch in batches) % 2**64
                    made[step][shard] = (batches[0].start, count, ids, count, 0.0, 0)
    return made


def run_of(job: Job, notes: list[np.ndarray], status: str | None = "finished", generation: int = 0) -> Path:
    run = Path(job.storage) / job.name
    run.mkdir()
    (run / "job.yaml").write_text(job.to_yaml())
    (run / "dataset.json").write_text(json.dumps(training_data(job, []).describe()))
    record(run, generation, *range(len(notes)))
    written = LedgerFiles(LocalFolder(run))
    for step, of_step in enumerate(notes):
        written.add(generation, step, of_step.tobytes(), b"")
    written.close()
    if status is not None:
        (run / "result.json").write_text(json.dumps({"status": status, "steps": len(notes)}))
    return run


def lost_row(notes: list[np.ndarray]) -> None:
    notes[3][1]["rows"] -= 1


def doubled_row(notes: list[np.ndarray]) -> None:
    notes[3][1]["rows"] += 1


def other_rows(notes: list[np.ndarray]) -> None:
    notes[3][1]["ids"] += 1


def swapped(notes: list[np.ndarray]) -> None:
    notes[3][[1, 2]] = notes[3][[2, 1]]


def lost_step(notes: list[np.ndarray]) -> None:
    notes[3]["rows"] = 0
    notes[3]["ids"] = 0
