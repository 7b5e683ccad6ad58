"""Simulate workers in one process that share a state: their tasks, and a controller's rules for who has which rows."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import Interrupted
from raytrain_plus.membership.owners import balanced, kept
from raytrain_plus.membership.pieces import union
from raytrain_plus.membership.view import host_shards
from raytrain_plus.state.named import state_sha256
from raytrain_plus.state.stages import everything
from raytrain_plus.state.transfer import hashed, undigested, with_rows
from raytrain_plus.training.model.model import build_layers, build_model
from raytrain_plus.training.passes.evaluation import evaluate
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.shardable import Division
from raytrain_plus.training.weights.step_options import PLAIN, Technique
from tests.unit.training.group import GroupWorld, Killed, Round, context

SHARDS, STEPS, HOLDERS = 6, 6, 2
SUMMING = Summing(SHARDS, exact=True, bucket_bytes=300)


class Net(nn.Module):
    """BatchNorm, a scalar weight, an empty one, one without a gradient, a frozen one, a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.tied = nn.Linear(16, 16)
        self.last = nn.Linear(16, 3)
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        x = self.tied(torch.tanh(self.tied(x))) + self.frozen(x)
        found: torch.Tensor = self.last(F.dropout(x, 0.1, self.training)) * self.scale
        return found


class Small(Task):
    """Two groups of parameters, a scheduler, row weights, and a frozen weight that is not saved."""

    def model(self) -> nn.Module:
        return Net()

    def rebuilt(self) -> Sequence[str]:
        return ["frozen.weight"]

    def optimizer(self, parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        decayed = [value for name, value in parameters if value.dim() > 1]
        others = [value for name, value in parameters if value.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.02)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"loss": F.cross_entropy(model(batch["x"]), batch["y"]), "weight": float(1 + batch["y"].sum())}

    def evaluate(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"loss": F.cross_entropy(model(batch["x"]), batch["y"])}


class First(nn.Module):
    """A layer with BatchNorm, and weights that are empty, a number, and never used."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.linear(x))) * self.scale


class Middle(nn.Module):
    """A layer with dropout and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.linear(torch.tanh(x)), 0.1, self.training) + self.frozen(x)


class Layered(Small):
    """The same in layers, two of which are tied, and one of which has no weight."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        last = {"last": lambda: nn.Linear(16, 3)}
        return {"first": First, "middle": Middle, "tanh": nn.Tanh, "again": Middle, **last}

    def rebuilt(self) -> Sequence[str]:
        return ["again.*"]

    def tied(self) -> dict[str, str]:
        return {"again.linear.weight": "middle.linear.weight"}


def batches(step: int, hosted: Sequence[int]) -> dict[int, list[Microbatch]]:
    made = {}
    for shard in hosted:
        draw = torch.Generator().manual_seed(1000 * step + shard)
        batch = {"x": torch.randn(4, 6, generator=draw), "y": torch.randint(0, 3, (4,), generator=draw)}
        made[shard] = [Microbatch(batch, 4, start=4 * step, ids=1000 * step + shard)]
    return made


def build(technique: Technique = PLAIN, undivided: Sequence[str] = (), *, full: bool = False) -> SynchronousSteps:
    """Return the steps of a worker whose state, or also whose weights, are in pieces, on the technique's device."""
    task, device = (Layered() if full else Small()), technique.precision.device
    state = TrainState(
        task,
        () if full else [build_model(task, 3, device)],
        SUMMING,
        seed=3,
        technique=replace(technique, clip_norm=0.5),
        division=Division(frozenset(undivided), {}),
        rebuild=(lambda: build_layers(task, 3, device)) if full else None,
    )
    return whole_steps(state)


def whole(technique: Technique, full: bool) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return the state and the metrics of one worker that holds everything all the time; `full`: of `Layered`."""
    task, device = (Layered() if full else Small()), technique.precision.device
    state = TrainState(
        task, [build_model(task, 3, device)], SUMMING, seed=3, technique=replace(technique, clip_norm=0.5)
    )
    steps = whole_steps(state)
    for step in range(STEPS):
        steps.run(step, batches(step, range(SHARDS)), context(SoloWorld()))
    return joined([steps.state]), metrics_of(steps, SoloWorld(), range(SHARDS))


def metrics_of(steps: SynchronousSteps, world: Any, hosted: Sequence[int]) -> dict[str, float]:
    def held_out(shard: int) -> list[Microbatch]:
        return batches(99, [shard])[shard]

    return evaluate(steps.state, steps.passes, held_out, hosted, context(world), shards=SHARDS, step=0)


def joined(states: Sequence[TrainState]) -> dict[str, torch.Tensor]:
    """Return the tensors of the state that these workers hold together, over which its hash is computed."""
    parts = [undigested(0, state.holding(), everything) for state in states]
    return hashed(with_rows(parts, list(states[0].trained.rows)))


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the tensors that are not the same bits."""
    hashes = [{name: state_sha256({name: value}) for name, value in one.items()} for one in (found, expected)]
    return sorted(name for name in found.keys() | expected.keys() if hashes[0].get(name) != hashes[1].get(name))


