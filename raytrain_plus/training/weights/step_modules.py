"""Modules that take part in a step beside their passes, such as the router of `layers.Experts`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class StepModule(Protocol):
    """A module that hears when a step begins and ends. It does the same on every worker."""

    def begin_step(self, loss_factor: float) -> None:
        """Hear by what the step multiplies the mean loss of each microbatch, and so all gradients."""

    def end_step(self) -> None:
        """Change own buffers, in place, once they hold what all shards of an applied step have left in them."""


def step_modules(module: nn.Module) -> dict[str, StepModule]:
    """Return those of a model by name."""
    return {name: one for name, one in module.named_modules() if isinstance(one, StepModule)}
