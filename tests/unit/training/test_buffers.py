"""Buffers after a step are a function of its shards, not of who hosted them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raytrain_plus import Task
from raytrain_plus.errors import TaskError, TrainingError
from raytrain_plus.training.buffers import Buffers


class Ruled(Task):
    def __init__(self, **rules: str) -> None:
        self.rules = rules

    def buffer_rule(self, name: str) -> object:  # type: ignore[override]
        return self.rules.get(name)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("first", torch.zeros(1))
        self.register_buffer("fixed", torch.ones(1))


RULES = Ruled(first="first", fixed="refuse")
ROWS = [2, 2, 4]


def step(hosted: list[list[int]]) -> list[dict[str, torch.Tensor]]:
    """The buffers of each worker after a step in which every shard leaves its own values."""
    holders = [Holder() for _ in hosted]
    all_buffers = [Buffers(holder, RULES) for holder in holders]
    flat = []
    for holder, buffers, shards in zip(holders, all_buffers, hosted, strict=True):
        buffers.begin_step()
        for shard in shards:
            buffers.restore()
            assert holder.mean.sum() == 0
            holder.mean += torch.tensor([1.0, 10.0]) * (shard + 1)
            holder.count += shard + 5
            holder.first += shard + 1
            buffers.end_shard(shard, ROWS[shard])
        flat.append(buffers.to_reduce())
    sums = torch.stack([entry[0] for entry in flat if entry[0] is not None]).sum(dim=0)
    maxima = torch.stack([entry[1] for entry in flat if entry[1] is not None]).amax(dim=0)
    for buffers in all_buffers:
        buffers.commit(sums, maxima, sum(ROWS))
    return [{name: value.clone() for name, value in holder.named_buffers()} for holder in holders]


@pytest.mark.parametrize("hosted", [[[0, 1, 2]], [[0, 1], [2]], [[2], [0], [1]]])
def test_means_are_weighted_by_rows_integers_take_the_largest_and_first_is_shard_0s(hosted: list[list[int]]) -> None:
    for buffers in step(hosted):
        expected = sum(rows * (shard + 1) for shard, rows in enumerate(ROWS)) / sum(ROWS)
        assert torch.equal(buffers["mean"], torch.tensor([expected, 10 * expected]))
        assert (int(buffers["count"]), float(buffers["first"]), float(buffers["fixed"])) == (7, 1.0, 1.0)


def test_restore_puts_back_what_a_step_that_was_left_has_changed() -> None:
    holder = Holder()
    buffers = Buffers(holder, RULES)
    holder.mean += 3
    holder.count += 3
    buffers.restore()
    assert (float(holder.mean.sum()), int(holder.count)) == (0.0, 0)
    assert float(buffers.committed["mean"].sum()) == 0.0


def test_a_refused_buffer_that_changes_is_named() -> None:
    holder = Holder()
    buffers = Buffers(holder, RULES)
    buffers.begin_step()
    holder.fixed += 1
    with pytest.raises(TrainingError, match="'fixed' changed in a forward pass"):
        buffers.end_shard(0, 2)


@pytest.mark.parametrize(("name", "rule"), [("mean", "max"), ("count", "mean")])
def test_rules_that_do_not_fit_are_refused(name: str, rule: str) -> None:
    with pytest.raises(TaskError, match=rf"buffer_rule\('{name}'\) says '{rule}'"):
        Buffers(Holder(), Ruled(**{name: rule}))
