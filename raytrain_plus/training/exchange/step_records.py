"""Records that a worker sends to the controller during training. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from raytrain_plus.observe.expert_use import ExpertsUsed
from raytrain_plus.observe.gpu_use import GpuUse
from raytrain_plus.observe.step_profile import Profiled
from raytrain_plus.parallel.pipeline.timeline import Bar


class Remark(NamedTuple):
    """An observation of a step that users should know, reported once in a run."""

    key: str
    """Remarks with the same key are the same observation."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """The record of an applied step."""

    step: int
    rows: int
    loss: float
    seconds: float
    waited_s: float
    """The part of `seconds` spent waiting for data."""
    reduce_s: float = 0.0
    """The part spent waiting for the sums of other workers after computing this worker's own."""
    grad_norm: float = 0.0
    """Global norm of the gradient before clipping."""
    skipped: bool = False
    """The step's sums were not finite, and it changed nothing."""
    rows_skipped: int = 0
    """The number of rows that were left out because they cannot be used."""
    lr: tuple[float, ...] = ()
    """The learning rate of each parameter group in this step; empty if this stage's optimizer has none."""
    remarks: tuple[Remark, ...] = ()
    time: float
    """Unix seconds on this worker's clock."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means of what the loss returned beside it, over the step's weight."""
    notes: bytes = b""
    """Each shard's contribution: `data.ledger.ledger.NOTE`s in shard order."""
    skipped_rows: bytes = b""
    """The rows that were left out, of all shards: `data.ledger.ledger.SKIPPED`."""
    busy_s: float = 0.0
    """With pipeline stages: seconds in which this stage computed its forward and backward passes."""
    passes: tuple[float, float] | None = None
    """With pipeline stages: start and end of the passes, in Unix seconds on this worker's clock, with waits for other
    stages.
    """
    bars: tuple[Bar, ...] = ()
    """The actions of a step that is drawn, on this worker's clock."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """Metrics of the held-out data for the state after `step` (-1: before any step)."""

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """The current activity of a worker's training thread."""

    doing: str
    since_s: float
    limit_s: float
    """How long it may last."""


Record = StepRecord | Evaluated | Profiled | Remark | GpuUse | ExpertsUsed
"""What a worker reports during training. A remark is on more than one step."""


def in_order(committed: Iterable[StepRecord], reported: Iterable[Record]) -> list[StepRecord | Evaluated]:
    """Return committed steps and the reported evaluations in order: each evaluation follows its step.

    One report holds the evaluations of several steps.
    """
    evaluated = [record for record in reported if isinstance(record, Evaluated)]
    # The sort is stable.
    return sorted([*committed, *evaluated], key=lambda record: record.step)
