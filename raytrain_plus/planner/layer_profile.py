"""What is known of a task and its machines before a plan is made: costs by layer, and speeds. Pure.

`trial.profile_layers` measures the layers, `planner.transformer` computes them for models that are too large.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from raytrain_plus.parallel.per_row import PerRow
from raytrain_plus.parallel.state_bytes import NO_STATE, StateSize

Mode = str | tuple[str, ...]
"""A value of `recompute`, with the names of layers as a tuple."""

STEP_S = 0.002
"""Seconds of a step that are neither passes, optimizer nor exchange: header, agreement, reports; about, on one core."""


@dataclass(frozen=True, slots=True)
class LayerPasses:
    """What the passes of a microbatch through a layer cost, with one value of `recompute`."""

    seconds: PerRow
    """Forward and backward pass."""
    kept: PerRow
    """Bytes that are kept between them."""


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """The costs of one layer."""

    name: str
    state: StateSize
    """Of the whole layer, with all its tensor slices."""
    passes: Mapping[Mode, LayerPasses]
    sent: PerRow
    """Bytes of a microbatch that the next layer gets."""
    update_s: float = 0.0
    """Seconds of the optimizer's step."""
    sliced: Fraction = Fraction(0)
    """The share of its weights that is in tensor slices."""
    cost: int = 0
    """Its `counted_cost`, for pipedream."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """How fast two workers exchange tensors."""

    latency_s: float
    per_s: float
    """Bytes per second in one direction."""

    def seconds(self, size: float, messages: float = 1.0) -> float:
        """Return the seconds of so many bytes in so many messages, one after the other."""
        return messages * self.latency_s + size / self.per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelProfile:
    """The costs of a task's layers, and the speed of the machines."""

    layers: tuple[LayerProfile, ...]
    layered: bool
    """Whether the model can be divided between its layers."""
    link: LinkSpeed
    """Between two workers."""
    inside: LinkSpeed | None = None
    """Between two workers of one machine, if that differs."""
    step_s: float = 0.0
    """Seconds of a step that are neither passes, optimizer nor exchange."""
    process_bytes: int = 0
    """Bytes of a worker's process without a model."""
    on_one: int = 1
    """The most workers on one machine, which share its cores and its memory."""
    cores: float = 1.0
    """Cores of a machine, in those that one worker uses."""
    operations: float | None = None
    """Floating-point operations of the passes of one row; None if they are not known."""
    peak: float | None = None
    """Operations per second of a worker's device; None if they are not known."""

    @property
    def state(self) -> StateSize:
        """The size of the state of the whole model."""
        return sum((layer.state for layer in self.layers), NO_STATE)
