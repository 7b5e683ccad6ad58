"""Training is a function of the job, not of the cluster: equal losses on any number of workers and in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

from raytrain_plus import Data, Evaluate, Job, Parallel, Workers, run
from raytrain_plus.data.of_job import sample_order_of
from raytrain_plus.data.reading.transform_block import RowReader, without_ids
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.generators import set_random_key
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.training.model.randomness import random_key
from tests.integration.conftest import TASKS
from tests.integration.tasks import Net, noisy, write_data

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("cluster")]

STEPS = 50


def job(tmp_path: Path, **changes: Any) -> Job:
    settings: dict[str, Any] = {
        "name": "run",
        "task": "tasks:Net",
        "seed": 11,
        "data": Data(path=str(tmp_path / "data"), batch_size=48, shards=8, cache_mb=0),
        "steps": STEPS,
        "clip_norm": 1.0,
        "storage": str(tmp_path / "runs"),
    }
    return Job(**{**settings, **changes})


def losses(job: Job) -> list[float]:
    result = run(job, fresh=True, quiet=True, roots=[TASKS])
    assert result.status == "finished", result.error
    return [event["loss"] for event in read_events(LocalFolder(result.path)) if event["kind"] == "step_committed"]


def plain_losses(job: Job, transform: Any = None) -> list[float]:
    """Train with a plain loop, written from the documented rules alone."""
    task = Net(**job.args)
    seen = parquet_source(job.data.path)
    sample_order = sample_order_of(job, seen)
    rows = RowReader(
        source=seen, sample_order=sample_order, seed=job.seed, transform=transform, block_rows=job.data.granule
    )
    if task.named:
        model = nn.Sequential()
        for name, build in task.parts().items():
            set_random_key(random_key(job.seed, "init", name))
            model.add_module(name, build())
    else:
        set_random_key(random_key(job.seed, "init", ""))
        model = task.model()
    optimizer = task.optimizer(model.parameters())
    scheduler = task.scheduler(optimizer)
    told = []
    m = job.parallel.microbatches
    for step in range(sample_order.steps):
        before = {name: value.clone() for name, value in model.named_buffers()}
        means = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in before.items()}
        counted, total = 0, 0.0
        optimizer.zero_grad()
        for shard in range(job.data.shards):
            for name, value in model.named_buffers():
                value.copy_(before[name])
            table = pa.concat_tables([without_ids(rows.read(one)) for one in sample_order.row_ranges(shard, step)])
            size = sample_order.per_shard // m
            starts = [start for start in range(0, table.num_rows, size) if start == 0 or table.num_rows - start > 1]
            for number, start in enumerate(starts):
                end = [*starts, table.num_rows][number + 1]
                batch = task.collate(table.slice(start, end - start))
                x = batch["x"]
                if task.named or task.plain:
                    for name, layer in model.named_children():
                        set_random_key(random_key(job.seed, step, shard, number, name, 0))
                        x = layer(x)
                else:
                    set_random_key(random_key(job.seed, step, shard, number, "", 0))
                    x = model(x)
                loss = nn.functional.cross_entropy(x, batch["y"])
                (loss * len(x)).backward()
                total += loss.item() * len(x)
            counted += table.num_rows
            for name, value in model.named_buffers():
                means[name] += value.double() * table.num_rows
        for name, value in model.named_buffers():
            value.copy_(means[name] / counted)  # every shard counts its batches alike, so the mean is the maximum
        for parameter in model.parameters():
            parameter.grad /= counted
        nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        scheduler.step()
        told.append(total / counted)
    return told


@pytest.mark.parametrize(
    ("args", "sizes"),
    [
        ({}, (1, 3)),
        pytest.param({}, (2, 4), marks=pytest.mark.slow),
        pytest.param({"named": False}, (3,), marks=pytest.mark.slow),
        pytest.param({"named": False, "plain": True}, (3,), marks=pytest.mark.slow),
    ],
    ids=["layers", "layers, other sizes", "model", "sequence"],
)
def test_losses_are_those_of_a_plain_loop_for_any_number_of_workers(
    tmp_path: Path, args: dict[str, bool], sizes: Sequence[int]
) -> None:
    write_data(tmp_path / "data")
    base = job(tmp_path, args=args, parallel=Parallel(microbatches=2))
    expected = plain_losses(base)
    assert expected[-1] < 0.7 * expected[0]
    for workers in sizes:
        got = losses(replace(base, name=f"on-{workers}", workers=Workers(min=workers)))
        np.testing.assert_allclose(got, expected, rtol=1e-5, err_msg=f"{workers} workers")


@pytest.mark.slow
@pytest.mark.parametrize(("compression", "collective"), [("bf16", "horovod"), ("fp16", "torch")])
def test_gradients_in_16_bits_train_as_well(tmp_path: Path, compression: Any, collective: Any) -> None:
    write_data(tmp_path / "data")
    settings: dict[str, Any] = {"workers": Workers(min=3), "collective": collective}
    full = losses(job(tmp_path, **settings))
    half = losses(job(tmp_path, compression=compression, **settings))
    assert half != full
    assert half == pytest.approx(full, rel=0.02)


@pytest.mark.slow
def test_parameters_of_16_bits_and_complex_ones_train_on_horovods_ring(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    write_data(tmp_path / "held_out", rows=101, files=2, group=9, seed=1)
    found = []
    for workers, compression in ((1, "none"), (3, "fp16")):
        held_out = Evaluate(path=str(tmp_path / "held_out"), every_steps=STEPS)
        base = job(tmp_path, task="tasks:MixedDtypes", workers=Workers(min=workers), evaluate=held_out)
        result = run(replace(base, compression=compression), fresh=True, quiet=True, roots=[TASKS])  # type: ignore[arg-type]
        assert result.status == "finished", result.error
        found.append(dict(result.metrics))
    views = [event for event in read_events(LocalFolder(result.path)) if event["kind"] == "view_formed"]
    assert views[0]["collective"] == "horovod"
    assert found[1] == pytest.approx(found[0], rel=0.03)
    assert found[0]["imaginary"] > 0.05


@pytest.mark.slow
def test_torch_collective_short_last_step_and_augmentation(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=517)
    data = Data(path=str(tmp_path / "data"), batch_size=48, shards=8, transform="tasks:noisy", granule=7, cache_mb=0)
    base = job(tmp_path, data=data, steps=None, epochs=3, collective="torch", workers=Workers(min=3))
    got = losses(base)
    np.testing.assert_allclose(got, plain_losses(base, noisy), rtol=1e-5)
    events = list(read_events(LocalFolder(tmp_path / "runs" / "run")))
    assert sum(event["samples"] for event in events if event["kind"] == "step_committed") == 3 * 517
    assert next(event for event in events if event["kind"] == "view_formed")["collective"] == "torch"


@pytest.mark.slow
def test_evaluation_is_an_exact_mean_over_rows_whatever_the_workers(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    write_data(tmp_path / "held_out", rows=101, files=2, group=9, seed=1)
    figures = []
    for workers in (1, 3):
        held_out = Evaluate(path=str(tmp_path / "held_out"), every_steps=4)
        base = job(tmp_path, name=f"on-{workers}", steps=10, workers=Workers(min=workers), evaluate=held_out)
        result = run(base, fresh=True, quiet=True, roots=[TASKS])
        told = [event for event in read_events(LocalFolder(result.path)) if event["kind"] == "evaluated"]
        assert [event["step"] for event in told] == [-1, 3, 7, 9]
        figures.append([event["metrics"]["loss"] for event in told])
        assert result.metrics["loss"] == figures[-1][-1]
    # Before any step the state has the same bits everywhere, and so has the metric.
    assert figures[0][0] == figures[1][0]
    np.testing.assert_allclose(figures[0], figures[1], rtol=1e-5)
    task = Net()
    model = nn.Sequential()
    for name, build in task.parts().items():
        set_random_key(random_key(11, "init", name))
        model.add_module(name, build())
    model.eval()
    seen = parquet_source(tmp_path / "held_out")
    rows = RowReader(
        source=seen,
        sample_order=sample_order_of(
            replace(base, steps=None, epochs=1, data=replace(base.data, shuffle="none")), seen
        ),
        seed=0,
        transform=None,
        block_rows=8,
    )
    batch = task.collate(
        pa.concat_tables([without_ids(rows.read(one)) for one in rows.sample_order.row_ranges_between(0, 0, 1)])
    )
    assert batch["x"].shape == (1, 6)
    whole = pa.concat_tables(
        [
            without_ids(rows.read(one))
            for shard in range(8)
            for one in rows.sample_order.row_ranges_between(shard, 0, rows.sample_order.span(shard, 0)[1])
        ]
    )
    with torch.no_grad():
        expected = float(task.loss(model, task.collate(whole)))
    assert figures[0][0] == pytest.approx(expected, rel=1e-6)
