"""One rank of the plain loops that the platform is measured against. Started by `steps`.

python -m tests.benchmarks.loop horovod|ddp|plain|own JOB.yaml RANK SIZE PORT WARM_UP -> seconds per step, as JSON

With a WARM_UP of -1 it steps until it is killed. The loops accumulate the gradients of the shards that the rank would
host, one pass each, and reduce once; `plain` has one rank and reduces nothing. `own` is the platform's own loop without
Ray and controller.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist

from raytrain_plus.collective.horovod_world import HorovodWorld, _environment, load_horovod
from raytrain_plus.collective.invitation import Invitation
from raytrain_plus.collective.member_credentials import Credentials
from raytrain_plus.collective.rendezvous import RendezvousServer
from raytrain_plus.data.of_job import sample_order_of
from raytrain_plus.data.reading.reader import Batches
from raytrain_plus.data.reading.transform_block import RowReader, without_ids
from raytrain_plus.data.reading.unit_cache import UnitCache
from raytrain_plus.data.sources.parquet_source import parquet_source
from raytrain_plus.job.settings import Job
from raytrain_plus.job.task_loader import build_task, load_task
from raytrain_plus.job.yaml import load_job
from raytrain_plus.membership.view import host_shards
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.task import Task
from raytrain_plus.training.exchange.early_stop import Evaluations
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.step.loop import Companions, Span, StepTimeouts, train
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.workers.states.saver import Saver
from raytrain_plus.workers.states.state_copier import Copier

CREDENTIALS = "BENCHMARK_CREDENTIALS"


def main(kind: str, file: str, rank: int, size: int, port: int, warm_up: int) -> None:
    job, roots = load_job(file)
    torch.set_num_threads(1)
    assert isinstance(job.task, str)
    task = build_task(load_task(job.task, roots), job.args)
    if kind == "own":
        print(json.dumps(own(job, task, rank, size, port, warm_up)))
        return
    steps = prepared(job, host_shards(job.data.shards, size)[rank], task.collate)
    passes = len(steps[0])
    torch.manual_seed(job.seed)
    layers = task.layers()
    model = torch.nn.Sequential(*(build() for build in layers.values())) if layers else task.model()
    call: Any = model
    if kind == "horovod":
        import horovod.torch as hvd

        load_horovod()
        os.environ.update(_environment(formation(rank, size, port)))
        hvd.init()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer: Any = hvd.DistributedOptimizer(
            task.optimizer(list(model.named_parameters())),
            named_parameters=model.named_parameters(),
            backward_passes_per_step=passes,
        )
    elif kind == "plain":
        optimizer = task.optimizer(list(model.named_parameters()))
    else:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        call = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = task.optimizer(list(model.named_parameters()))
    start = 0.0
    for step, batches in enumerate(itertools.cycle(steps) if warm_up < 0 else steps):
        if step == warm_up:
            start = time.perf_counter()
        optimizer.zero_grad()
        total = 0.0
        for number, batch in enumerate(batches, 1):
            with call.no_sync() if kind == "ddp" and number < passes else nullcontext():
                loss = task.loss(call, batch)
                loss = loss[0] if isinstance(loss, tuple) else loss
                (loss / passes).backward()
            total += loss.item()  # Every loop reads its loss, as the platform does.
        optimizer.step()
    print(json.dumps((time.perf_counter() - start) / (len(steps) - warm_up)))


def formation(rank: int, size: int, port: int) -> Invitation:
    return Invitation(
        generation=0,
        name="bench",
        rank=rank,
        size=size,
        address="127.0.0.1",
        server=("127.0.0.1", port),
        timeout_s=30,
        credentials=own_credentials(),
    )


def credentials_for(server: RendezvousServer, rank: int) -> dict[str, str]:
    """Return the environment in which a rank finds its credentials."""
    return {**os.environ, CREDENTIALS: json.dumps(asdict(server.credentials(rank)))}


def own_credentials() -> Credentials:
    """Return what `credentials_for` left for this rank."""
    given = json.loads(os.environ[CREDENTIALS])
    return Credentials(given["token"], tuple(given["link_keys"]))


def own(job: Job, task: Task, rank: int, size: int, port: int, warm_up: int) -> float:
    """Return the seconds per step of the platform's own loop, alone."""
    device = torch.device("cpu")
    built = build_model(task, job.seed, device)
    state = TrainState(task, [built], Summing(job.data.shards, exact=job.reduction == "exact"), seed=job.seed)
    seen = parquet_source(job.data.path)
    sample_order = sample_order_of(job, seen)
    rows = RowReader(source=seen, sample_order=sample_order, seed=job.seed, transform=None, block_rows=1024)
    hosted = host_shards(job.data.shards, size)[rank]
    feed = Batches(
        rows,
        shards=hosted,
        first_step=0,
        microbatches=1,
        collate=task.collate,
        cache=UnitCache(rows, 1024),
        make_stream=None,
    )
    told: list[Any] = []
    control = Control()
    control.begin(0)
    load_horovod()
    world = HorovodWorld(formation(rank, size, port))
    with feed, tempfile.TemporaryDirectory() as folder:
        train(
            whole_steps(state),
            Span(first_step=0, end=sample_order.steps, hosted=hosted, shards=job.data.shards),
            (world, None),
            Companions(
                feed=feed,
                saving=Saver(LocalFolder(Path(folder)), state.holding, None, best=False),
                copying=Copier("alone", state.holding, 1),
                tell=told.append,
            ),
            evaluation=None,
            evaluations=Evaluations(None, {}),
            timeouts=StepTimeouts(step_s=60, first_step_s=60, wait_s=60),
            control=control,
        )
    return float((told[-1].time - told[warm_up - 1].time) / (len(told) - warm_up))


def prepared(job: Any, shards: Sequence[int], collate: Any) -> list[list[Any]]:
    """Return the batches of each step, one per shard, collated beforehand: the rows that the platform gives it."""
    seen = parquet_source(job.data.path)
    sample_order = sample_order_of(job, seen)
    rows = RowReader(source=seen, sample_order=sample_order, seed=job.seed, transform=None, block_rows=1024)
    return [
        [
            collate(pa.concat_tables([without_ids(rows.read(one)) for one in sample_order.row_ranges(shard, step)]))
            for shard in shards
        ]
        for step in range(sample_order.steps)
    ]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7]))
