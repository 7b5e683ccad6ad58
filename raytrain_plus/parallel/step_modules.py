"""Modules that take part in a step beside their passes, such as the router of `layers.Experts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import nn

from raytrain_plus.device_copies import Numbers
from raytrain_plus.observe.expert_use import ExpertUse


class StepModule(nn.Module):
    """A module that hears when a step begins and ends. It does the same on every worker.

    The integer buffers named in `summed_buffers` become the sum of what all shards of a step have added to them.
    """

    summed_buffers: ClassVar[tuple[str, ...]] = ()

    def begin_step(self, loss_factor: float) -> None:
        """Hear by what the step multiplies the mean loss of each microbatch, and so all gradients."""
        raise NotImplementedError

    def end_step(self) -> None:
        """Change own buffers, in place, once they hold what all shards of an applied step have left in them."""
        raise NotImplementedError


class RoutingModule(StepModule):
    """One of them that chooses experts, and counts its choices in a buffer."""

    summed_buffers: ClassVar[tuple[str, ...]] = ("tally",)
    tally: torch.Tensor
    """Of a step; each shard adds to it."""

    def use_of(self, tally: Sequence[float]) -> ExpertUse | None:
        """Return what a tally over all shards says, read on the host; None if no token came here."""
        raise NotImplementedError


class RoutedStep:
    """What the routers of a model, or of a part, have counted in a step over all shards."""

    def __init__(self, tallies: Mapping[str, tuple[RoutingModule, Numbers]]) -> None:
        """`tallies`: each router by its name, with what it has counted."""
        self._tallies = tallies

    @property
    def unread(self) -> list[Numbers]:
        """What must be read of it."""
        return [numbers for _, numbers in self._tallies.values()]

    def uses(self) -> dict[str, ExpertUse]:
        """Return how the step has used the experts of each layer, by the name of the module that has the router."""
        found = ((name, router.use_of(numbers.values())) for name, (router, numbers) in self._tallies.items())
        return {name.rpartition(".")[0] or name: use for name, use in found if use is not None}


def step_modules(module: nn.Module) -> dict[str, StepModule]:
    """Return those of a model by name."""
    return {name: one for name, one in module.named_modules() if isinstance(one, StepModule)}
