"""Keys follow their documentation; a layer draws the same numbers whatever layers came before it."""

import hashlib
import random

import numpy as np
import torch
from torch import nn

from raytrain_plus.training.randomness import LayerKeys, random_key, set_random_key


def test_a_key_is_blake2b_of_its_parts() -> None:
    expected = int.from_bytes(hashlib.blake2b(b"7/120/3/0/head/0", digest_size=8).digest(), "little")
    assert random_key(7, 120, 3, 0, "head", 0) == expected


def test_one_key_seeds_all_three_generators() -> None:
    draws = []
    for _ in range(2):
        set_random_key(2**64 - 1)
        draws.append((torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()))
    assert draws[0] == draws[1]


def test_a_layer_draws_the_same_with_and_without_layers_before_it() -> None:
    whole = nn.Sequential()
    whole.add_module("a", nn.Dropout(0.5))
    whole.add_module("b", nn.Dropout(0.5))
    second = nn.Sequential()
    second.add_module("b", nn.Dropout(0.5))
    x = torch.ones(1000)
    with LayerKeys(whole, ("a", "b"), seed=1).microbatch(5, 2, 0):
        a = whole.a(x)
        both = whole.b(a)
    with LayerKeys(second, ("b",), seed=1).microbatch(5, 2, 0):
        alone = second(x)
    assert torch.equal(both != 0, (alone != 0) & (a != 0))
    assert not torch.equal(a != 0, alone != 0)


def test_each_use_of_a_layer_has_its_own_key_and_none_outside_a_microbatch() -> None:
    model = nn.Sequential()
    model.add_module("a", nn.Dropout(0.5))
    x = torch.ones(1000)
    with LayerKeys(model, ("a",), seed=1).microbatch(0, 0, 0):
        first, again = model(x), model(x)
    assert not torch.equal(first, again)
    draws = []
    for dropout in (model, nn.Dropout(0.5)):
        set_random_key(3)
        draws.append(dropout(x))
    assert torch.equal(*draws)
