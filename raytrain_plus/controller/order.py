"""What the driver and the controller hand one another: what is asked for, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raytrain_plus.errors import RaytrainError
from raytrain_plus.result import Result
from raytrain_plus.runs.history import Past
from raytrain_plus.workers.messages import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What the driver asks of the controller."""

    plan: Plan
    cuts: tuple[int, ...]
    """Numbers of stages that the model can be cut into, the most first."""
    fresh: bool
    """Whether an earlier run's folder is moved aside then."""
    past: Past | None
    """What the run goes on from; None where it begins."""
    task_sha256: str | None
    """Of the source file of the task's class."""
    job_yaml: str
    versions: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What the driver's environment says to the job's trackers; may hold secrets. Not in the actor's `runtime_env`,
    which Ray's dashboard shows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Closing:
    """How a run ended, as the driver gets it."""

    result: Result
    error: RaytrainError | None
    """What ended a failed run."""