class Sharded:
    """Workers whose rows a controller's rules assign."""

    def __init__(self, technique: Technique, undivided: Sequence[str] = (), *, full: bool = False) -> None:
        self.make = lambda: build(technique, undivided, full=full)
        self.full = full
        self.members: dict[str, SynchronousSteps] = {}
        self.named = 0
        self.deaths = self.moved = 0
        self.broken = False
        self.told: list[str] = []
        """A line for each step: who died in it, and what the others had after it."""

    def join(self) -> str:
        name = f"w{self.named}"
        self.named += 1
        self.members[name] = self.make()
        return name

    @property
    def held(self) -> int:
        return max(steps.state.last_applied for steps in self.members.values() if steps.state.last_applied is not None)

    @property
    def ended(self) -> bool:
        """Whether all steps are made, and the members have all rows of the state together."""
        states = [steps.state for steps in self.members.values()]
        together = union(state.trained.owned for state in states)
        return self.held == STEPS - 1 and all(one.complete for one in states) and together == states[0].trained.rows

    def form(self, size: int) -> bool:
        """Form a group of this many workers; return whether members lack weights."""
        best = self.held
        able = [name for name, steps in self.members.items() if steps.state.last_applied == best]
        left = self.members[able[0]].state.trained.rows - union(self.members[one].state.trained.owned for one in able)
        if best >= 0 and left:
            # Both holders of some rows are dead: another run.
            self.members, self.broken, best = {}, False, -1
            able = [self.join()]
        while len(self.members) < size:
            self.join()
        state = self.members[able[0]].state
        rows, row_bytes = state.trained.rows, state.trained.row_bytes
        held = {name: self.members[name].state.trained.owned for name in able if best >= 0}
        members = [*self.members]
        decide = kept(rows, row_bytes, members, held) if self.broken else None
        owners = decide or balanced(
            rows, row_bytes, members, HOLDERS, dict.fromkeys(members, "n"), held, by_layer=self.full
        )
        whole_parts = {name: undigested(best, self.members[name].state.holding(), everything) for name in able}
        lacking = any(not self.members[name].state.complete for name in able)
        for name, steps in self.members.items():
            mine = steps.state
            mine.exchange = None
            if best < 0:
                # Masters that are no longer whole cannot be cut again.
                self.members[name] = self.make()
                self.members[name].state.begin_with(owners[name])
                continue
            if mine.last_applied == best and mine.trained.owned == owners[name]:
                continue
            self.moved += self.broken and name in able
            replicated = whole_parts[name if name in able else able[0]]
            mine.own(owners[name])
            mine.adopt(mine.joined([replicated, *whole_parts.values()]), spread=False)
        for steps in self.members.values():
            steps.state.share_rows(list(owners.values()))
        self.broken = False
        return lacking or any(not steps.state.complete for steps in self.members.values())

    def step(self, incomplete: bool, draw: random.Random, kill_after: int | None) -> dict[str, float]:
        """Make one step, in which a worker may die; return the metrics after it, if nobody has."""
        members = [*self.members]
        round_ = Round(len(members), draw, kill_after)
        hosted = host_shards(SHARDS, len(members))
        step, metrics, dead, failures = self.held + 1, dict[str, float](), list[str](), list[BaseException]()

        def run(rank: int, name: str) -> None:
            steps, world = self.members[name], GroupWorld(rank, round_)
            with round_.baton:
                try:
                    if incomplete:
                        steps.complete(context(world, wait_s=60))
                    if step < STEPS:
                        steps.run(step, batches(step, hosted[rank]), context(world, wait_s=60))
                        steps.complete(context(world, wait_s=60))
                    metrics.update(metrics_of(steps, world, hosted[rank]))
                except Interrupted:
                    self.broken = True
                except Killed:
                    self.broken = True
                    dead.append(name)
                except BaseException as error:
                    failures.append(error)
                    round_.broken = True

        threads = [threading.Thread(target=run, args=one) for one in enumerate(members)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a worker is stuck"
        if failures:
            raise failures[0]
        for name in dead:
            del self.members[name]
            self.deaths += 1
        # Others have applied a step of which these have all sums.
        newest = self.held
        squares = next((one.state.squares for one in self.members.values() if one.state.last_applied == newest), {})
        for one in self.members.values():
            if one.state.ready == newest and one.state.last_applied == newest - 1:
                one.state.finish(squares)
        left = {name: (one.state.last_applied, one.state.complete) for name, one in self.members.items()}
        self.told.append(f"step {step}, {incomplete=}: {dead} died after {kill_after} calls, then {left}")
        return metrics
