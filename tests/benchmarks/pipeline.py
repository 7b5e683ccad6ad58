"""A replica's step beside the ideal makespan of its schedule, and beside torch.distributed.pipelining driven by hand.

Driven by hand, a stage may begin its next step before the others have ended this one. Clipping by the norm over all
stages prevents that, so it is measured too. Steps of pipedream overlap: the figure is a quarter of four steps that are
committed together; torch has no such schedule.

Each layer computes little and then sleeps, as if a device computed, so that the stages of one small machine do not wait
for its cores: `--pad` seconds in the forward pass, for its input's gradient, and for its weights' gradients.

python -m tests.benchmarks.pipeline [--rounds 3] [--schedules 1f1b ...] [--pad 0.05]
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.nn import functional as F

from raytrain_plus import Task
from raytrain_plus.collective.invitation import Invitation
from raytrain_plus.collective.rendezvous import RendezvousServer
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.collective.torch_world import TorchWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.job.settings import Schedule
from raytrain_plus.parallel.pipeline.layout import chunk_stages, schedule_fault
from raytrain_plus.parallel.pipeline.schedule import orders
from raytrain_plus.parallel.pipeline.timeline import Cost, bubble, makespan, simulate
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.model.model import build_chunks
from raytrain_plus.training.passes.pipedream import PipeDream
from raytrain_plus.training.passes.stage import replica_stage
from raytrain_plus.training.passes.synchronous import Synchronous
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.step.window import OverlappingSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.step_options import Technique
from tests.benchmarks.loop import credentials_for, own_credentials

REPOSITORY = Path(__file__).parents[2]
SHAPES = ((2, 4), (2, 8), (2, 16), (4, 16))
"""Stages, and microbatches in the schedule."""
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zero-bubble", "pipedream")
WIDTH, ROWS, STEPS, WARM_UP = 32, 4, 4, 1
LIMIT_S = 300.0
CPU = torch.device("cpu")


class Pause(torch.autograd.Function):
    """The identity, which sleeps in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Padded(nn.Module):
    """A layer with given seconds for the forward pass, its input's gradient, and its weights' gradients."""

    def __init__(self, pad_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.pad_s = pad_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = Pause.apply(self.weight, 0.0, self.pad_s)
        return Pause.apply(torch.tanh(F.linear(x, weight)), self.pad_s, self.pad_s) + 0.0  # type: ignore[no-any-return]


class Deep(Task):
    """A model of `depth` layers."""

    def __init__(self, depth: int, pad_s: float) -> None:
        self.depth, self.pad_s = depth, pad_s

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return {str(number): lambda: Padded(self.pad_s) for number in range(self.depth)}

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()


def ours(rank: int, stages: int, port: int, schedule: Schedule, microbatches: int, pad_s: float) -> list[float]:
    """Return the seconds of each step of one stage."""
    where = chunk_stages(schedule, stages)
    task = Deep(len(where), pad_s)
    built = build_chunks(task, 0, CPU, [[str(chunk)] for chunk, stage in enumerate(where) if stage == rank])
    state = TrainState(task, built, Summing(1), seed=0, technique=Technique(clip_norm=1.0))
    world = TorchWorld(
        Invitation(
            generation=0,
            name="pipeline",
            rank=rank,
            size=stages,
            address="127.0.0.1",
            server=("127.0.0.1", port),
            timeout_s=LIMIT_S,
            credentials=own_credentials(),
        )
    )
    control = Control()
    control.begin(0)
    context = StepContext(world=SoloWorld(), control=control, wait_s=LIMIT_S)
    batches = {0: [Microbatch(torch.randn(ROWS, WIDTH) if rank == 0 else None, ROWS) for _ in range(microbatches)]}
    if schedule == "pipedream":
        passes = replica_stage(PipeDream, state, world, schedule=schedule, stages=stages)
        overlapping = OverlappingSteps(state, passes, every=STEPS, counted=lambda step: batches)
        found = timed(
            lambda number: overlapping.make(range(number * STEPS, (number + 1) * STEPS), lambda step: batches, context),
            1,
        )
        return [seconds / STEPS for seconds in found]
    steps = SynchronousSteps(state, replica_stage(Synchronous, state, world, schedule=schedule, stages=stages))
    return timed(lambda step: steps.run(step, batches, context))


def by_hand(
    rank: int, stages: int, port: int, schedule: Schedule, microbatches: int, pad_s: float, *, clips: bool
) -> list[float]:
    """Return the same for torch alone; `clips`: whether it clips by the norm over all stages."""
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=stages, timeout=timedelta(seconds=LIMIT_S)
    )
    where = chunk_stages(schedule, stages)
    like = torch.zeros(ROWS, WIDTH)
    made = []
    for chunk, stage in enumerate(where):
        if stage == rank:
            layers = nn.Sequential(OrderedDict({str(chunk): Padded(pad_s)}))
            inputs = like.clone().requires_grad_(chunk > 0)
            outputs = like.clone().requires_grad_(True)
            made.append(pipelining.PipelineStage(layers, chunk, len(where), CPU, inputs, outputs))
    kinds: dict[str, Any] = {
        "gpipe": pipelining.ScheduleGPipe,
        "1f1b": pipelining.Schedule1F1B,
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zero-bubble": pipelining.ScheduleZBVZeroBubble,
    }
    single = schedule in ("gpipe", "1f1b")
    running = kinds[schedule](
        made[0] if single else made, microbatches, loss_fn=lambda output, target: output.square().mean()
    )
    parameters = [value for one in made for value in one.submod.parameters()]
    optimizer = torch.optim.AdamW(parameters)
    batch, target = torch.randn(ROWS * microbatches, WIDTH), torch.zeros(ROWS * microbatches, WIDTH)
    first, last = where[0] == rank, where[-1] == rank

    def step(number: int) -> None:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        running.step(*((batch,) if first else ()), target=target if last else None, losses=losses if last else None)
        if clips:
            squares = nn.utils.get_total_norm([value.grad for value in parameters if value.grad is not None]).square()
            dist.all_reduce(squares)
            nn.utils.clip_grads_with_norm_(parameters, 1.0, squares.sqrt())
        optimizer.step()

    found = timed(step)
    dist.destroy_process_group()
    return found


