"""What a worker is told once, before it trains: the job and where its parts are found. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from raytrain_plus.data.source import Index
from raytrain_plus.job import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The same for every worker of a run."""

    job: Job
    """With `task` as `module:Class` where it can be imported; its class travels in `pickled_task` otherwise."""
    pickled_task: bytes | None
    """A task class that only the driver's process knows (from a notebook, say), by value."""
    roots: tuple[str, ...]
    """Folders from which the task, `data.prepare` and `data.transform` are imported."""
    steps: int
    """Steps of the whole job."""
    index: Index
    """The training data, as the driver saw it."""
    held_out: Index | None
    """The data of `evaluate.path`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a worker process is."""

    worker: str
    pid: int
    node: str
    address: str
    clock_s: float
    """Unix seconds by the worker's clock when it answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """What a worker says when its task is built."""

    parameters: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a worker's training ended, without an error."""

    stopped: bool
    state_sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """What one worker hands over of the finished model."""

    model: bytes
    """A safetensors file."""
    show: str | None
    """What the task has to show."""
