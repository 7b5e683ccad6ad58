"""Thirty settings of a user's own train and evaluate as a plain loop does, on any workers, some of which die."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.state.named import named_state, state_sha256
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.model.randomness import make_deterministic
from raytrain_plus.training.passes.evaluation import evaluate
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.step_options import Technique
from tests.integration.plain_settings import LOOPS, Beside
from tests.unit.training.group import Group, context

SHARDS, ROWS, STEPS, SEED = 8, 6, 8, 5
CPU = torch.device("cpu")


def microbatches(step: int, shard: int, count: int) -> list[Microbatch]:
    """Return the rows of a shard in a step, in so many microbatches."""
    draw = torch.Generator().manual_seed(100 * step + shard)
    y = torch.randint(0, 3, (ROWS,), generator=draw)
    rows = {"x": torch.randn(ROWS, 6, generator=draw) + y[:, None], "y": y}
    each = ROWS // count
    parts = [{name: value[at : at + each] for name, value in rows.items()} for at in range(0, ROWS, each)]
    return [Microbatch(one, each, start=step * ROWS + at, ids=step) for at, one in enumerate(parts)]


def batches_of(setting: str, step: int, hosted: Sequence[int]) -> dict[int, list[Microbatch]]:
    return {shard: microbatches(step, shard, LOOPS[setting].microbatches) for shard in hosted}


def steps_of(setting: str, exact: bool) -> SynchronousSteps:
    task = Beside(setting)
    built = [build_model(task, SEED, CPU)]
    technique = Technique(clip_value=LOOPS[setting].clip_value, clip_norm=LOOPS[setting].clip_norm)
    return whole_steps(TrainState(task, built, Summing(SHARDS, exact=exact), seed=SEED, technique=technique))


def result_of(model: nn.Module, setting: str, one: Microbatch) -> tuple[torch.Tensor, float]:
    found = LOOPS[setting].loss(model, one.batch)
    return (found["loss"], float(found.get("weight", one.rows))) if isinstance(found, dict) else (found, one.rows)


def plain_loop(setting: str) -> tuple[list[float], float, dict[str, torch.Tensor]]:
    """Return losses of steps, held-out loss and state of a loop that accumulates gradients by their weights."""
    loop, model = LOOPS[setting], build_model(Beside(setting), SEED, CPU).module
    built = {name: one.training for name, one in model.named_modules()}
    trained = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    optimizer = loop.optimizer(trained, model)
    scheduler, losses = loop.scheduler(optimizer), []
    for step in range(STEPS):
        sums: dict[str, torch.Tensor] = {}
        total = mean = 0.0
        for one in (one for shard in range(SHARDS) for one in microbatches(step, shard, loop.microbatches)):
            loss, weight = result_of(model, setting, one)
            if not weight:
                continue
            optimizer.zero_grad()
            loss.backward()
            for name, value in trained:
                if value.grad is not None:
                    sums[name] = sums.get(name, 0) + weight * value.grad
            total, mean = total + weight, mean + weight * float(loss.detach())
        for name, value in trained:
            value.grad = sums[name] / total if name in sums else None
        if loop.clip_value is not None:
            nn.utils.clip_grad_value_([value for _, value in trained], loop.clip_value)
        if loop.clip_norm is not None:
            nn.utils.clip_grad_norm_([value for _, value in trained], loop.clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(mean / total)
    model.eval()
    with torch.no_grad():
        given = [result_of(model, setting, one) for shard in range(SHARDS) for one in microbatches(99, shard, 1)]
    held_out = sum(float(loss) * weight for loss, weight in given if weight) / sum(weight for _, weight in given)
    for name, one in model.named_modules():
        one.training = built[name]
    return losses, held_out, {name: value.detach() for name, value in model.state_dict().items()}


def sha(state: TrainState) -> str:
    return state_sha256(named_state(state.module, state.optimizer, state.named))


@pytest.mark.parametrize("setting", LOOPS)
def test_a_setting_trains_as_a_plain_loop_and_to_one_hash_on_any_workers(setting: str) -> None:
    make_deterministic()
    losses, held_out, weights = plain_loop(setting)
    assert losses[-1] < losses[0]
    for exact in (False, True):
        one = steps_of(setting, exact)
        for step in range(STEPS):
            applied = one.run(step, batches_of(setting, step, range(SHARDS)), context(SoloWorld()))
            assert applied.loss == pytest.approx(losses[step], rel=1e-5)
        for name, value in one.state.module.state_dict().items():
            torch.testing.assert_close(value, weights[name], rtol=1e-4, atol=1e-5)
        found = evaluate(
            one.state,
            one.passes,
            lambda shard: microbatches(99, shard, 1),
            range(SHARDS),
            context(SoloWorld()),
            shards=SHARDS,
            step=0,
        )
        assert found["loss"] == pytest.approx(held_out, rel=1e-5)
    group = Group(lambda: steps_of(setting, True), lambda step, hosted: batches_of(setting, step, hosted), SHARDS)
    group.train(STEPS, random.Random(setting))
    assert {sha(state) for state in group.states if state.last_applied == STEPS - 1} == {sha(one.state)}


def test_there_are_at_least_thirty() -> None:
    assert len(LOOPS) >= 30
