"""The stream on a real Ray: the same rows as a direct read, in bounded memory, even if workers hold every CPU."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray

from raytrain_plus.data.order.sample_order import SampleOrder
from raytrain_plus.data.reading import reader
from raytrain_plus.data.reading.reader import Batches
from raytrain_plus.data.reading.stream import Stream
from raytrain_plus.data.reading.transform_block import RowReader
from raytrain_plus.data.reading.unit_cache import UnitCache
from raytrain_plus.data.sources.parquet_source import parquet_source
from tests.integration.conftest import TASKS
from tests.integration.tasks import noisy, write_data

pytestmark = [pytest.mark.timeout(180)]


@pytest.fixture
def full_cluster() -> Iterator[None]:
    """Start a Ray whose every CPU is held by an actor, as by workers."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)

    @ray.remote(num_cpus=2)
    class Holder:
        def here(self) -> bool:
            return True

    holder = Holder.remote()
    assert ray.get(holder.here.remote(), timeout=30)
    yield
    ray.shutdown()


@pytest.mark.parametrize(
    ("cache_mb", "transform", "racing_steps"),
    [(0, None, 60), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((64, None, 8), (0, noisy, 60)))],
    ids=["read", "kept", "transform"],
)
@pytest.mark.usefixtures("full_cluster")
def test_streamed_batches_are_those_read_directly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_mb: int, transform: object, racing_steps: int
) -> None:
    # Also what would be read directly.
    monkeypatch.setattr(reader, "lags", lambda waited_s, passed_s: True)
    write_data(tmp_path, rows=3000, group=50)
    seen = parquet_source(tmp_path)
    line = SampleOrder(seen.unit_rows, shards=6, batch_size=60, seed=3, epochs=12)
    rows = RowReader(source=seen, sample_order=line, seed=3, transform=transform, block_rows=16)  # type: ignore[arg-type]
    streams: list[Stream] = []

    def stream(*args: object, **named: object) -> Stream:
        roots = [str(TASKS), str(TASKS.parents[1])]
        streams.append(Stream(*args, **named, node=ray.get_runtime_context().get_node_id(), roots=roots))  # type: ignore[arg-type]
        return streams[-1]

    feeds = [
        Batches(
            rows,
            shards=(1, 4),
            first_step=2,
            microbatches=2,
            collate=lambda table: table.to_pydict(),
            cache=UnitCache(rows, cache_mb),
            make_stream=make_stream,
        )
        for make_stream in (None, stream)
    ]
    with feeds[0], feeds[1]:
        for step in range(2, line.steps):
            expected, got = (feed.get(step, 60).shards for feed in feeds)
            assert got == expected
            if step < racing_steps:
                # The reader and the stream are about equally fast: each overtakes the other.
                time.sleep(0.02)
            elif step == racing_steps:
                # From here on the stream is ahead, however slow the machine is: what follows must come from it.
                until = time.monotonic() + 60
                while not (streams and streams[0].ended):
                    assert time.monotonic() < until, "the stream has not read everything in 60 s"
                    time.sleep(0.01)
    assert feeds[1].streamed_reads > feeds[1].direct_reads


MEASURE = """
import functools, sys, ray
from raytrain_plus.data.reading.transform_block import RowReader
from raytrain_plus.data.order.sample_order import SampleOrder
from raytrain_plus.data.reading.reader import Batches
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.data.reading.stream import Stream
from raytrain_plus.data.reading.unit_cache import UnitCache
ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False,
         object_store_memory=300 << 20)
seen = parquet_source(sys.argv[1])
line = SampleOrder(seen.unit_rows, shards=2, batch_size=512, seed=0, epochs=1)
rows = RowReader(source=seen, sample_order=line, seed=0, transform=None, block_rows=1024)
stream = functools.partial(Stream, node=ray.get_runtime_context().get_node_id(), roots=[])
feed = Batches(rows, shards=(0, 1), first_step=0, microbatches=1, collate=lambda t: t.column("x").to_numpy().sum(),
               cache=UnitCache(rows, 0), make_stream=stream)
total = peak = 0
import time
with feed:
    for step in range(line.steps):
        total += sum(int(mb.batch) for mbs in feed.get(step, 60).shards.values() for mb in mbs)
        time.sleep(0.01)
        # The worker's own memory: what it shares with the object store is bounded there.
        peak = max(peak, *(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")), 0)
print(total, peak // 1024, feed.streamed_reads, feed.direct_reads)
"""


@pytest.mark.slow
def test_a_workers_memory_does_not_grow_with_the_dataset(tmp_path: Path) -> None:
    used = {}
    for files in (4, 32):
        folder = tmp_path / str(files)
        folder.mkdir()
        rows = 20_000
        for number in range(files):
            values = np.arange(number * rows, (number + 1) * rows)
            blob = pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(600), rows, [None, pa.py_buffer(np.random.default_rng(number).bytes(600 * rows))]
            )
            pq.write_table(pa.table({"x": values, "blob": blob}), folder / f"{number}.parquet", row_group_size=2500)
        done = subprocess.run([sys.executable, "-c", MEASURE, str(folder)], capture_output=True, text=True, timeout=170)
        assert done.returncode == 0, done.stderr
        total, megabytes, streamed, direct = map(int, done.stdout.split())
        assert total == sum(range(files * rows))
        used[files] = megabytes
        print(f"{files * 12} MB: worker {megabytes} MB at most, {streamed} reads streamed, {direct} direct")
        assert streamed > direct or files == 4
    assert used[32] < used[4] + 60
