"""Experts: the pace of their layers beside the same by hand on Gloo, and a sparse beside a dense model.

`pace`: each process holds the same slices of the experts in three ways, which take turns: here with the whole step of
the platform (keys, header, norms, checks); in a bare loop that sums outputs and gradients of replicated tokens; and in
one that divides the tokens, and sends each to its expert's process and back (all-to-all).

`curves`: byte GPTs of equal computation for each byte, with eight experts and with one network, some seeds each.

python -m tests.benchmarks.experts pace [--ranks 2] [--rounds 9] [--steps 5] [--width 256] [--depth 4]
python -m tests.benchmarks.experts curves [--seeds 3] [--steps 400] [--width 64] [--depth 2]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Checkpoint, Data, Evaluate, Job, Task, Workers, run
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.collective.torch_world import TorchWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.layers import Experts
from raytrain_plus.layers.expert_networks import sorted_places
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.parallel.tensor.link import Link
from raytrain_plus.parallel.tensor.slicing import Slicing
from raytrain_plus.storage.folders.local import LocalFolder
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.model.model import build_chunks
from raytrain_plus.training.passes.stage import replica_stage
from raytrain_plus.training.passes.synchronous import Synchronous
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from tests.benchmarks.overlap import GIVEN, LIMIT_S, invitation, invitations, told_by
from tests.benchmarks.slices import in_turn

LENGTH, ROWS, BYTES, COUNT = 128, 8, 256, 8
CPU = torch.device("cpu")


class Residual(nn.Module):
    """Experts after a norm, with a residual connection."""

    def __init__(self, width: int, top_k: int) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(width), Experts(width, 2 * width, COUNT, top_k=top_k)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.experts(self.norm(x))
        return found


class Sparse(Task):
    """Predicts a byte from the one before it, by a chain of experts."""

    def __init__(self, width: int, depth: int, top_k: int) -> None:
        self.width, self.depth, self.top_k = width, depth, top_k

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        blocks = {f"block{number}": lambda: Residual(self.width, self.top_k) for number in range(self.depth)}
        head = lambda: nn.Linear(self.width, BYTES, bias=False)  # noqa: E731
        return {"embed": lambda: nn.Embedding(BYTES, self.width), **blocks, "head": head}

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([value for _, value in parameters], lr=1e-4)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def ours(task: Sparse, rank: int, ranks: int, world: TorchWorld, batch: torch.Tensor) -> Callable[[], float]:
    """Return what makes a step here, and returns its loss."""
    link = Link(rank, ranks)
    built = build_chunks(task, 0, CPU, [list(task.layers())], Slicing({}, ranks, link, experts=True))
    state = TrainState(task, built, Summing(1), seed=0, link=link)
    steps = SynchronousSteps(state, replica_stage(Synchronous, state, world, schedule="1f1b", stages=1))
    control = Control()
    control.begin(0)
    context = StepContext(world=SoloWorld(), control=control, wait_s=LIMIT_S)
    batches = {0: [Microbatch(batch if rank == 0 else None, len(batch))]}
    return lambda: float(steps.run(steps.begun + 1, batches, context).loss)


class _Summed(torch.autograd.Function):
    """The sum over processes; each has the gradient."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient


class _Entered(torch.autograd.Function):
    """The same in every process; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Summed.apply(gradient.contiguous())


class _Exchanged(torch.autograd.Function):
    """Rows sent to the processes, and those received from them."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.sizes = sent, received
        found = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(found, rows.contiguous(), received, sent)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        sent, received = ctx.sizes
        return _Exchanged.apply(gradient, received, sent), None, None


class _Own(torch.autograd.Function):
    """This process's part of some rows; its gradients are gathered."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        return given.chunk(dist.get_world_size())[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _gathered(gradient)


class _All(torch.autograd.Function):
    """The rows of all processes; each takes its own gradients."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor) -> torch.Tensor:
        return _gathered(own)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.chunk(dist.get_world_size())[dist.get_rank()].contiguous()


