"""The plans for all numbers of workers, as a table that can be looked up by size. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raytrain_plus.membership.mesh import Shape
from raytrain_plus.planner.cost import ChoiceCost
from raytrain_plus.planner.layer_profile import Mode
from raytrain_plus.planner.space import Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class SizePlan:
    """The best choice for a number of workers."""

    workers: int
    choice: Choice
    cost: ChoiceCost
    reason: str
    runner_up: str = ""
    """The second best choice, in words; empty if there is no other."""
    samples_per_s: float
    mfu: float | None = None
    dollars: float | None = None
    """Of an epoch."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        settings, shape, time = self.choice.settings, self.choice.shape, self.cost.time
        return {
            "workers": self.workers,
            "used": shape.size,
            "replicas": shape.replicas,
            "stages": shape.stages,
            "slice_hosts": shape.tensor_ranks,
            "sharded": settings.sharded,
            "recompute": settings.recompute,
            "offload": settings.offload,
            "schedule": settings.schedule,
            "memory": {**self.cost.memory.kinds, "total": self.cost.memory.total},
            "seconds": {
                "compute": time.compute,
                "bubble": time.bubble,
                "sums": time.sums,
                "rest": time.rest,
                "total": time.total,
            },
            "samples_per_s": self.samples_per_s,
            "mfu": self.mfu,
            "dollars_per_epoch": self.dollars,
            "reason": self.reason,
            "runner_up": self.runner_up,
        }


@dataclass(frozen=True, slots=True)
class NoPlan:
    """Why a number of workers cannot run the job."""

    workers: int
    missing: str

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"workers": self.workers, "missing": self.missing}


@dataclass(frozen=True, slots=True)
class PlanTable:
    """The plans by number of workers, in ascending order."""

    rows: tuple[SizePlan | NoPlan, ...]

    def at(self, workers: int) -> SizePlan | NoPlan:
        """Return the plan for the largest number in the table that is not above `workers`.

        Raises `KeyError` if all are above it.
        """
        found = bisect_right(self.rows, workers, key=lambda row: row.workers)
        if not found:
            raise KeyError(workers)
        return self.rows[found - 1]


def shape_text(shape: Shape) -> str:
    """Return a shape: replicas x stages x workers that share slices.

    >>> shape_text(Shape(4, 2))
    '4 x 2 x 1'
    """
    return " x ".join(map(str, shape.sizes))


def mode_text(mode: Mode) -> str:
    """Return a value of `recompute`."""
    return mode if isinstance(mode, str) else f"{len(mode)} layers"


def choice_text(choice: Choice) -> str:
    """Return a choice in words, without what is as usual.

    >>> from raytrain_plus.planner.space import FreeSettings
    >>> choice_text(Choice(Shape(4), FreeSettings("optimizer", "none", "none", "1f1b")))
    '4 x 1 x 1, sharded: optimizer'
    """
    settings = choice.settings
    named: Mapping[str, str] = {
        "sharded": settings.sharded,
        "recompute": mode_text(settings.recompute),
        "offload": settings.offload,
    }
    words = [f"{name}: {value}" for name, value in named.items() if value != "none"]
    return ", ".join([shape_text(choice.shape), *words, *[settings.schedule] * (choice.shape.stages > 1)])
