"""The bytes of a training state by kind, and how many of them a worker holds. Pure.

The parts and their shares are those of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models", SC 2020, figure 1), with each row on `holders` workers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from raytrain_plus.job.setting_types import Sharded
from raytrain_plus.job.settings import Job
from raytrain_plus.parallel.sizing import share_of

LAYERS_AT_ONCE = 2
"""Layers whose weights, or gradients, exist together where they are gathered: while one computes, the next arrives."""
_SUMMED = ("weights", "frozen", "changed", "masters", "gradients", "kept", "saved")


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSize:
    """The bytes of the parts of a whole training state."""

    weights: int
    """Trained weights, as the model computes with them."""
    frozen: int
    changed: int
    """Trained weights, as the optimizer changes them."""
    masters: int
    """Those of them that the model has copies of."""
    gradients: int
    """Sums of gradients."""
    kept: int
    """The optimizer's state, and the averages of the weights."""
    saved: int
    """What the workers write of it into a checkpoint, which each copies its share of first."""
    largest: int
    """The weights and gradients of the largest layer; of the whole model if it has no layers."""
    layered: bool
    """Whether the model declares its layers."""

    def held(
        self, sharded: Sharded, share: Fraction, *, offloaded: bool = False, apart: bool = False
    ) -> dict[str, int]:
        """Return the bytes on each worker that has this share of what is sharded, by kind.

        `apart`: whether the host's memory, to which the optimizer is offloaded, is not the one that is counted.
        """
        # Rows that the optimizer changes in memory of their own come with copies of their gradients.
        own_rows = offloaded or sharded == "full"
        rows = 0 if offloaded and apart else share
        masters = int(rows * (self.changed if own_rows else self.masters))
        copies = int(rows * self.changed) if own_rows else 0
        whole = (LAYERS_AT_ONCE * self.largest, 0) if sharded == "full" else (self.weights, self.gradients)
        return {
            "weights": self.frozen + whole[0],
            "gradients": whole[1] + copies,
            "masters": masters,
            "optimizer": int(rows * self.kept),
        }

    def needed(self, sharded: Sharded, share: Fraction, *, offloaded: bool = False, apart: bool = False) -> int:
        """Return the sum of `held`."""
        return sum(self.held(sharded, share, offloaded=offloaded, apart=apart).values())

    def of(self, job: Job, workers: int, *, apart: bool = False) -> int:
        """Return the bytes on each of `workers` workers of the job, with its copy for checkpoints: see `needed`."""
        parallel, offloaded = job.parallel, job.offload == "optimizer"
        state = self.needed(parallel.sharded, share_of(parallel, workers), offloaded=offloaded, apart=apart)
        return state if apart else state + self.saved // workers

    def __add__(self, other: StateSize) -> StateSize:
        """Return the parts of both, such as those of two layers."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in _SUMMED}
        return StateSize(**sums, largest=max(self.largest, other.largest), layered=self.layered and other.layered)

    def times(self, share: Fraction) -> StateSize:
        """Return the parts of this share of each weight."""
        parts: dict[str, Any] = {name: int(share * getattr(self, name)) for name in (*_SUMMED, "largest")}
        return replace(self, **parts)


NO_STATE = StateSize(weights=0, frozen=0, changed=0, masters=0, gradients=0, kept=0, saved=0, largest=0, layered=True)
