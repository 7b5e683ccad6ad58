"""Gradients of mean losses become weighted sums, wherever the weights are."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.parallel.gradients import Gradients
from raytrain_plus.parallel.half_precision import ring_wire
from raytrain_plus.parallel.weighting import Weighting, multiply
from raytrain_plus.parallel.wire import Exact, MakeWire, Plain

WEIGHTS = [[3.0, 3.0, 3.0], [1.0, 5.0, 0.25], [0.0, 2.0, 7.0], [2.0, 0.0, 7.0], [2.0, 7.0, 0.0], [-1.0, 3.0, 1.0]]


def summed(weights: list[float | torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum that a bucket holds after gradients of these weights; those of weight 0 are zeros."""
    bucket, weighting = torch.zeros(values.shape[1]), Weighting()
    for weight, value in zip(weights, values, strict=True):
        weighting.next(bucket, weight)
        if weight:
            bucket += value
    multiply(bucket, weighting.take())
    return bucket


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_sum_is_weighted_and_has_the_same_bits_if_the_weights_are_on_a_device(weights: list[float]) -> None:
    values = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    found = summed(weights, values)  # type: ignore[arg-type]
    expected = (torch.tensor(weights, dtype=torch.float64)[:, None] * values.double()).sum(0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-5)
    for there in itertools.product([False, True], repeat=3):
        mixed = [torch.tensor(one, dtype=torch.float64) if on else one for one, on in zip(weights, there, strict=True)]
        assert torch.equal(summed(mixed, values), found)


def test_weights_of_0_alone_leave_zeros() -> None:
    for nothing in (0.0, torch.tensor(0.0, dtype=torch.float64)):
        assert summed([nothing, nothing], torch.ones(2, 3)).tolist() == [0.0] * 3


class Two(SoloWorld):
    """A world whose other member has no gradients."""

    size = 2

    def exchange(self, tensor, into, name):  # type: ignore[no-untyped-def]
        into.zero_()
        into[0] = tensor[0]
        return super().reduce(into, name)

    def gather(self, tensor, into, name):  # type: ignore[no-untyped-def]
        into.zero_()
        into[0] = tensor
        return super().reduce(into, name)


@pytest.mark.parametrize("make_wire", [Plain, partial(Exact, shards=2)], ids=["plain", "exact"])
@pytest.mark.parametrize("world", [SoloWorld(), Two()], ids=["alone", "two"])
def test_each_wire_takes_the_means_of_what_was_weighed(make_wire: MakeWire, world: SoloWorld) -> None:
    value = nn.Parameter(torch.zeros(3))
    gradients = Gradients([("p", value)], make_wire=make_wire)
    shards = [[(1.0, 2.0), (3.0, -1.0)], [(2.0, 4.0), (0.5, 8.0)]]
    scales: dict[str, int] = {}
    for _ in range(2):
        gradients.begin(scales)
        for number, shard in enumerate(shards):
            for at, (weight, slope) in enumerate(shard):
                gradients.weigh(weight)
                loss = (slope * value).sum()
                if number + at < 2:
                    loss.backward()
                else:
                    with gradients.reducing(world):
                        loss.backward()
            if number == 0:
                gradients.end_shard()
        for exact in gradients.exact:
            scales = exact.scales_from(exact.largest())
    gradients.take_means(6.5)
    assert value.grad is not None
    assert value.grad.tolist() == pytest.approx([(2 - 3 + 8 + 4) / 6.5] * 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gradients_of_16_bits_are_weighed_in_32(dtype: torch.dtype) -> None:
    value = nn.Parameter(torch.zeros(3, dtype=dtype))
    gradients = Gradients([("p", value)], make_wire=partial(ring_wire, compressed=torch.float16))
    gradients.begin({})
    gradients.weigh(5000.0)
    with gradients.reducing(SoloWorld()) as works:
        (100 * value).sum().backward()
    for work in works:
        while (following := work.finish()) is not None:
            work = following
    # The weighted sum, 500,000, is beyond float16.
    gradients.take_means(10_000.0)
    assert value.grad is not None
    assert value.grad.tolist() == pytest.approx([50.0] * 3, rel=1e-3)
