"""Define the messages between the controller and a worker. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raytrain_plus.collective.invitation import Invitation
from raytrain_plus.data.paths.sight import Sight
from raytrain_plus.data.sources.source import Source
from raytrain_plus.errors import RaytrainError
from raytrain_plus.job.settings import Job
from raytrain_plus.membership.events import Lacks, Why
from raytrain_plus.membership.group_state import Group
from raytrain_plus.membership.mesh import Stage, hosted_slices
from raytrain_plus.membership.pieces import Piece, Pieces
from raytrain_plus.membership.slice_names import layer_of, slice_name
from raytrain_plus.parallel.pipeline.layout import Chunks, tied_groups
from raytrain_plus.parallel.pipeline.partition import Layer
from raytrain_plus.state.stages import REST, own_tree
from raytrain_plus.state.stored.manifest import Share
from raytrain_plus.storage.folders.claimed import Claim
from raytrain_plus.storage.outage import Outage
from raytrain_plus.storage.probe import Probe
from raytrain_plus.training.exchange.step_records import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The data that every worker receives."""

    job: Job
    """With `task` as `module:Class` if it can be imported; otherwise its class is in `pickled_task`."""
    pickled_task: bytes | None
    """A task class that only the driver's process knows (from a notebook, say), by value."""
    roots: tuple[str, ...]
    """Folders from which the task, `data.prepare` and `data.transform` are imported."""
    steps: int
    """The number of steps of the whole job."""
    data: Source
    """The training data, as the driver saw it."""
    held_out: Source | None
    """The data of `evaluate.path`."""
    collective: str
    """`horovod` or `torch`."""
    folder: str
    """The run's folder, as `open_folder` takes it; made by the controller when the first world is formed."""
    probe: Probe | None = None
    """What the controller wrote to the storage: a worker that does not see it has another storage."""
    sights: Mapping[str, tuple[Sight, ...]] = field(default_factory=dict)
    """For each dataset's path, what an earlier worker on the same node first saw of its files; empty for the first
    worker."""
    trial: bool = False
    """Whether this worker tries the task before it prepares itself."""
    resumed: Mapping[str, Any] | None = None
    """The rules in the tree of the newest checkpoint, if the run resumes from one, which an older version may have
    begun."""
    fresh_rates: bool = False
    """Whether the optimizer's settings are the task's, not those of the checkpoint that the run resumes from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLocation:
    """The process, node and address of a worker."""

    worker: str
    pid: int
    node: str
    address: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedReport:
    """A worker's report once its task is built."""

    parameters: int
    """The number of parameters of the whole model; tied ones count once."""
    state_bytes: int
    """The approximate size in bytes of a copy of the training state."""
    layers: tuple[Layer, ...] = ()
    """The cost of each layer, if the model is to be partitioned into stages."""
    rows: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    """If the optimizer's state is sharded, for each weight its number of rows, the bytes of one, and those of its
    state."""
    room: int = 0
    """Bytes of memory for the model: of its device, or of its machine, which it may share with others."""
    sights: Mapping[str, tuple[Sight, ...]] = field(default_factory=dict)
    """For each dataset's path, what was first seen of its files on this worker's node."""
    gpu: str = ""
    """The model of its GPU; empty on a CPU."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The part of the model that a worker holds."""

    stage: Stage
    chunks: Chunks
    """The layers of that stage; empty for the whole model."""
    stages: Mapping[str, int]
    """For each layer of the model, its stage; empty if a worker holds the whole model."""
    slices: int = 1
    """The job's number of tensor slices."""

    @property
    def others(self) -> frozenset[str]:
        """The layers and slices that belong to other positions of the replica."""
        layers = {layer for layer, stage in self.stages.items() if stage != self.stage.number}
        if self.slices == 1:
            return frozenset(layers)
        own = hosted_slices(self.slices, self.stage.rank, self.stage.ranks)
        slices = {
            slice_name(layer, number)
            for layer in self.stages
            for number in range(self.slices)
            if layer in layers or number not in own
        }
        return frozenset(layers | slices)

    def apart(self, tied: Mapping[str, str]) -> dict[int, list[str]]:
        """Return, by stage, its tied parameters that are tied to parameters of another stage.

        `tied`: a copy -> the parameter that it is a copy of.
        """
        found: dict[int, list[str]] = {}
        for names in tied_groups(tied):
            places = {name: self.stages.get(layer_of(name.partition(".")[0]), 0) for name in names}
            for name in names if len(set(places.values())) > 1 else ():
                found.setdefault(places[name], []).append(name)
        return {stage: sorted(names) for stage, names in sorted(found.items())}


WHOLE = Layers(Stage(), (), {})
"""The whole model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareOf:
    """A worker's part in the checkpoints of one generation."""

    generation: int
    """The generation's number in the names of checkpoints, which rises through all controllers of a run."""
    writer: int
    """This worker's index among all writers."""
    writers: int
    """The number of writers."""
    holders: Mapping[str, tuple[int, ...]]
    """For each layer of the model, and `state.stages.REST`, the writers that have it."""
    rows: Pieces | None = None
    """If the optimizer's state is sharded, the rows of weights that this worker writes, with that state."""
    claim: Claim | None = None
    """The controller's claim: without it in the run's folder nothing is written there. None if nobody claims the
    run."""

    def holders_of(self, layer: str) -> tuple[int, ...]:
        """Return the writers that have a layer; those of a model that is never partitioned belong to `REST`."""
        return self.holders.get(layer) or self.holders[REST]

    def first_of(self, layer: str) -> bool:
        """Return whether this worker is the first that has a layer: it writes its values that are not tensors."""
        return self.holders_of(layer)[0] == self.writer

    def own_tree(self, tree: Any) -> Any:
        """Return the values that are not tensors and that this worker writes; None if there are none."""
        if self.rows is not None:
            # The optimizer's values go with the rows.
            return {**own_tree(tree, self.first_of), "optimizer": tree["optimizer"]}
        return own_tree(tree, self.first_of) if any(map(self.first_of, self.holders)) else None


