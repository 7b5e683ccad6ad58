"""An optimizer in the host's memory has the bits of one beside the weights, whole and in pieces."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.model.precision import Precision
from raytrain_plus.training.model.randomness import make_deterministic
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.step.step import SynchronousSteps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.step_options import PLAIN, Technique
from tests.unit.training.group import context
from tests.unit.training.sharded import (
    SHARDS,
    STEPS,
    SUMMING,
    Sharded,
    Small,
    batches,
    differing,
    joined,
    metrics_of,
    whole,
)

CPU = torch.device("cpu")
TECHNIQUES = {
    "plain": PLAIN,
    "masters and averages": Technique(Precision("bf16-params", CPU), decay=0.9),
    "fp16": Technique(Precision("fp16", CPU)),
    "clamped": Technique(clip_value=0.02),
}
EACH = pytest.mark.parametrize("technique", TECHNIQUES.values(), ids=TECHNIQUES)
FULL = pytest.mark.parametrize("full", [False, True], ids=["optimizer", "full"])


@pytest.fixture(autouse=True)
def deterministic() -> None:
    make_deterministic()


def made(technique: Technique, exact: bool = True) -> SynchronousSteps:
    task, summing = Small(), replace(SUMMING, exact=exact)
    return whole_steps(TrainState(task, [build_model(task, 3, CPU)], summing, seed=3, technique=technique))


def run(steps: SynchronousSteps) -> SynchronousSteps:
    for step in range(STEPS):
        steps.run(step, batches(step, range(SHARDS)), context(SoloWorld()))
    return steps


@EACH
@pytest.mark.parametrize("exact", [False, True], ids=["ring", "exact"])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_worker_alone_has_the_same_bits(technique: Technique, exact: bool, clip_norm: float | None) -> None:
    plain, offloaded = (
        run(made(replace(technique, clip_norm=clip_norm, offloads=one), exact=exact)) for one in (False, True)
    )
    assert differing(joined([offloaded.state]), joined([plain.state])) == []
    assert metrics_of(offloaded, SoloWorld(), range(SHARDS)) == metrics_of(plain, SoloWorld(), range(SHARDS))


def test_the_optimizer_has_memory_of_its_own() -> None:
    state = run(made(replace(PLAIN, offloads=True))).state
    weights, masters = dict(state.trained.weights), dict(state.named)
    assert weights.keys() == masters.keys()
    for name, master in masters.items():
        assert torch.equal(master, weights[name])
        assert not master.numel() or master.data_ptr() != weights[name].data_ptr()
    optimizer = state.optimizer
    assert optimizer is not None
    changed = {id(value) for group in optimizer.param_groups for value in group["params"]}
    assert changed == {id(value) for value in masters.values()}


@EACH
def test_a_state_moves_between_workers_with_and_without(technique: Technique) -> None:
    expected = joined([run(made(technique)).state])
    kinds = [replace(technique, offloads=step % 2 == 0) for step in range(STEPS)]
    steps = made(kinds[0])
    for step, kind in enumerate(kinds):
        before, steps = steps, made(kind)
        if step:
            steps.state.adopt(before.state.snapshot())
        steps.run(step, batches(step, range(SHARDS)), context(SoloWorld()))
    assert differing(joined([steps.state]), expected) == []


@FULL
@EACH
@pytest.mark.parametrize("size", [2, 3])
def test_workers_that_change_rows_of_their_own_have_the_same_bits(technique: Technique, size: int, full: bool) -> None:
    expected, metrics = whole(technique, full)
    group = Sharded(replace(technique, offloads=True), full=full)
    for _ in range(size):
        group.join()
    group.form(size)
    for _ in range(STEPS):
        found = group.step(False, random.Random(0), None)
    assert differing(joined([one.state for one in group.members.values()]), expected) == [], group.told
    assert found == metrics


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["optimizer", "full"])
@EACH
def test_deaths_and_newcomers_change_no_bit(technique: Technique, full: bool) -> None:
    expected, _ = whole(technique, full)
    draw, group = random.Random(5), Sharded(replace(technique, offloads=True), full=full)
    for _ in range(4):
        group.join()
    while not group.ended:
        incomplete = group.form(max(3, len(group.members), draw.randint(3, 5)))
        kills = not group.deaths or draw.random() < 0.6
        group.step(incomplete, draw, draw.randrange(150 if group.deaths else 30) if kills else None)
    assert differing(joined([one.state for one in group.members.values()]), expected) == [], group.told
    assert group.deaths, "somebody died"
