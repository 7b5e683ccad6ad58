"""Skipped rows have no part in a step, on any number of workers, and the step says which they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.ledger.ledger import NOTE, SKIPPED
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import TrainingError
from raytrain_plus.state.named import named_state, state_sha256
from raytrain_plus.task import Task
from raytrain_plus.training.exchange.applied import Applied
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.step_options import Technique
from tests.support.stages import Ring, RingWorld
from tests.unit.parallel.pipeline.replicas import COMPUTES, at_once
from tests.unit.training.group import context

SHARDS = 4


class Normed(Task):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.1)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Any:
        assert len(batch)
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        return {"loss": loss, "metrics": {"mean": float(batch.mean())}}


def microbatches(step: int, shard: int, gone: Mapping[int, tuple[int, ...]]) -> list[Microbatch]:
    """Two microbatches of three rows, without the rows at some places in the shard's part."""
    values = torch.randn(6, 3, generator=torch.Generator().manual_seed(100 * step + shard))
    found = []
    for begin in (0, 3):
        lost = [place for place in gone.get(shard, ()) if begin <= place < begin + 3]
        kept = [place for place in range(begin, begin + 3) if place not in lost]
        skipped = {6 * step + place: "bad" for place in lost}
        batch = values[kept] if kept else None
        found.append(Microbatch(batch, len(kept), 6 * step + begin, sum(kept), skipped))
    return found


def steps_of(
    exact: bool, rank: int, ring: Ring | None, gone: Mapping[int, tuple[int, ...]]
) -> tuple[str, list[Applied]]:
    """Return the hash of a member's last state, and its steps. The first of two members has the shards 0 and 1."""
    device = torch.device("cpu")
    task = Normed()
    with COMPUTES:
        state = TrainState(
            task,
            [build_model(task, 3, device)],
            Summing(SHARDS, exact=exact),
            seed=3,
            technique=Technique(clip_norm=1.0),
        )
    world: Any = SoloWorld() if ring is None else RingWorld(rank, ring)
    hosted = range(SHARDS) if ring is None else range(2 * rank, 2 * rank + 2)
    one = whole_steps(state)
    made = [
        one.run(step, {shard: microbatches(step, shard, gone) for shard in hosted}, context(world)) for step in range(3)
    ]
    state.restore_buffers()
    return state_sha256(named_state(state.module, state.optimizer, state.named)), made


GONE = {0: (0, 1, 2, 3, 4, 5), 1: (0, 1, 2, 3, 4, 5), 2: (0, 1, 2), 3: (4,)}
"""The first of two members has no row."""


@pytest.mark.parametrize("exact", [False, True])
def test_all_members_know_which_rows_were_skipped(exact: bool) -> None:
    expected, steps = steps_of(exact, 0, None, GONE)
    for made in steps:
        notes = np.frombuffer(made.notes, NOTE)
        assert notes["rows"].tolist() == notes["weight"].tolist() == [0, 0, 3, 5]
        assert notes["skipped"].tolist() == [6, 6, 3, 1]
        places = [(shard, place) for shard, lost in GONE.items() for place in lost]
        assert np.frombuffer(made.skipped_rows, SKIPPED).tolist() == places
        assert made.rows == 8
    assert [np.frombuffer(made.notes, NOTE)["start"].tolist() for made in steps] == [
        [6 * step] * 4 for step in range(3)
    ]
    ring = Ring(2)
    members = at_once(lambda rank: steps_of(exact, rank, ring, GONE), range(2))
    for found, others in members:
        assert [one.skipped_rows for one in others] == [one.skipped_rows for one in steps]
        assert [one.notes for one in others] == [one.notes for one in steps]
        assert [one.metrics.keys() for one in others] == [{"mean"}] * 3
        if exact:
            assert found == expected


def test_a_step_without_rows_is_an_error() -> None:
    gone = dict.fromkeys(range(SHARDS), tuple(range(6)))
    with pytest.raises(TrainingError, match=r"skip leaves no row in any shard of step 0.*correct the rows.*: bad"):
        steps_of(False, 0, None, gone)


def test_nothing_changes_if_no_row_is_skipped() -> None:
    _, steps = steps_of(False, 0, None, {})
    assert [one.skipped_rows for one in steps] == [b""] * 3