@dataclass(frozen=True, slots=True)
class Buddy:
    """The worker that keeps copies of another worker's state."""

    name: str
    actor: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Reports that a copy of a worker's state is made, and in its buddy's memory."""

    worker: str
    buddy: str
    """Empty if only the worker itself keeps it."""
    generation: int
    step: int
    bytes: int
    stall_s: float
    """Seconds for which the copy held the training up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Charter:
    """What a controller needs to know of a generation to adopt its members, beside what they tell it.

    Each member keeps it, so that it is never older than its generation.
    """

    group: Group
    """The group when it was told to form that generation."""
    number: int
    """The generation's number in events, ledger and checkpoints."""
    first_step: int
    partitions: Mapping[int, tuple[Chunks, ...]]
    """For each number of stages, the layers of each stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A member's part in one generation."""

    generation: int
    layers: Layers
    ring: Invitation
    """The world of the members that hold the same stage."""
    replica: Invitation | None
    """The world of the members of one model replica; None if the replica is one worker."""
    shards: tuple[int, ...]
    first_step: int
    lacks: Lacks | None
    """What the member does not have yet. `Worker.take` gets the references to what others provide."""
    own_copies: tuple[tuple[Stage, tuple[str, ...] | None, tuple[Piece, ...] | None], ...] = ()
    """The parts of that which it has copies of: the stage, and its layers and rows: see `StateSource.snapshot`."""
    gives: int
    """How often other members copy a state from this one."""
    buddy: Buddy | None
    """The worker that keeps copies of its state; None if others hold that state, or if no worker is available."""
    copies: bool
    """Whether its state is copied at all."""
    share: ShareOf
    seat: int
    """Its seat in the group's shape."""
    charter: Charter
    evaluated: int
    """The highest step whose evaluation was reported; -2 if none was."""
    owners: tuple[Pieces, ...] = ()
    """If the optimizer's state is sharded: the rows that each member of its ring holds, by rank."""
    incomplete: bool = False
    """Whether some member may lack weights that others have changed in the step before the first."""
    history: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """The metrics of all reported evaluations that count, by step, if the best of them matters (`Job.best`)."""
    saved: bool = False
    """Whether a complete checkpoint has the state before the first step, with the metric that decides the best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a member came out of a generation."""

    holds: int | None
    """The step whose state it has; None if that is partially applied."""
    why: Why
    stage: Stage | None = None
    """The stage of that state."""
    ready: int | None = None
    """The step after `holds`, if the worker has all sums of that step and has not applied them."""
    copy: int | None = None
    """The newest step of that generation for which it has a copy of that stage."""
    owned: Pieces | None = None
    """If the optimizer's state is sharded: the rows that it holds."""
    complete: bool = True
    """Whether it has the weights of all other rows too."""
    squares: Mapping[str, float] = field(default_factory=dict)
    """The squares of the norms of all gradients of step `holds`, if gradients are clipped."""
    error: RaytrainError | None = None
    fault: str = ""
    """The error and its place, in the same words whenever it recurs; if interrupted, by what, unless it was told to
    leave."""
    final: bool = False
    """The error would recur on every retry."""
    exhausted: bool = False
    """The error is that memory has run out."""
    step: int | None = None
    """The step that the task's code was computing or applying when it raised the error."""
    records: Sequence[Record] = ()
    """Records that had not been reported yet."""
    copied: int = -1
    """The last step of the generation whose state was copied for a checkpoint."""
    saved_as: int = -1
    """The generation's number in the names of checkpoints."""
    state_sha256: str | None = None
    """The hash of the finished state of its stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """Reports that a worker's share of a checkpoint is durable, or could not be written."""

    step: int
    generation: int
    """As in the checkpoint's name."""
    writer: int
    writers: int
    share: Share | None
    tree: Any
    """The part of the state that is not tensors, of the layers and slices that no writer before has."""
    weights: Mapping[str, bool] = field(default_factory=dict)
    """The parameters that this worker holds, and whether the optimizer has a state of each, whoever writes them."""
    metrics: Mapping[str, float]
    """The evaluation metrics of exactly this state."""
    time: float
    """When the copy was made, in Unix seconds by the writer's clock."""
    stall_s: float
    """Seconds for which the copy held the training up."""
    error: str
    """Why there is no share; empty if there is one."""
    outage: Outage | None = None
    """The storage's error, if it did not take the share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptionReport:
    """What a prepared worker tells a controller that adopts it."""

    location: WorkerLocation
    clock_s: float
    """Unix seconds by its clock."""
    ready: PreparedReport
    charter: Charter | None
    """Of the newest generation that it was called into; None if it was in none."""
    joined: bool
    """Whether it was in the worlds of that generation, with the state."""
    inside: bool
    """Whether it has not come out of that generation."""
    outcome: Outcome
    """How it came out of that, with what it holds now and no records; without meaning while it is inside."""
    copies: Sequence[tuple[int, Stage, int]]
    """The steps and stages of which it keeps copies, each with the generation in which it was made."""
    written: Written | None
    """What it has reported of its share of a checkpoint whose end it has not heard of."""
    records: Sequence[tuple[int, Record]]
    """What it has reported, or would have, and no controller has confirmed; each with its generation's number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """Information about an exported model."""

    step: int
    """The step after which it was taken."""
    show: str | None
    """The return value of `Task.show`."""
    state_sha256: str
