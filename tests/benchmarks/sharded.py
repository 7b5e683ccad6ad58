"""What `parallel.sharded` costs a step and saves in memory, beside torch's ZeroRedundancyOptimizer and FSDP2.

python -m tests.benchmarks.sharded [--workers 4] [--rounds 9]

All contestants make the same passes of one model in the same processes, in turn, on Gloo. Bytes are those of the
tensors that stay between steps: weights, gradients, and the optimizers' states.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from examples.byte_gpt import CONTEXT, ByteGPT
from raytrain_plus.collective.rendezvous import RendezvousServer
from raytrain_plus.collective.torch_world import TorchWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.job.task_loader import build_task
from raytrain_plus.membership.owners import balanced
from raytrain_plus.task import RunFacts
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.model.model import build_layers, build_model
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.shardable import divide
from raytrain_plus.training.weights.step_options import Technique
from tests.benchmarks.loop import credentials_for, formation

ROWS = 2
"""Rows of a worker in a step."""
WARM_UP = 2
LIMIT_S = 1500
CPU = torch.device("cpu")
ARGS = {"width": 512, "depth": 8, "heads": 8, "dropout": 0.0}
Step = Callable[[int], None]
OURS = {"none": 0, "optimizer, holders: 1": 1, "optimizer, holders: 2": 2, "full, holders: 1": 1, "full, holders: 2": 2}
"""Contestants, and their holders of each row."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--ports", type=int, nargs=2)
    given = parser.parse_args()
    if given.rank is not None:
        member(given.rank, given.workers, given.rounds, *given.ports)
        return
    server = RendezvousServer("127.0.0.1", given.workers, {"127.0.0.1"})
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "tests.benchmarks.sharded", "--workers", str(given.workers)]
    command += ["--rounds", str(given.rounds), "--ports", str(server.start()), str(store.port)]
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank)], env=credentials_for(server, rank))
        for rank in range(given.workers)
    ]
    try:
        codes = [one.wait(LIMIT_S) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
        server.close()
    sys.exit(max(codes))


def member(rank: int, size: int, rounds: int, port: int, store_port: int) -> None:
    """Take part as one rank; rank 0 prints the table."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    world = TorchWorld(formation(rank, size, port))
    held: dict[str, Callable[[], int]] = {}
    steps: dict[str, Step] = {}
    for name, holders in OURS.items():
        made = ours(holders, rank, size, full="full" in name)
        steps[name] = stepping(made, world, rank)
        held[name] = partial(bytes_of, made.state.optimizer, [part.module for part in made.state.parts])
    for name in ("DDP", "DDP, ZeroRedundancyOptimizer", "FSDP2"):
        steps[name], model, optimizer = theirs(name, rank)
        held[name] = partial(bytes_of, getattr(optimizer, "optim", optimizer), [model])
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    barriers = []
    for number in range(WARM_UP + rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step(number)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
        start = time.perf_counter()
        StepContext(world=world, control=begun(), wait_s=60).reduce(torch.zeros(1), "barrier", "a barrier")
        barriers.append(time.perf_counter() - start)
    found = [None] * size
    dist.all_gather_object(found, {name: count() for name, count in held.items()})
    if rank == 0:
        report(seconds, found, barriers, size)
    world.close()
    dist.destroy_process_group()


def report(seconds: dict[str, list[float]], held: list[Any], barriers: list[float], size: int) -> None:
    parameters = sum(value.numel() for value in build_model(task(), 3, CPU).module.parameters())
    medians = {name: statistics.median(taken[WARM_UP:]) for name, taken in seconds.items()}
    print(f"{parameters / 1e6:.1f} M parameters, {size} workers; one number over all workers: "
          f"{statistics.median(barriers) * 1e3:.1f} ms")  # fmt: skip
    print("| | ms a step | beside none | MB a worker, largest | bytes a parameter |")
    print("|---|---|---|---|---|")
    for name, median in medians.items():
        largest = max(one[name] for one in held)
        print(
            f"| {name} | {median * 1e3:.0f} | {median / medians['none']:.2f} "
            f"| {largest / 1e6:.1f} | {largest / parameters:.2f} |",
            flush=True,
        )


def task() -> ByteGPT:
    made = build_task(ByteGPT, ARGS, RunFacts(total_steps=10_000, batch_size=ROWS))
    assert isinstance(made, ByteGPT)
    return made


def begun() -> Control:
    control = Control()
    control.begin(0)
    return control


def ours(holders: int, rank: int, size: int, *, full: bool) -> SynchronousSteps:
    """Return the platform's steps, with so many holders of each row; 0: not sharded. `full`: weights too."""
    made = task()
    built = build_model(made, 3, CPU)
    named = list(built.module.named_parameters())
    state = TrainState(
        made,
        [built],
        Summing(size),
        seed=3,
        technique=Technique(clip_norm=1.0),
        division=divide(made, named) if holders else None,
        rebuild=(lambda: build_layers(made, 3, CPU)) if full else None,
    )
    if holders:
        names = [f"worker-{number}" for number in range(size)]
        trained = state.trained
        owners = balanced(trained.rows, trained.row_bytes, names, holders, dict.fromkeys(names, ""), {}, by_layer=full)
        state.begin_with(owners[names[rank]])
        state.share_rows(list(owners.values()))
    return whole_steps(state)


def stepping(steps: SynchronousSteps, world: TorchWorld, rank: int) -> Step:
    context = StepContext(world=world, control=begun(), wait_s=60)

    def step(number: int) -> None:
        batch = batch_of(number, rank)
        steps.run(number, {rank: [Microbatch(batch, ROWS, start=number * ROWS, ids=number)]}, context)
        steps.complete(context)

    return step


def theirs(name: str, rank: int) -> tuple[Step, nn.Module, torch.optim.Optimizer]:
    made = task()
    model = build_model(made, 3, CPU).module
    parallel = model
    if name == "FSDP2":
        # Each layer by itself, resharded after its forward pass, as ours.
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
    else:
        parallel = DistributedDataParallel(model)
    optimizer: torch.optim.Optimizer
    if "Zero" in name:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=2e-3, betas=(0.9, 0.95)
        )
    else:
        optimizer = made.optimizer(list(model.named_parameters()))

    def step(number: int) -> None:
        optimizer.zero_grad()
        loss: Any = made.loss(parallel, batch_of(number, rank))
        loss = loss["loss"] if isinstance(loss, dict) else loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss.item()

    return step, model, optimizer


def batch_of(number: int, rank: int) -> Any:
    draw = torch.Generator().manual_seed(1000 * number + rank)
    return {"bytes": torch.randint(0, 256, (ROWS, CONTEXT + 1), generator=draw)}


def bytes_of(optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module]) -> int:
    """Return the bytes of all tensors of a worker's training state, and of its gradients, that have memory now."""
    weights = [value for module in modules for value in module.parameters()]
    weights += [value for group in optimizer.param_groups for value in group["params"]]
    found = [*weights, *(value.grad for value in weights if value.grad is not None)]
    found += [value for state in optimizer.state.values() for value in state.values()]
    local = [
        value.to_local() if isinstance(value, DTensor) else value for value in found if isinstance(value, torch.Tensor)
    ]
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in local}
    return sum(storages.values())


if __name__ == "__main__":
    main()
