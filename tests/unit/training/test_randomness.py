"""Keys follow their documentation; a layer draws the same numbers whatever layers came before it."""

import hashlib
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch
from torch import nn

from raytrain_plus.generators import set_random_key
from raytrain_plus.training.model.randomness import LayerKeys, draws_nothing, random_key


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
    keys = LayerKeys(whole, ("a", "b"), seed=1)
    with keys.opened(keys.begin(5, 2, 0)):
        a = whole.a(x)
        both = whole.b(a)
    keys = LayerKeys(second, ("b",), seed=1)
    with keys.opened(keys.begin(5, 2, 0)):
        alone = second(x)
    assert torch.equal(both != 0, (alone != 0) & (a != 0))
    assert not torch.equal(a != 0, alone != 0)


def test_each_use_of_a_layer_has_its_own_key_and_none_outside_a_microbatch() -> None:
    model = nn.Sequential()
    model.add_module("a", nn.Dropout(0.5))
    x = torch.ones(1000)
    keys = LayerKeys(model, ("a",), seed=1)
    with keys.opened(keys.begin(0, 0, 0)):
        first, again = model(x), model(x)
    assert not torch.equal(first, again)
    draws = []
    for dropout in (model, nn.Dropout(0.5)):
        set_random_key(3)
        draws.append(dropout(x))
    assert torch.equal(*draws)


class Noisy(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.randn(4)


def hooked() -> nn.Module:
    made = nn.Linear(4, 4)
    made.register_forward_hook(lambda module, given, output: output + torch.randn(4))
    return made


@pytest.mark.parametrize("layer", [Noisy(4, 4), hooked(), nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))])
def test_a_layer_of_which_it_is_not_certain_that_it_draws_nothing_has_a_key(layer: nn.Module) -> None:
    assert not draws_nothing(layer)
    assert draws_nothing(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    x, outputs = torch.ones(3, 4), []
    for before in ({}, {"before": nn.Dropout(0.1)}):
        model = nn.Sequential(OrderedDict({**before, "a": layer, "b": nn.Identity()}))
        keys = LayerKeys(model, tuple(model._modules), seed=1)
        with keys.opened(keys.begin(0, 0, 0)):
            for name in before:
                model.get_submodule(name)(x)
            outputs.append(model.a(x))
    assert torch.equal(*outputs)


def test_what_the_loss_draws_after_a_last_layer_that_draws_nothing_depends_on_its_key() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4))
    keys = LayerKeys(model, ("0", "1"), seed=1)
    with keys.opened(keys.begin(0, 0, 0)):
        model(torch.ones(3, 4))
        drawn = torch.rand(2)
    set_random_key(random_key(1, 0, 0, 0, "1", 0))
    assert torch.equal(torch.rand(2), drawn)
