"""Profiles of made-up models, for tests of plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raytrain_plus import Data, Job, Parallel
from raytrain_plus.parallel.per_row import PerRow
from raytrain_plus.parallel.state_bytes import NO_STATE, StateSize
from raytrain_plus.planner.layer_profile import LayerPasses, LayerProfile, LinkSpeed, ModelProfile

MB = 10**6
FAST = LinkSpeed(1e-6, 100e9)


def adam(parameters: int) -> StateSize:
    """Return the state of so many float32 values under Adam."""
    each = 4 * parameters
    return StateSize(
        weights=each,
        frozen=0,
        changed=each,
        masters=0,
        gradients=each,
        kept=2 * each,
        saved=3 * each,
        largest=2 * each,
        layered=True,
    )


def layer(name: str, seconds: float, parameters: int, kept: float = 0.0, **more: Any) -> LayerProfile:
    """Return a layer with those seconds, and bytes kept, for one row; recomputation takes longer."""
    passes = {
        "none": LayerPasses(PerRow(0.0, seconds), PerRow(0.0, kept)),
        "selective": LayerPasses(PerRow(0.0, 1.1 * seconds), PerRow(0.0, kept / 3)),
        "full": LayerPasses(PerRow(0.0, 4 / 3 * seconds), PerRow(0.0, kept / 10)),
    }
    return LayerProfile(name, adam(parameters) if parameters else NO_STATE, passes, PerRow(0.0, kept / 10), **more)


def model(layers: Sequence[LayerProfile], **more: Any) -> ModelProfile:
    """Return a profile of these layers, on machines of one worker each with fast links."""
    return ModelProfile(**{"layers": tuple(layers), "layered": True, "link": FAST, "cores": 64.0, **more})


def job(batch_size: int = 48, shards: int = 12, **settings: Any) -> Job:
    """Return a job of a task that is never loaded."""
    parallel = Parallel(**settings.pop("parallel", {}))
    data = Data(path="rows", batch_size=batch_size, shards=shards)
    return Job(name="x", task="module:Task", data=data, steps=10, parallel=parallel, **settings)
