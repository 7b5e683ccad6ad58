"""Slices that hosts in threads of one process have, and their weights put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from raytrain_plus.parallel.tensor.link import Link
from raytrain_plus.parallel.tensor.simulated_hosts import Hosts
from raytrain_plus.parallel.tensor.slicing import cuts_in
from raytrain_plus.state.named import bytes_of, dtype_name
from raytrain_plus.state.slices import joined
from raytrain_plus.state.transfer import unpacked

Found = TypeVar("Found")
Passed = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""An output or loss, and the gradients of the parameters by name."""


def hosted(count: int, each: Callable[[Link], Found]) -> list[Found]:
    """What each of so many hosts returns, given its link."""
    hosts = Hosts(count)
    return hosts.run([partial(each, hosts.link(host)) for host in hosts])


def check_bits(each: Callable[[Link], Passed]) -> None:
    """Assert that four slices have the same bits on one host, two and four."""
    output, gradients = each(Link())
    for count in (2, 4):
        seen: dict[str, torch.Tensor] = {}
        for found, own in hosted(count, each):
            assert torch.equal(found, output)
            for name, gradient in own.items():
                assert torch.equal(seen.setdefault(name, gradient), gradient)
        assert seen.keys() == gradients.keys()
        assert all(torch.equal(seen[name], gradient) for name, gradient in gradients.items())


def noted(link: Link) -> list[tuple[int, ...]]:
    """The shapes of what this host will exchange."""
    shapes: list[tuple[int, ...]] = []
    exchange = link.exchange

    def noting(own: torch.Tensor, other: int) -> torch.Tensor:
        assert exchange is not None, "there are several hosts"
        shapes.append(tuple(own.shape))
        return exchange(own, other)

    link.exchange = noting
    return shapes


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of the parameters by name."""
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def in_sequence(layers: Mapping[str, nn.Module]) -> nn.Sequential:
    """The model of these layers, which is not cut."""
    made = nn.Sequential()
    for name, module in layers.items():
        made.add_module(name, module)
    return made


def whole(values: Mapping[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights, or their gradients, put together from all their slices, as `model` is cut."""
    packed = {
        f"param/{name}": (dtype_name(value.dtype), tuple(value.shape), bytes_of(value).numpy())
        for name, value in values.items()
    }
    found = joined(packed, cuts_in(model))
    return {name.removeprefix("param/"): unpacked(one, torch.device("cpu")) for name, one in found.items()}
