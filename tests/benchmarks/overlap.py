"""How much of the gradient reduction a step of two replicas of two stages hides behind its passes.

Each layer sleeps, as if a device computed, and has a bucket of gradients of its own. `exposed` is the time that a step
waits for its sums after its own passes; `alone` is the time that the same sums take with nothing else to do. On the
same passes, a step that reduces after them cannot be shorter than both together.

python -m tests.benchmarks.overlap [--schedule 1f1b] [--steps 30] [--layers 4] [--width 1024] [--pad 0.02]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Task
from raytrain_plus.collective.invitation import Invitation
from raytrain_plus.collective.member_credentials import Credentials
from raytrain_plus.collective.rendezvous import RendezvousServer
from raytrain_plus.collective.torch_world import TorchWorld
from raytrain_plus.collective.world import wait
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.job.settings import Schedule
from raytrain_plus.membership.mesh import Axis, Shape
from raytrain_plus.parallel.pipeline.layout import chunk_stages
from raytrain_plus.training.exchange.applied import Applied
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
from tests.benchmarks.pipeline import Pause

REPOSITORY = Path(__file__).parents[2]
SHAPE = Shape(2, 2)
SHARDS, MICROBATCHES, ROWS, TOGETHER = 2, 4, 4, 5
LIMIT_S = 120.0
CPU = torch.device("cpu")
GIVEN = "BENCHMARK_INVITATIONS"


class Padded(nn.Module):
    """A layer that sleeps in its forward pass, and half as long for each kind of gradient."""

    def __init__(self, width: int, pad_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.pad_s = pad_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = Pause.apply(self.weight, 0.0, self.pad_s / 2)
        return Pause.apply(torch.tanh(F.linear(x, weight)), self.pad_s, self.pad_s / 2) + 0.0  # type: ignore[no-any-return]


class Deep(Task):
    """A chain of such layers."""

    def __init__(self, layers: int, width: int, pad_s: float) -> None:
        self.count, self.width, self.pad_s = layers, width, pad_s

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        return {str(number): lambda: Padded(self.width, self.pad_s) for number in range(self.count)}

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([value for _, value in parameters], lr=1e-3)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()


def stepping(
    schedule: Schedule, state: TrainState, replica: TorchWorld, batches: dict[int, list[Microbatch]], context: Any
) -> Callable[[range], list[Applied]]:
    """Return what makes steps of a stage."""
    if schedule == "pipedream":
        passes = replica_stage(PipeDream, state, replica, schedule=schedule, stages=SHAPE.stages)
        overlapping = OverlappingSteps(state, passes, every=TOGETHER, counted=lambda step: batches)
        return lambda steps: overlapping.make(steps, lambda step: batches, context)
    one = SynchronousSteps(state, replica_stage(Synchronous, state, replica, schedule=schedule, stages=SHAPE.stages))
    return lambda steps: [one.run(step, batches, context) for step in steps]


def member(seat: int, schedule: Schedule, layers: int, width: int, pad_s: float, steps: int) -> dict[str, float]:
    """Return the median seconds of a step, of its wait for the sums, and of the same sums alone."""
    place = SHAPE.place(seat)
    given = json.loads(os.environ[GIVEN])
    # One after the other, in the same order everywhere.
    ring, replica = (TorchWorld(invitation(**given[axis])) for axis in ("replica", "stage"))
    task = Deep(2 * layers, width, pad_s)
    where = chunk_stages(schedule, SHAPE.stages)
    size = 2 * layers // len(where)
    chunks = [
        [str(number) for number in range(chunk * size, (chunk + 1) * size)]
        for chunk, stage in enumerate(where)
        if stage == place.stage
    ]
    state = TrainState(task, build_chunks(task, 0, CPU, chunks), Summing(SHARDS), seed=0)
    control = Control()
    control.begin(0)
    context = StepContext(world=ring, control=control, wait_s=LIMIT_S)
    batch = torch.randn(ROWS, width) if place.stage == 0 else None
    batches = {place.replica: [Microbatch(batch, ROWS) for _ in range(MICROBATCHES)]}
    together = TOGETHER if schedule == "pipedream" else 1
    made = stepping(schedule, state, replica, batches, context)
    seconds, exposed, alone = [], [], []
    for first in range(0, steps, together):
        start = time.perf_counter()
        exposed += [one.reduce_s for one in made(range(first, first + together))]
        seconds += [(time.perf_counter() - start) / together] * together
    for step in range(steps):
        start = time.perf_counter()
        works = [ring.reduce(torch.zeros(width * width), f"alone{step}.{layer}") for layer in range(layers)]
        wait(works, "the sums alone", LIMIT_S)
        alone.append(time.perf_counter() - start)
    ring.close()
    replica.close()
    found = {"step": seconds, "exposed": exposed, "alone": alone}
    return {name: statistics.median(values[steps // 3 :]) for name, values in found.items()}


def invitation(server: list[Any], credentials: dict[str, Any], **fields: Any) -> Invitation:
    link_keys = tuple(credentials["link_keys"])
    return Invitation(server=(server[0], server[1]), credentials=Credentials(credentials["token"], link_keys), **fields)


def invitations(stack: ExitStack, axis: Axis, shape: Shape = SHAPE) -> dict[int, dict[str, Any]]:
    """Start a rendezvous for each line along an axis; return each seat's invitation."""
    found = {}
    for number, line in enumerate(shape.lines(axis)):
        server = RendezvousServer("127.0.0.1", size=len(line), peers=["127.0.0.1"])
        port = server.start()
        stack.callback(server.close)
        for rank, seat in enumerate(line):
            found[seat] = {
                "generation": 0,
                "name": f"{axis}{number}",
                "rank": rank,
                "size": len(line),
                "address": "127.0.0.1",
                "server": ["127.0.0.1", port],
                "timeout_s": LIMIT_S,
                "credentials": asdict(server.credentials(rank)),
            }
    return found


