"""A step of a transformer whose layers are cut into slices, beside torch's `parallelize_module` on Gloo.

Each process holds the same slices both ways: here with the whole step of the platform (keys, header, norms, checks),
there in a bare loop of forward pass, backward pass and optimizer. A third way divides positions between slices
(`sequence_parallel`), and a worker keeps less for the backward pass. They take turns, and start together.

python -m tests.benchmarks.slices [--ranks 2] [--rounds 9] [--steps 5] [--width 256] [--depth 4]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.collective.torch_world import TorchWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.parallel.tensor.link import Link
from raytrain_plus.parallel.tensor.slicing import Slicing
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.model.model import build_chunks
from raytrain_plus.training.passes.stage import replica_stage
from raytrain_plus.training.passes.synchronous import Synchronous
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.trial.footprint import kept_bytes
from tests.benchmarks.overlap import GIVEN, LIMIT_S, invitation, invitations, told_by

HEAD_DIM, LENGTH, ROWS, BYTES = 32, 128, 8, 256
CPU = torch.device("cpu")


class Block(nn.Module):
    """Attention and a network, each after a norm and with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.mix, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (one(y).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for one in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(-2))
        found: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return found


class Blocks(Task):
    """Predicts a byte from those before it, by a chain of blocks; `divided`: norms compute some positions each."""

    def __init__(self, width: int, depth: int, *, divided: bool = False) -> None:
        self.width, self.depth, self.divided = width, depth, divided

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        blocks = {f"block{number}": lambda: Block(self.width) for number in range(self.depth)}
        return {
            "embed": lambda: nn.Embedding(BYTES, self.width),
            **blocks,
            "head": lambda: nn.Linear(self.width, BYTES, bias=False),
        }

    def tensor(self) -> dict[str, str]:
        plan = dict.fromkeys(("block*.q", "block*.k", "block*.v", "block*.up", "head"), "colwise")
        plan |= {"block*.mix": "rowwise", "block*.down": "rowwise", "embed": "vocab"}
        return plan | (dict.fromkeys(("block*.norm1", "block*.norm2"), "sequence_parallel") if self.divided else {})

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([value for _, value in parameters], lr=1e-4)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def ours(
    task: Blocks, rank: int, ranks: int, world: TorchWorld, batch: torch.Tensor
) -> tuple[Callable[[], float], Callable[[], object]]:
    """Return what makes a step here, and returns its loss; and what makes its forward pass alone."""
    link = Link(rank, ranks)
    built = build_chunks(task, 0, CPU, [list(task.layers())], Slicing(task.tensor(), ranks, link))
    state = TrainState(task, built, Summing(1), seed=0, link=link)
    steps = SynchronousSteps(state, replica_stage(Synchronous, state, world, schedule="1f1b", stages=1))
    control = Control()
    control.begin(0)
    context = StepContext(world=SoloWorld(), control=control, wait_s=LIMIT_S)
    batches = {0: [Microbatch(batch if rank == 0 else None, len(batch))]}

    def step() -> float:
        return float(steps.run(steps.begun + 1, batches, context).loss)

    return step, lambda: task.loss(built[0].module, batch)


def bare(task: Blocks, ranks: int, batch: torch.Tensor) -> Callable[[], float]:
    """Return what makes a step with torch's own parallel modules, and returns its loss."""
    [built] = build_chunks(task, 0, CPU, [list(task.layers())])
    model = built.module.train()
    plan: dict[str, Any] = {}
    for number in range(task.depth):
        plan |= {f"block{number}.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
        plan |= {f"block{number}.{name}": RowwiseParallel() for name in ("mix", "down")}
    plan["embed"] = RowwiseParallel(input_layouts=Replicate())
    plan["head"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
    optimizer = task.optimizer(model.named_parameters())

    def step() -> float:
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.detach())

    return step


def in_turn(ways: Mapping[str, Callable[[], float]], rounds: int, steps: int) -> dict[str, list[float]]:
    """Return the seconds of a step of each way, one number a round; all processes take the ways in the same turn."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        order = list(ways) if number % 2 else list(ways)[::-1]
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                ways[name]()
            found[name].append((time.perf_counter() - start) / steps)
    return found


def member(rank: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of a step both ways, one number a round, and the first losses."""
    ranks = options.ranks
    task, divided = Blocks(options.width, options.depth), Blocks(options.width, options.depth, divided=True)
    batch = torch.randint(0, BYTES, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    world = TorchWorld(invitation(**json.loads(os.environ[GIVEN])))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{options.port}", rank=rank, world_size=ranks)
    own = {"ours": ours(task, rank, ranks, world, batch), "divided": ours(divided, rank, ranks, world, batch)}
    ways = {**{name: step for name, (step, _) in own.items()}, "torch": bare(task, ranks, batch)}
    found = {f"loss {name}": [step() for _ in range(3)] for name, step in ways.items()}
    found |= {f"kept {name}": [kept_bytes(forward)] for name, (_, forward) in own.items()}
    found |= in_turn(ways, options.rounds, options.steps)
    world.close()
    dist.destroy_process_group()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="of each way in a round")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--port", type=int, default=29611, help="for torch's own group")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        torch.set_num_threads(1)
        print(json.dumps(member(options.rank, options)))
        return
    command = [sys.executable, "-m", "tests.benchmarks.slices", *sys.argv[1:]]
    with ExitStack() as stack:
        given = invitations(stack, "tensor_rank", Shape(1, 1, options.ranks))
        told = told_by(stack, [*command, "--rank"], list(given.values()))
    parameters = options.depth * 12 * options.width**2 / 1e6
    print(f"{options.depth} blocks of width {options.width} ({parameters:.1f} M parameters), {options.ranks} processes")
    names = ("ours", "divided", "torch")
    rounds = {name: [max(one[name][at] for one in told) for at in range(options.rounds)] for name in names}
    for name, seconds in rounds.items():
        losses = ", ".join(f"{loss:.6f}" for loss in told[0][f"loss {name}"])
        kept = max(one.get(f"kept {name}", [0])[0] for one in told) / 2**20
        said = f"keeps {kept:.1f} MiB on a worker for the backward pass; " if kept else ""
        print(f"  {name:8} {1000 * statistics.median(seconds):7.1f} ms a step; {said}first losses {losses}")
    ratios = [other / own for own, other in zip(rounds["ours"], rounds["torch"], strict=True)]
    ratio = statistics.median(ratios)
    print(f"  steps/s of ours to torch's, median of {options.rounds} rounds: {ratio:.3f}; wanted >= 0.97: ", end="")
    print("met" if ratio >= 0.97 else "NOT MET")


if __name__ == "__main__":
    main()
