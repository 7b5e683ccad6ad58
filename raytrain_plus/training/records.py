"""What a worker tells the controller while it trains. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raytrain_plus.parallel.pipeline.timeline import Bar


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What the controller is told of an applied step."""

    step: int
    rows: int
    loss: float
    seconds: float
    waited_s: float
    """Of `seconds`, how long the data was waited for."""
    reduce_s: float = 0.0
    """And, when its own part was computed, the others' parts of the sums."""
    grad_norm: float = 0.0
    """Global norm of the gradient before clipping."""
    skipped: bool = False
    """Its sums were not finite, and it changed nothing."""
    time: float
    """Unix seconds by this worker's clock."""
    notes: bytes = b""
    """What each shard gave: `data.ledger.NOTE`s in shard order."""
    busy_s: float = 0.0
    """Where the model is in stages: for how long this one computed its forward and backward passes,"""
    passes: tuple[float, float] | None = None
    """and from when to when they took, in Unix seconds by this worker's clock, waits for other stages included."""
    bars: tuple[Bar, ...] = ()
    """What it did when, by this worker's clock, of a step that is drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """Held-out figures of the state after `step` (-1: before any)."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """What a worker's training thread is doing."""

    doing: str
    since_s: float
    limit_s: float
    """How long it may last."""