def told_by(stack: ExitStack, command: Sequence[str], given: Sequence[Any]) -> list[Any]:
    """Start a process for each of what is given, its number last in its command; return what each prints, as JSON."""
    processes = []
    for number, one in enumerate(given):
        process = subprocess.Popen(
            [*command, str(number)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, GIVEN: json.dumps(one)},
        )
        stack.callback(process.kill)
        processes.append(process)
    return [json.loads(process.communicate(timeout=LIMIT_S)[0].splitlines()[-1]) for process in processes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", choices=get_args(Schedule), default="1f1b")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=4, help="layers of a stage")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--pad", type=float, default=0.02, help="seconds of each pass of a layer")
    parser.add_argument("--seat", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seat is not None:
        torch.set_num_threads(1)
        given = options.schedule, options.layers, options.width, options.pad, options.steps
        print(json.dumps(member(options.seat, *given)))
        return
    command = [sys.executable, "-m", "tests.benchmarks.overlap", *sys.argv[1:]]
    with ExitStack() as stack:
        rings, replicas = invitations(stack, "replica"), invitations(stack, "stage")
        given = [{"replica": rings[seat], "stage": replicas[seat]} for seat in range(SHAPE.size)]
        told = told_by(stack, [*command, "--seat"], given)
    step, alone = (1000 * max(one[name] for one in told) for name in ("step", "alone"))
    # A stage that ends its passes before the others waits for these, too.
    exposed = 1000 * min(max(told[seat]["exposed"] for seat in ring) for ring in SHAPE.lines("replica"))
    of = f"{options.layers} layers of {options.width**2 * 4 >> 20} MiB each"
    print(f"two replicas of two stages, {options.schedule}, {of}")
    print(f"  step {step:.0f} ms; its sums take {alone:.1f} ms alone, and {exposed:.1f} ms after the passes:")
    print(f"  {max(0.0, 1 - exposed / alone):.0%} of the reduction is hidden")


if __name__ == "__main__":
    main()
