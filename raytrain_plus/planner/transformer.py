"""Compute the profile of a GPT from its sizes, for models that no machine at hand can measure. Pure.

Bytes kept by a block are those of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
MLSys 2023, with attention that keeps no scores; operations those of Narayanan et al., "Efficient Large-Scale Language
Model Training on GPU Clusters Using Megatron-LM", SC 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from raytrain_plus.parallel.per_row import PerRow
from raytrain_plus.parallel.state_bytes import StateSize
from raytrain_plus.planner.layer_profile import LayerPasses, LayerProfile, LinkSpeed, Mode, ModelProfile

HALF, SINGLE = 2, 4
"""Bytes of a number in 16 and in 32 bits."""
KEPT: dict[Mode, int] = {"none": 34, "selective": 22, "full": 2}
"""Bytes that a block keeps for each value of its input."""
AGAIN: dict[Mode, float] = {"none": 1.0, "selective": 1.05, "full": 4 / 3}
"""How much longer the passes of a block take: a forward pass is a third of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpt:
    """The sizes of a GPT, in `precision: bf16-params` under Adam."""

    blocks: int
    width: int
    length: int = 2048
    vocabulary: int = 51_200

    @property
    def block_parameters(self) -> int:
        """Trained values of a block."""
        return 12 * self.width**2 + 13 * self.width

    @property
    def parameters(self) -> int:
        """All trained values; those of the first and the last layer are not tied."""
        return self.blocks * self.block_parameters + (2 * self.vocabulary + self.length) * self.width

    @property
    def operations(self) -> float:
        """Operations of the forward and backward pass of one row."""
        of_block = self.block_operations
        return self.blocks * of_block + 6.0 * self.length * self.vocabulary * self.width

    @property
    def block_operations(self) -> float:
        """Operations of a block's passes of one row: its weights', and those of attention."""
        return 6.0 * self.length * (12 * self.width**2 + 2 * self.length * self.width)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """The machines: how fast they compute and exchange."""

    peak: float
    """Operations per second of a GPU."""
    reached: float
    """The share of the peak that passes reach."""
    inside: LinkSpeed
    """Between GPUs of one machine."""
    link: LinkSpeed
    """Between machines, for each GPU."""
    on_one: int = 8


A100 = Gpus(peak=312e12, reached=0.5, inside=LinkSpeed(10e-6, 250e9), link=LinkSpeed(20e-6, 25e9))
"""Eight A100 on a machine, with NVLink, and a network card of 200 Gbit/s each."""


def gpt_profile(gpt: Gpt, gpus: Gpus = A100) -> ModelProfile:
    """Return the profile of a GPT on these GPUs."""
    row, per_s = gpt.length * gpt.width, gpus.peak * gpus.reached

    def layer(name: str, parameters: int, operations: float, kept: dict[Mode, int]) -> LayerProfile:
        passes = {
            mode: LayerPasses(PerRow(0.0, AGAIN[mode] * operations / per_s), PerRow(0.0, float(kept[mode] * row)))
            for mode in KEPT
        }
        return LayerProfile(name, half_adam(parameters), passes, PerRow(0.0, float(HALF * row)), sliced=Fraction(1))

    ends = dict.fromkeys(KEPT, HALF)
    of_scores = 6.0 * gpt.length * gpt.vocabulary * gpt.width
    layers = [
        layer("embed", (gpt.vocabulary + gpt.length) * gpt.width, 0.0, ends),
        *(layer(f"block{number}", gpt.block_parameters, gpt.block_operations, KEPT) for number in range(gpt.blocks)),
        layer("head", gpt.vocabulary * gpt.width, of_scores, ends),
    ]
    return ModelProfile(
        layers=tuple(layers),
        layered=True,
        link=gpus.link,
        inside=gpus.inside,
        on_one=gpus.on_one,
        cores=float("inf"),
        operations=gpt.operations,
        peak=gpus.peak,
    )


def half_adam(parameters: int) -> StateSize:
    """Return the state of so many values under Adam, whose passes use copies in 16 bits."""
    weights, changed = HALF * parameters, SINGLE * parameters
    return StateSize(
        weights=weights,
        frozen=0,
        changed=changed,
        masters=changed,
        gradients=changed,
        kept=2 * changed,
        saved=3 * changed,
        largest=weights + changed,
        layered=True,
    )
