"""Define what the driver and the controller exchange: the request and the outcome of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raytrain_plus.errors import RaytrainError
from raytrain_plus.membership.sizes import SizeTable
from raytrain_plus.result import Result
from raytrain_plus.runs.history import Past
from raytrain_plus.workers.messages import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOrder:
    """The driver's request to the controller."""

    plan: Plan
    sizes: SizeTable
    """Which group to form out of how many workers."""
    fresh: bool
    """Whether the folder of an earlier run is moved aside."""
    past: Past | None
    """What the run resumes from; None for a new run."""
    older: bool
    """Whether a version began the run that read rows otherwise: see `READING`."""
    task_modules: Mapping[str, str]
    """The digests of the task's source, by module: see `job.task_source`."""
    task_sha256: str | None = None
    """One digest of the task's source."""
    callbacks: tuple[str, ...] = ()
    """The methods of the task that hear of the run, such as `on_step`; see `observe.trackers.callbacks`."""
    job_yaml: str
    versions: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The driver's environment variables for the job's trackers; may hold secrets.

    Not in the actor's `runtime_env`, which Ray's dashboard shows.
    """


@dataclass(frozen=True, slots=True)
class Driver:
    """The process that follows an attached run, on the controller's node."""

    pid: int
    identity: Mapping[str, str]
    """See `runs.process.this_process`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Closing:
    """How a run ended, as the driver receives it."""

    result: Result
    error: RaytrainError | None
    """The error that ended a failed run."""
