"""Norms of gradients of any dtype and device: empty, complex, and too large to be squared."""

import math

import pytest
import torch
from torch import nn

from raytrain_plus.training.exchange.verdict import Fault
from raytrain_plus.training.update.fault_search import FaultSearch, Norms


def test_norms_of_any_types() -> None:
    tensors = [
        torch.tensor([3.0, 4.0]),
        torch.zeros(0),
        torch.tensor([1 + 2j]),
        torch.tensor([[2.0]], dtype=torch.float64),
        torch.tensor([-1.0, 1.0], dtype=torch.bfloat16),
        torch.tensor(2.0),
    ]
    assert Norms(tensors).squares() == pytest.approx([25, 0, 5, 4, 2, 4])
    assert Norms([]).squares() == []


def test_a_norm_that_cannot_be_squared_is_infinite() -> None:
    # It used to raise OverflowError.
    assert Norms([torch.full((2,), 1e160, dtype=torch.float64)]).squares() == [math.inf]


def test_an_empty_tensor_on_another_device_is_accepted() -> None:
    """A model without buffers has an empty sum of them on the CPU beside gradients on a GPU; once every step failed on
    that.
    """
    Norms([torch.ones(2, device="meta"), torch.zeros(0, dtype=torch.float64)])
    Norms([torch.ones(2, device="meta"), torch.ones(1, dtype=torch.float64)])


def test_the_first_faulty_shard_of_each_chunk_counts_and_of_it_the_last_parameter() -> None:
    search = FaultSearch()
    parameters = {name: nn.Parameter(torch.zeros(2)) for name in "abc"}
    for shard, bad in enumerate(["", "ab", "abc"]):
        for name, value in parameters.items():
            value.grad = torch.full((2,), math.nan if name in bad else 1.0)
        search.shard_ended(shard, 0, parameters.items())
        search.shard_ended(shard, 1, [("c", parameters["c"])])
    # Later changes of the gradients do not matter.
    parameters["a"].grad = torch.zeros(2)
    assert search.found() == [Fault(1, 0, "b"), Fault(2, 1, "c")]