def _gathered(own: torch.Tensor) -> torch.Tensor:
    found = own.new_empty(dist.get_world_size() * len(own), *own.shape[1:])
    dist.all_gather_single(found, own.contiguous())
    return found


def replicated(model: Experts, x: torch.Tensor) -> torch.Tensor:
    """Compute the tokens of the own experts, and sum."""
    tokens, each = x.reshape(-1, x.shape[-1]), model.networks.num_experts
    routing = model.router(tokens)
    own = routing.experts - dist.get_rank() * each
    own = own.masked_fill((own < 0) | (own >= each), each)
    part = model.networks(_Entered.apply(tokens), own, _Entered.apply(routing.weights))
    found: torch.Tensor = _Summed.apply(part)
    return found.view(x.shape)


def sent(model: Experts, x: torch.Tensor) -> torch.Tensor:
    """Route the own tokens, send each to its expert's process and back, and gather."""
    each, ranks = model.networks.num_experts, dist.get_world_size()
    tokens = _Own.apply(x.reshape(-1, x.shape[-1]))
    routing = model.router(tokens)
    k = routing.experts.shape[1]
    places, ends = sorted_places(routing.experts, COUNT)
    loads = ends.diff(prepend=ends.new_zeros(1)).long()
    theirs = torch.empty_like(loads)
    dist.all_to_all_single(theirs, loads)
    away, come = (one.view(ranks, each).sum(1).tolist() for one in (loads, theirs))
    rows = _Exchanged.apply(tokens[places // k], away, come)
    kinds = torch.arange(each).repeat(ranks).repeat_interleave(theirs).unsqueeze(1)
    made = model.networks(rows, kinds, torch.ones(len(rows), 1))
    back = _Exchanged.apply(made, come, away) * routing.weights.reshape(-1)[places].unsqueeze(1)
    found = torch.zeros_like(tokens).index_add(0, places // k, back)
    whole: torch.Tensor = _All.apply(found)
    return whole.view(x.shape)


def bare(task: Sparse, rank: int, ranks: int, way: Callable[..., Any], batch: torch.Tensor) -> Callable[[], float]:
    """Return what makes a step in a loop by hand, and returns its loss."""
    [built] = build_chunks(task, 0, CPU, [list(task.layers())])
    model = built.module.train()
    routers = []
    for one in list(model.modules()):
        if isinstance(one, Experts):
            for name, value in list(one.networks.named_parameters()):
                own = value.detach().chunk(ranks)[rank].clone()
                setattr(one.networks, name, nn.Parameter(own))
            one.networks.num_experts = COUNT // ranks
            one.forward = lambda x, one=one: way(one, x)  # type: ignore[method-assign,misc]
            routers.append(one.router)
    optimizer = task.optimizer(model.named_parameters())

    def step() -> float:
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        for router in routers:
            if way is sent:
                dist.all_reduce(router.weight.grad)
                dist.all_reduce(router.tally)
            router.end_step()
        optimizer.step()
        return float(loss.detach())

    return step


def member(rank: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of a step in each way, one number a round, and the first losses."""
    ranks = options.ranks
    task = Sparse(options.width, options.depth, options.top_k)
    batch = torch.randint(0, BYTES, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    world = TorchWorld(invitation(**json.loads(os.environ[GIVEN])))
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{options.port}", rank=rank, world_size=ranks)
    ways = {
        "ours": ours(task, rank, ranks, world, batch),
        "replicated": bare(task, rank, ranks, replicated, batch),
        "all-to-all": bare(task, rank, ranks, sent, batch),
    }
    found = {f"loss {name}": [step() for _ in range(3)] for name, step in ways.items()}
    found |= in_turn(ways, options.rounds, options.steps)
    world.close()
    dist.destroy_process_group()
    return found


def pace(options: argparse.Namespace) -> None:
    """Print the pace of all ways."""
    command = [sys.executable, "-m", "tests.benchmarks.experts", *sys.argv[1:]]
    with ExitStack() as stack:
        given = invitations(stack, "tensor_rank", Shape(1, 1, options.ranks))
        told = told_by(stack, [*command, "--rank"], list(given.values()))
    parameters = options.depth * COUNT * 6 * options.width**2 / 1e6
    print(
        f"{options.depth} layers of {COUNT} experts of width {options.width} ({parameters:.1f} M parameters), top "
        f"{options.top_k}, {options.ranks} processes"
    )
    names = ("ours", "replicated", "all-to-all")
    rounds = {name: [max(one[name][at] for one in told) for at in range(options.rounds)] for name in names}
    for name, seconds in rounds.items():
        losses = ", ".join(f"{loss:.6f}" for loss in told[0][f"loss {name}"])
        print(f"  {name:10} {1000 * statistics.median(seconds):7.1f} ms a step; first losses {losses}")
    best = min(names[1:], key=lambda name: statistics.median(rounds[name]))
    ratio = statistics.median(other / own for own, other in zip(rounds["ours"], rounds[best], strict=True))
    print(f"  steps/s of ours to {best}, median of {options.rounds} rounds: {ratio:.3f}; wanted >= 0.97: ", end="")
    print("met" if ratio >= 0.97 else "NOT MET")


def curves(options: argparse.Namespace) -> None:
    """Print the held-out losses of sparse and dense models."""
    found: dict[str, list[dict[int, float]]] = {"8 experts, top 1": [], "one network": []}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            for (name, seen), count in zip(found.items(), (8, 0), strict=True):
                seen.append(curve(Path(folder), f"{count}-{seed}", count, seed, options))
                print(f"  {name}, seed {seed}: {seen[-1]}", flush=True)
    steps = sorted(found["one network"][0])
    print("held-out loss in nats a byte, mean over seeds (each seed at the end)")
    for name, seen in found.items():
        means = ", ".join(f"{step + 1}: {statistics.mean(one[step] for one in seen):.3f}" for step in steps)
        print(f"  {name}: {means} ({', '.join(f'{one[steps[-1]]:.3f}' for one in seen)})")
    pairs = zip(*found.values(), strict=True)
    gains = [dense[steps[-1]] - sparse[steps[-1]] for sparse, dense in pairs]
    print(f"  sparse below dense by {statistics.mean(gains):.3f}; wanted >= 0.03: ", end="")
    print("met" if statistics.mean(gains) >= 0.03 else "NOT MET")


def curve(folder: Path, name: str, count: int, seed: int, options: argparse.Namespace) -> dict[int, float]:
    """Return the held-out losses of one run by step."""
    job = Job(
        name=name,
        task="examples.moe_gpt:MoEGPT",
        args={"count": count, "depth": options.depth, "width": options.width},
        seed=seed,
        data=Data(path="data/byte_gpt/train", prepare="examples.moe_gpt:prepare", batch_size=32, shards=2),
        steps=options.steps,
        clip_norm=1.0,
        workers=Workers(min=1),
        evaluate=Evaluate(path="data/byte_gpt/held_out", every_steps=max(1, options.steps // 4)),
        checkpoint=Checkpoint(every_steps=None, every_s=None),
        storage=str(folder / "runs"),
    )
    result = run(job)
    if result.status != "finished":
        raise RuntimeError(f"{name} ended as {result.status}")
    events = read_events(LocalFolder(folder / "runs" / name))
    return {one["step"]: one["metrics"]["loss"] for one in events if one["kind"] == "evaluated"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pace", "curves"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="pace: of each way in a round (5); curves: of a run (400)")
    parser.add_argument("--width", type=int, help="pace: 256; curves: 64")
    parser.add_argument("--depth", type=int, help="pace: 4; curves: 2")
    parser.add_argument("--top-k", type=int, default=1)
    parser.add_argument("--port", type=int, default=29613, help="for torch's own group")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.steps = options.steps or (5 if options.what == "pace" else 400)
    options.width = options.width or (256 if options.what == "pace" else 64)
    options.depth = options.depth or (4 if options.what == "pace" else 2)
    if options.rank is not None:
        torch.set_num_threads(1)
        print(json.dumps(member(options.rank, options)))
    elif options.what == "pace":
        pace(options)
    else:
        curves(options)


if __name__ == "__main__":
    main()