def timed(step: Callable[[int], Any], times: int = STEPS) -> list[float]:
    """Return the seconds of each step but the first."""
    found = []
    for number in range(WARM_UP + times):
        start = time.perf_counter()
        step(number)
        found.append(time.perf_counter() - start)
    return found[WARM_UP:]


def ideal(schedule: Schedule, stages: int, microbatches: int, pad_s: float) -> tuple[float, float]:
    """Return makespan and bubble of one step of the schedule."""
    together = STEPS if schedule == "pipedream" else 1
    count = len(chunk_stages(schedule, stages))
    # The first chunk's input needs no gradient: all its backward work is that of its weights.
    costs = [Cost(pad_s, pad_s, pad_s)] * count
    if schedule == "zero-bubble":
        costs[0] = Cost(pad_s, 0.0, 2 * pad_s)
    bars = simulate(orders(schedule, stages, microbatches * together), costs)
    return makespan(bars) / together, bubble(bars, stages)


def measured(kind: str, schedule: Schedule, stages: int, microbatches: int, pad_s: float) -> float:
    """Return the median seconds of a step in its slowest stage."""
    server = RendezvousServer("127.0.0.1", size=stages, peers=["127.0.0.1"])
    port = server.start()
    if kind != "ours":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.benchmarks.pipeline", "--stage", kind]
    processes = [
        subprocess.Popen(
            [*command, *map(str, (rank, stages, port, schedule, microbatches, pad_s))],
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=credentials_for(server, rank),
        )
        for rank in range(stages)
    ]
    try:
        told = [json.loads(process.communicate(timeout=LIMIT_S)[0].splitlines()[-1]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
        server.close()
    return statistics.median(max(step) for step in zip(*told, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, choices=SCHEDULES)
    parser.add_argument("--pad", type=float, default=0.05, help="seconds of each part of a layer")
    parser.add_argument("--stage", nargs=7, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        kind, rank, stages, port, schedule, microbatches, pad = options.stage
        torch.set_num_threads(1)
        act = ours if kind == "ours" else partial(by_hand, clips=kind == "clipped")
        print(json.dumps(act(int(rank), int(stages), int(port), schedule, int(microbatches), float(pad))))
        return
    print(
        f"medians of {options.rounds} interleaved rounds of {STEPS} steps; layers padded to {options.pad * 1000:g} ms"
    )
    print(
        f"{'schedule':<13}{'stages':>7}{'microb.':>8}{'ideal':>9}{'bubble':>8}{'ours':>9}{'of ideal':>9}{'by hand':>9}"
        f"{'clipped':>9}"
    )
    for schedule in options.schedules:
        for stages, microbatches in SHAPES:
            if schedule_fault(schedule, stages, microbatches):
                continue
            best, idle = ideal(schedule, stages, microbatches, options.pad)
            found: dict[str, list[float]] = {"ours": []}
            if schedule != "pipedream":
                found |= {"by_hand": [], "clipped": []}
            for _ in range(options.rounds):
                for kind, times in found.items():
                    times.append(measured(kind, schedule, stages, microbatches, options.pad))
            mine = statistics.median(found["ours"])
            theirs = "".join(f"{statistics.median(times):>7.3f} s" for kind, times in found.items() if kind != "ours")
            print(
                f"{schedule:<13}{stages:>7}{microbatches:>8}{best:>7.3f} s{idle:>9.1%}{mine:>7.3f} s{mine / best:>9.3f}"
                f"{theirs}",
                flush=True,
            )


if __name__ == "__main__":
    main()
