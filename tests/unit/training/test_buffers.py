"""Buffers after a step are a function of its shards, not of the workers that hosted them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raytrain_plus import Task
from raytrain_plus.errors import TaskError, TrainingError
from raytrain_plus.parallel.step_modules import StepModule
from raytrain_plus.training.weights.buffers import Buffers


class Ruled(Task):
    def __init__(self, **rules: str) -> None:
        self.rules = rules

    def buffer_rule(self, name: str) -> object:  # type: ignore[override]
        return self.rules.get(name)


class Holder(StepModule):
    summed_buffers = ("tally",)

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("first", torch.zeros(1))
        self.register_buffer("fixed", torch.ones(1))
        self.register_buffer("mask", torch.tensor([1e-20, -torch.inf]))
        self.register_buffer("added", torch.tensor([100, 2**40]))
        self.register_buffer("tally", torch.tensor(0))
        self.register_buffer("last", torch.tensor(0))
        self.factor = 0.0

    def begin_step(self, loss_factor: float) -> None:
        self.factor = loss_factor

    def end_step(self) -> None:
        self.last.copy_(self.tally)
        self.tally.zero_()


RULES = Ruled(first="first", fixed="refuse", added="sum")
ROWS = [2, 2, 4]


def step(hosted: list[list[int]], exact_shards: int | None = None) -> list[dict[str, torch.Tensor]]:
    """Return each worker's buffers after a step in which every shard leaves its own values."""
    holders = [Holder() for _ in hosted]
    all_buffers = [Buffers(holder, RULES, exact_shards) for holder in holders]
    flat = []
    for holder, buffers, shards in zip(holders, all_buffers, hosted, strict=True):
        buffers.begin_step({"mean": -30}, loss_factor=4.0)
        assert holder.factor == 4
        for shard in shards:
            buffers.restore()
            assert holder.mean.sum() == 0
            holder.mean += torch.tensor([1.0, 10.0]) * (shard + 1)
            holder.count += shard + 5
            holder.first += shard + 1
            holder.added += torch.tensor([shard, 2**40])
            holder.tally += 1
            holder.tally += shard
            assert holder.mask[1] == -torch.inf
            buffers.end_shard(shard, ROWS[shard])
        flat.append(list(buffers.to_reduce()))
    for parts in zip(*flat, strict=True):
        together = torch.stack([vector for vector, _, _ in parts])
        reduced = together.sum(dim=0) if parts[0][2] == "sum" else together.amax(dim=0)
        for vector, _, _ in parts:
            vector.copy_(reduced)
    for buffers in all_buffers:
        assert buffers.exact is None or buffers.exact.read().settled
        buffers.commit(sum(ROWS))
    return [{name: value.clone() for name, value in holder.named_buffers()} for holder in holders]


@pytest.mark.parametrize("exact_shards", [None, 3])
@pytest.mark.parametrize("hosted", [[[0, 1, 2]], [[0, 1], [2]], [[2], [0], [1]]])
def test_mean_max_and_first_rules_over_shards(hosted: list[list[int]], exact_shards: int | None) -> None:
    for buffers in step(hosted, exact_shards):
        expected = sum(rows * (shard + 1) for shard, rows in enumerate(ROWS)) / sum(ROWS)
        assert torch.equal(buffers["mean"], torch.tensor([expected, 10 * expected]))
        assert torch.equal(buffers["mask"], torch.tensor([1e-20, -torch.inf]))
        assert (int(buffers["count"]), float(buffers["first"]), float(buffers["fixed"])) == (7, 1.0, 1.0)
        # What shards have added, not what they have left.
        assert buffers["added"].tolist() == [103, 2**42]
        assert (int(buffers["tally"]), int(buffers["last"])) == (0, 6)


def test_what_a_module_changes_at_the_end_of_a_step_is_committed() -> None:
    holder = Holder()
    buffers = Buffers(holder, RULES)
    buffers.begin_step({})
    holder.tally += 3
    buffers.end_shard(0, 2)
    buffers.commit(2)
    assert int(buffers.committed["last"]) == 3
    holder.last += 1
    buffers.restore()
    assert int(holder.last) == 3


def test_restore_undoes_the_changes_of_an_aborted_step() -> None:
    holder = Holder()
    buffers = Buffers(holder, RULES)
    holder.mean += 3
    holder.count += 3
    buffers.restore()
    assert (float(holder.mean.sum()), int(holder.count)) == (0.0, 0)
    assert float(buffers.committed["mean"].sum()) == 0.0


def test_a_change_of_a_buffer_with_rule_refuse_is_an_error() -> None:
    holder = Holder()
    buffers = Buffers(holder, RULES)
    buffers.begin_step({})
    holder.fixed += 1
    buffers.end_shard(0, 2)
    with pytest.raises(TrainingError, match="'fixed' changed in a forward pass"):
        buffers.check_refused()
    buffers.begin_step({})
    holder.fixed -= 1
    buffers.end_shard(0, 2)
    buffers.check_refused()


@pytest.mark.parametrize(("name", "rule"), [("mean", "max"), ("count", "mean"), ("mean", "sum")])
def test_rules_that_do_not_fit_the_dtype_are_rejected(name: str, rule: str) -> None:
    with pytest.raises(TaskError, match=rf"buffer_rule\('{name}'\) returned '{rule}'"):
        Buffers(Holder(), Ruled(**{name: rule}))


def test_a_sum_of_a_module_of_ours_keeps_its_rule() -> None:
    """A task that says `first` for all buffers means those of its own."""
    holder = Holder()
    buffers = Buffers(holder, Ruled(**{name: "first" for name, _ in holder.named_buffers()}))
    buffers.begin_step({})
    for shard in range(3):
        buffers.restore()
        holder.tally += 1
        buffers.end_shard(shard, 2)
    buffers.commit(6)
    assert int(holder.last) == 3


def test_a_module_with_methods_of_these_names_hears_nothing() -> None:
    class Own(nn.Module):
        def begin_step(self) -> None:
            raise AssertionError

        def end_step(self) -> None:
            raise AssertionError

    buffers = Buffers(Own(), RULES)
    buffers.begin_step({})
    buffers.commit(1)


def test_the_sums_of_a_model_without_buffers_are_on_its_device() -> None:
    # They are joined with those of other parts.
    assert Buffers(nn.Linear(2, 2), RULES, device=torch.device("meta")).own().device.type == "meta"
