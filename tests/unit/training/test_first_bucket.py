"""What travels with the first bucket arrives as it was written, whatever the bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raytrain_plus import Task
from raytrain_plus.data.ledger.ledger import NOTE
from raytrain_plus.parallel.gradients import Gradients
from raytrain_plus.training.exchange.header import Flags, ShardReport, decode, encode, size
from raytrain_plus.training.exchange.step_metrics import OwnMetrics, own_metrics
from raytrain_plus.training.weights.buffers import Buffers
from raytrain_plus.training.weights.first_bucket import MOST_BYTES, Rider, digits, from_digits, to_digits

NO_METRICS = OwnMetrics()
DTYPES = [torch.float32, torch.float64]


class Model(nn.Module):
    """Buffers of each rule: a mean, a maximum, and one that shard 0 writes."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("first", torch.zeros(2))


class Rules(Task):
    def model(self) -> nn.Module:
        return Model()

    def loss(self, model: nn.Module, batch: object) -> torch.Tensor:
        raise AssertionError("not called")

    def buffer_rule(self, name: str) -> str | None:  # type: ignore[override]
        return "first" if name == "first" else None


def rider_of(
    model: nn.Module, dtype: torch.dtype, shards: int, exact: bool = False
) -> tuple[Rider, Gradients, Buffers]:
    named = [(name, value) for name, value in model.to(dtype).named_parameters()]
    gradients = Gradients(named, rider=lambda kind: digits(size(shards), kind))
    buffers = Buffers(model, Rules(), shards if exact else None)
    return Rider(gradients, [buffers], shards), gradients, buffers


def summed(gradients: list[Gradients]) -> None:
    """Sum what rides, in the order of ranks, as a world would."""
    total = sum(one.rider.clone() for one in gradients)
    for one in gradients:
        one.rider.copy_(total)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@given(losses=st.lists(st.floats(), min_size=2, max_size=6), workers=st.integers(2, 5))
def test_headers_and_metrics_lose_no_bit(dtype: torch.dtype, losses: list[float], workers: int) -> None:
    shards = len(losses)
    hosted = [range(worker, shards, workers) for worker in range(workers)]
    headers = [
        encode(
            {k: ShardReport(2**40, 7, 2**64 - 1 - k, 0.1, losses[k]) for k in own},
            shards,
            Flags(pause=worker == 1, save=True),
        )
        for worker, own in enumerate(hosted)
    ]
    riders = [rider_of(Model(), dtype, shards) for _ in range(workers)]
    for (rider, _, _), encoded, own in zip(riders, headers, hosted, strict=True):
        rider.fit(1, workers)
        rider.write(encoded, own_metrics({k: {"m": losses[k]} for k in own}, shards))
    summed([gradients for _, gradients, _ in riders])
    for rider, _, _ in riders:
        found, metrics = rider.read()
        assert found.tolist() == sum(headers).tolist()  # type: ignore[union-attr]
        assert np.frombuffer(decode(found).notes, NOTE)["ids"].tolist() == [2**64 - 1 - k for k in range(shards)]
        assert metrics.tobytes() == np.array(losses).tobytes()


def test_metrics_without_room_are_left_out() -> None:
    rider, _, _ = rider_of(Model(), torch.float32, 2)
    rider.fit(0, 1)
    rider.write(encode({}, 2, Flags()), own_metrics({0: {"m": 1.0}}, 2))
    assert rider.read()[1].shape == (2, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pause_flag_of_very_many_workers_does_not_overflow(dtype: torch.dtype) -> None:
    header = torch.from_numpy(encode({}, 1, Flags(pause=True)))
    assert decode(from_digits(to_digits(header, dtype) * 2**32).numpy()).flags == Flags(pause=True)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_buffers_of_all_members_arrive(dtype: torch.dtype, exact: bool) -> None:
    members = [rider_of(Model(), dtype, 3, exact) for _ in range(3)]
    for rank, (rider, _, buffers) in enumerate(members):
        rider.fit(0, 3)
        assert rider.carries_buffers
        buffers.begin_step({"mean": -40})
        buffers.renew(committed=True)
        _change(buffers, lambda name, value, rank=rank: value + {"mean": 0.1, "count": 7, "first": 1e-300}[name] * rank)
        buffers.end_shard(rank, 5)
        rider.write(encode({}, 3, Flags()), NO_METRICS)
        rider.write_buffers(rank)
    summed([gradients for _, gradients, _ in members])
    found = []
    for rider, _, buffers in members:
        rider.read_buffers()
        buffers.commit(15)
        found.append({name: value.tolist() for name, value in buffers.committed.items()})
    assert found[0] == found[1] == found[2]
    assert found[0]["mean"] == pytest.approx([0.1] * 3, rel=1e-6)
    assert (found[0]["count"], found[0]["first"]) == (14, [0.0, 0.0])


def _change(buffers: Buffers, to: Callable[..., torch.Tensor]) -> None:
    """Write into the buffers that are in the model, as a forward pass does."""
    for name, (owner, attribute) in buffers._owners.items():
        setattr(owner, attribute, to(name, getattr(owner, attribute)))


def test_large_buffers_do_not_ride() -> None:
    rider, gradients, _ = rider_of(Model(width=MOST_BYTES // 16 // 2), torch.float32, 1)
    alone = len(gradients.rider)
    rider.fit(0, 2)
    assert (rider.carries_buffers, len(gradients.rider)) == (False, alone)
    rider.fit(0, 1)
    assert not rider.carries_buffers, "one member has all the sums"
