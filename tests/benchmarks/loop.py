"""One rank of the loops that the platform is measured against, as anybody would write them. Started by `steps`.

python -m tests.benchmarks.loop horovod|ddp JOB.yaml RANK PORT WARM_UP -> seconds per measured step, as JSON
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import pyarrow as pa
import torch
import torch.distributed as dist

from raytrain_plus.collective.formation import Formation
from raytrain_plus.collective.horovod import _environment
from raytrain_plus.data.granule import Rows
from raytrain_plus.data.of_job import line_of
from raytrain_plus.data.source import index
from raytrain_plus.jobfile import load_job
from raytrain_plus.taskfile import build_task, load_task


def main(kind: str, file: str, rank: int, port: int, warm_up: int) -> None:
    job, roots = load_job(file)
    torch.set_num_threads(1)
    assert isinstance(job.task, str)
    task = build_task(load_task(job.task, roots), job.args)
    batches = prepared(job, rank, task.collate)
    torch.manual_seed(job.seed)
    layers = task.layers()
    model = torch.nn.Sequential(*(build() for build in layers.values())) if layers else task.model()
    call: Any = model
    if kind == "horovod":
        import horovod.torch as hvd

        world = Formation(
            generation=0, name="bench", rank=rank, size=2, address="127.0.0.1", server=("127.0.0.1", port), timeout_s=30
        )
        os.environ.update(_environment(world))
        hvd.init()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer: Any = hvd.DistributedOptimizer(
            task.optimizer(list(model.named_parameters())), named_parameters=model.named_parameters()
        )
    else:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        call = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = task.optimizer(list(model.named_parameters()))
    start = 0.0
    for step, batch in enumerate(batches):
        if step == warm_up:
            start = time.perf_counter()
        optimizer.zero_grad()
        loss = task.loss(call, batch)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.backward()
        optimizer.step()
        loss.item()  # every loop, the platform too, knows its loss
    print(json.dumps((time.perf_counter() - start) / (len(batches) - warm_up)))


def prepared(job: Any, rank: int, collate: Any) -> list[Any]:
    """The batches of shard `rank`, collated beforehand: the rows that the platform gives to that worker."""
    seen = index(job.data.path)
    line = line_of(job, seen)
    rows = Rows(index=seen, line=line, seed=job.seed, transform=None, granule=1024)
    return [
        collate(pa.concat_tables([rows.read(piece) for piece in line.pieces(rank, step)])) for step in range(line.steps)
    ]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
