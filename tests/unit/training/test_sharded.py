"""A sharded optimizer has the bits of a whole one: with any number of workers, any owners, and deaths at any moment."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.membership.pieces import assign
from raytrain_plus.state.stages import everything
from raytrain_plus.training.model.precision import Precision
from raytrain_plus.training.model.randomness import make_deterministic
from raytrain_plus.training.weights.step_options import PLAIN, Technique
from tests.unit.training.sharded import (
    HOLDERS,
    SHARDS,
    STEPS,
    Layered,
    Sharded,
    build,
    differing,
    joined,
    metrics_of,
    whole,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def deterministic() -> None:
    make_deterministic()


TECHNIQUES = {
    "plain": PLAIN,
    "masters and averages": Technique(Precision("bf16-params", CPU), decay=0.9),
    "fp16": Technique(Precision("fp16", CPU)),
    "clamped": Technique(clip_value=0.02),
}


FULL = pytest.mark.parametrize("full", [False, True], ids=["optimizer", "full"])
# Weights in pieces take several times as long, and so does float16: most of them are for the slow tests.
DEATHS = [
    pytest.param(
        technique,
        seed,
        full,
        id=f"{seed}-{name}-{'full' if full else 'optimizer'}",
        marks=() if seed == 0 and (not full or name == "plain") else pytest.mark.slow,
    )
    for name, technique in TECHNIQUES.items()
    for full in (False, True)
    for seed in range(4)
]


@FULL
@pytest.mark.parametrize("technique", TECHNIQUES.values(), ids=TECHNIQUES)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_any_number_of_workers_has_the_bits_of_one(technique: Technique, size: int, full: bool) -> None:
    expected, metrics = whole(technique, full)
    group = Sharded(technique, full=full)
    for _ in range(size):
        group.join()
    group.form(size)
    for _ in range(STEPS):
        found = group.step(False, random.Random(0), None)
    assert differing(joined([one.state for one in group.members.values()]), expected) == [], group.told
    assert found == metrics
    owned = [one.state.trained.owned for one in group.members.values()]
    assert all(one != group.members["w0"].state.trained.rows for one in owned) == (size > HOLDERS)


def test_rows_come_with_their_newest_values_from_those_who_have_changed_them() -> None:
    """A worker that takes over takes each row from a holder, whose other weights may be those of an earlier step."""
    group = Sharded(PLAIN)
    for _ in range(3):
        group.join()
    group.form(3)
    group.step(False, random.Random(0), None)
    states = {name: steps.state for name, steps in group.members.items()}
    expected = joined([*states.values()])
    for state in states.values():
        snapshot = state.snapshot()
        state.adopt(snapshot, spread=False)
        assert not state.complete
        for name, value in state.trained.weights:
            own = {id(parameter) for parameter in state.trained.parameters_of(name)}
            kept = [(one, one.detach().clone()) for _, one in state.named if id(one) in own]
            value.detach().fill_(torch.nan)
            for one, values in kept:
                one.detach().copy_(values)
    heir = group.make().state
    trained = heir.trained
    given = assign(trained.rows, {name: state.trained.owned for name, state in states.items()}, trained.row_bytes)
    assert len(given) > 1
    parts = [
        states[name].snapshot(everything if number == 0 else set().__contains__, rows, with_values=True)
        for number, (name, rows) in enumerate(given.items())
    ]
    heir.adopt(heir.joined(parts), spread=False)
    assert differing(joined([heir]), expected) == []
    assert heir.complete, "it has all rows itself"


@pytest.mark.parametrize(("technique", "seed", "full"), DEATHS)
def test_deaths_and_newcomers_at_any_moment_change_no_bit(technique: Technique, seed: int, full: bool) -> None:
    expected, _ = whole(technique, full)
    draw = random.Random(seed)
    group = Sharded(technique, full=full)
    for _ in range(4):
        group.join()
    while not group.ended:
        incomplete = group.form(max(3, len(group.members), draw.randint(3, 6)))
        # At least the first group, which makes more calls than these, loses a worker.
        kills = not group.deaths or draw.random() < 0.6
        group.step(incomplete, draw, draw.randrange(150 if group.deaths else 30) if kills else None)
    assert differing(joined([one.state for one in group.members.values()]), expected) == [], group.told
    assert group.deaths, "somebody died"
    assert not group.moved, "survivors go on with what they hold"


def test_evaluate_may_change_its_batch_although_it_begins_and_ends_at_different_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = build(full=True)
    rows = steps.state.trained.rows
    steps.state.begin_with(rows)
    steps.state.share_rows([rows])
    expected = metrics_of(steps, SoloWorld(), range(SHARDS))

    def takes(self: Layered, model: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        y = batch.pop("y")
        return {"loss": F.cross_entropy(model(batch.pop("x")), y)}

    monkeypatch.setattr(Layered, "evaluate", takes)
    assert metrics_of(steps, SoloWorld(), range(SHARDS)) == expected
