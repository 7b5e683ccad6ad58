"""What the controller and a worker say to each other. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raytrain_plus.collective.formation import Formation
from raytrain_plus.data.sight import Sight
from raytrain_plus.data.source import Index
from raytrain_plus.errors import RaytrainError
from raytrain_plus.job.settings import Job
from raytrain_plus.membership.events import Lacks, Why
from raytrain_plus.membership.mesh import Stage
from raytrain_plus.parallel.pipeline.layout import Chunks, tied_groups
from raytrain_plus.parallel.pipeline.partition import Layer
from raytrain_plus.state.manifest import Share
from raytrain_plus.storage.claimed import Claim
from raytrain_plus.storage.outage import Outage
from raytrain_plus.storage.probe import Probe
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
    probe: Probe | None = None
    """What the controller has left in the storage: who does not see it has another one."""
    sights: Mapping[str, tuple[Sight, ...]] = field(default_factory=dict)
    """For each dataset's path, what an earlier worker on the same node saw first of its files; empty for the first."""


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
    """Of the whole model."""
    state_bytes: int
    """What a copy of the training state may weigh."""
    layers: tuple[Layer, ...] = ()
    """What each costs, where the model is to be cut into stages."""
    room: int = 0
    """Bytes of memory where the model is: of its device, or of its machine, which it may share with others."""
    sights: Mapping[str, tuple[Sight, ...]] = field(default_factory=dict)
    """For each dataset's path, what was first seen of its files on this worker's node."""


@dataclass(frozen=True, slots=True)
class Layers:
    """What of the model a worker holds."""

    stage: Stage
    chunks: Chunks
    """The layers of that stage; none where it is the whole model."""
    stages: Mapping[str, int]
    """For each layer of the model, the stage that has it; none where that is the only one."""

    @property
    def others(self) -> frozenset[str]:
        """The layers of the other stages."""
        return frozenset(layer for layer, stage in self.stages.items() if stage != self.stage.number)

    def apart(self, tied: Mapping[str, str]) -> dict[int, list[str]]:
        """Of parameters that are tied (a copy -> what it is a copy of), those that each stage has, where others have
        some that are tied to them."""
        found: dict[int, list[str]] = {}
        for names in tied_groups(tied):
            places = {name: self.stages.get(name.partition(".")[0], 0) for name in names}
            for name in names if len(set(places.values())) > 1 else ():
                found.setdefault(places[name], []).append(name)
        return {stage: sorted(names) for stage, names in sorted(found.items())}


WHOLE = Layers(Stage(), (), {})
"""All of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareOf:
    """A worker's part in the checkpoints of one generation."""

    generation: int
    """Its number in the names of checkpoints, which rises through all controllers of a run."""
    writer: int
    """Of all who write, this one; and how many they are."""
    writers: int
    rank: int = 0
    """Among those who hold the same stage, this one; and how many they are."""
    size: int = 1
    speaks: bool = True
    """Whether it writes what belongs to no layer: the first stage that trains anything."""
    claim: Claim | None = None
    """The controller's claim: without it in the run's folder nothing is written there. None: nobody claims the run."""


@dataclass(frozen=True, slots=True)
class Buddy:
    """Who keeps copies of a worker's state."""

    name: str
    actor: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """A copy of a worker's state is made, and in its buddy's memory, too."""

    worker: str
    buddy: str
    """Empty where nobody but the worker keeps it."""
    generation: int
    step: int
    bytes: int
    stall_s: float
    """For how long the copy held the training up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A member's part in one generation."""

    generation: int
    layers: Layers
    ring: Formation
    """The world of those who hold the same stage."""
    cell: Formation | None
    """The world of those who hold the stages of one model; None where that is one worker."""
    shards: tuple[int, ...]
    first_step: int
    lacks: Lacks | None
    """What it does not have yet. `Worker.take` is told of what others give."""
    gives: int
    """How often it is asked for a state that others take."""
    buddy: Buddy | None
    """Who keeps copies of its state; None where others hold that, too, or there is nobody."""
    copies: bool
    """Whether its state is copied at all."""
    share: ShareOf
    evaluated: int
    """The highest step whose evaluation has been heard of; -2 where none has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a member came out of a generation."""

    holds: int | None
    """The step whose state it has; None where that is dirty."""
    why: Why
    stage: Stage | None = None
    """Of which stage that is."""
    ready: int | None = None
    """The step after it, where it has all sums of that, and has not applied them."""
    copy: int | None = None
    """The newest step of that generation of which it has a copy of that stage."""
    squares: Mapping[str, float] = field(default_factory=dict)
    """Of the step that it holds, the squares of the norms of all gradients, where they are clipped."""
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
    """Of the finished state of its stage."""


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
    """What is no tensor; the first writer of each stage alone says it."""
    metrics: Mapping[str, float]
    """Held-out figures of this very state."""
    time: float
    """Of the copy, in Unix seconds by the writer's clock."""
    stall_s: float
    """For how long the copy held the training up."""
    error: str
    """Why there is no share."""
    outage: Outage | None = None
    """What the storage said, if it did not take the share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """What is told of a model that was handed over."""

    show: str | None
    """What the task has to show."""
    state_sha256: str
