"""What the controller and a worker say to each other. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raytrain_plus.collective.formation import Formation
from raytrain_plus.data.source import Index
from raytrain_plus.elastic.events import Why
from raytrain_plus.errors import RaytrainError
from raytrain_plus.job import Job
from raytrain_plus.state.manifest import Share
from raytrain_plus.training.records import Evaluated, StepRecord


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
    collective: str
    """`horovod` or `torch`."""
    folder: str
    """The run's folder, as `open_folder` takes it; made by the controller when the first world is formed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a worker process is."""

    worker: str
    pid: int
    node: str
    address: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """What a worker says when its task is built."""

    parameters: int
    state_bytes: int
    """What a copy of the training state may weigh."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A member's part in one generation."""

    generation: int
    formation: Formation
    shards: tuple[int, ...]
    first_step: int
    copies: bool
    """Whether it takes the donor's state, which `Worker.take` is told of."""
    evaluated: int
    """The highest step whose evaluation has been heard of; -2 where none has."""
    saved_as: int
    """The generation's number in the names of checkpoints, which rises through all controllers of a run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a member came out of a generation."""

    holds: int | None
    """The step whose state it has; None where that is dirty."""
    why: Why
    error: RaytrainError | None = None
    fault: str = ""
    """What and where the error was, the same words whenever it comes again."""
    final: bool = False
    """The error would come again whatever is tried."""
    records: Sequence[StepRecord | Evaluated] = ()
    """What had not been reported yet."""
    copied: int = -1
    """The last step of the generation whose state was copied for a checkpoint."""
    saved_as: int = -1
    """The generation's number in the names of checkpoints."""
    state_sha256: str | None = None
    """Of the finished state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A worker's share of a checkpoint is durable, or could not be written."""

    step: int
    generation: int
    """As in the checkpoint's name."""
    writer: int
    writers: int
    share: Share | None
    tree: Any
    """What is no tensor; the first writer alone says it."""
    metrics: Mapping[str, float]
    """Held-out figures of this very state."""
    time: float
    """Of the copy, in Unix seconds by the writer's clock."""
    stall_s: float
    """For how long the copy held the training up."""
    error: str
    """Why there is no share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """What one worker hands over of the model."""

    model: bytes
    """A safetensors file."""
    show: str | None
    """What the task has to show."""
    state_sha256: str
