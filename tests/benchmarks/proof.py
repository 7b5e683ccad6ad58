"""What the proofs cost: exact sums beside the ring's, the ledger's bookkeeping, and an audit of ten million rows.

python -m tests.benchmarks.proof [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from raytrain_plus import Data, Job
from raytrain_plus.audit.audit import audit
from raytrain_plus.data.ledger.ledger import NOTE, ROW_ID, row_ids
from raytrain_plus.data.ledger.ledger_files import LedgerFiles
from raytrain_plus.data.of_job import sample_order_of
from raytrain_plus.data.order.sample_order import SampleOrder
from raytrain_plus.data.prepare import prepare
from raytrain_plus.data.reading.transform_block import without_ids
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.data.sources.source import Source
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.training.exchange import header
from raytrain_plus.training.weights.first_bucket import from_digits, to_digits
from tests.benchmarks.costs import REPOSITORY, job, loop

WORKERS, SHARDS = 4, 12
STEPS, WARM_UP = 40, 10
STEP_S = 0.02
AUDITED = 10_000_000


def sums(folder: Path, rounds: int) -> None:
    """Measure exact sums beside the ring's: the byte GPT on four workers, without Ray, so that nothing else is sent."""
    prepare("tests.benchmarks.tasks:prepare", folder / "byte_gpt", [REPOSITORY])
    base = replace(job(folder, "byte_gpt", "sums", shards=SHARDS, rows=8 * SHARDS, workers=WORKERS), steps=STEPS)
    took: dict[str, list[float]] = defaultdict(list)
    sent: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for reduction in ("ring", "exact"):
            file = folder / f"{reduction}.yaml"
            file.write_text(replace(base, reduction=reduction).to_yaml())  # type: ignore[arg-type]
            before = psutil.net_io_counters(pernic=True)["lo"].bytes_sent
            took[reduction].append(loop("own", file, WARM_UP, WORKERS))
            sent[reduction].append((psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before) / STEPS)
    print(f"\nbyte GPT, {WORKERS} workers, {SHARDS} shards: medians of {rounds} interleaved rounds")
    for reduction in took:
        seconds, megabytes = statistics.median(took[reduction]), statistics.median(sent[reduction]) / 1e6
        print(f"  reduction: {reduction:6} {1000 * seconds:8.1f} ms a step, {megabytes:6.1f} MB on the wire")
    times = [exact / ring for exact, ring in zip(took["exact"], took["ring"], strict=True)]
    wires = [exact / ring for exact, ring in zip(sent["exact"], sent["ring"], strict=True)]
    print(
        f"  exact takes {statistics.median(times):.2f} of the ring's time ({min(times):.2f} to {max(times):.2f}) and "
        f"{statistics.median(wires):.2f} of its bytes"
    )


def bookkeeping(folder: Path) -> None:
    """Measure what the ledger adds to a step: ids and notes in each worker, the parts in the controller."""
    rows = 32
    table = pa.table({"x": pa.array(np.zeros(rows)), ROW_ID: pa.array(row_ids("a", 0, rows))})
    reports = {shard: header.ShardReport(0, rows, 1, 1.0, 1.0) for shard in range(SHARDS)}

    def ids() -> None:
        for _ in range(SHARDS // WORKERS):
            int(table.column(ROW_ID).to_numpy()[:rows].sum())
            without_ids(table)

    def notes() -> None:
        sent = to_digits(torch.from_numpy(header.encode(reports, SHARDS, header.Flags())), torch.float32)
        header.decode(from_digits(sent).numpy())

    parts = LedgerFiles(LocalFolder(folder / "parts"))
    made = np.zeros(SHARDS, NOTE).tobytes()
    start = time.perf_counter()
    for step in range(1000):
        parts.add(0, step, made)
    parts.close()
    entered = (time.perf_counter() - start) / 1000
    each = {"ids": _seconds(ids), "header, its loss and weight included": _seconds(notes), "parts": entered}
    print(f"\nthe ledger's bookkeeping, {SHARDS} shards on {WORKERS} workers, of a step of {1000 * STEP_S:.0f} ms:")
    for name, seconds in each.items():
        print(f"  {name:40} {1e6 * seconds:7.1f} us  {100 * seconds / STEP_S:5.2f} %")


def _seconds(call: Callable[[], None], times: int = 2000) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def audited(folder: Path) -> None:
    """Measure time and memory of an audit of ten million rows, in its own process."""
    (folder / "data").mkdir()
    column = pa.array(np.zeros(AUDITED // 10, dtype=np.int8))
    for number in range(10):
        pq.write_table(pa.table({"x": column}), folder / "data" / f"{number}.parquet", row_group_size=10_000)
    asked = Job(
        name="run",
        task="a:B",
        data=Data(path=str(folder / "data"), batch_size=100 * SHARDS, shards=SHARDS),
        epochs=1,
        storage=str(folder),
    )
    seen = parquet_source(asked.data.path)
    run = folder / "run"
    run.mkdir()
    (run / "job.yaml").write_text(asked.to_yaml())
    (run / "dataset.json").write_text(json.dumps(seen.describe()))
    parts = LedgerFiles(LocalFolder(run))
    for step, notes in enumerate(_planned(seen, sample_order_of(asked, seen))):
        parts.add(0, step, notes.tobytes())
    parts.close()
    command = [sys.executable, "-m", "tests.benchmarks.proof", "--audit", str(run)]
    took, megabytes, clean = json.loads(subprocess.run(command, capture_output=True, check=True, cwd=REPOSITORY).stdout)
    print(f"\n{AUDITED:,} rows audited in {took:.1f} s with {megabytes:.0f} MB of memory; clean: {clean}")


def _planned(seen: Source, sample_order: SampleOrder) -> list[np.ndarray]:
    """Yield the notes of all steps of one epoch."""
    notes = np.zeros((sample_order.steps, sample_order.shards), NOTE)
    ids = [
        row_ids(seen.files[file], group, rows)
        for file, group, rows in zip(seen.unit_file, seen.unit_group, seen.unit_rows, strict=True)
    ]
    for shard in range(sample_order.shards):
        _, length = sample_order.span(shard, 0)
        parts = []
        for row_range in sample_order.row_ranges_between(shard, 0, length):
            order = sample_order.permutation(0, row_range.unit)
            assert order is not None
            parts.append(ids[row_range.unit][order[row_range.start : row_range.start + row_range.rows]])
        total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(np.concatenate(parts))])
        start = np.arange(sample_order.steps) * sample_order.per_shard
        rows = np.array([sample_order.rows_in_step(shard, step) for step in range(sample_order.steps)])
        mine = notes[:, shard]
        mine["start"], mine["rows"], mine["weight"] = start, rows, rows
        mine["ids"] = total[start + rows] - total[start]
    return list(notes)


def _audit(run: Path) -> None:
    start = time.perf_counter()
    found = audit(run)
    took = time.perf_counter() - start
    print(json.dumps([took, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, found.clean]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--audit", type=Path, help="audit this run, and say how long that took")
    options = parser.parse_args()
    if options.audit is not None:
        _audit(options.audit)
        return
    with tempfile.TemporaryDirectory(prefix="raytrain-proof-") as name:
        sums(Path(name), options.rounds)
        bookkeeping(Path(name))
        audited(Path(name))


if __name__ == "__main__":
    main()
