"""Compute what a choice of shape and settings costs: a worker's memory by kind, and the time of a step by part. Pure.

The memory of a state is that of ZeRO (`parallel.state_bytes`), that of activations follows from the order of passes.
The time is that of the slowest stage, the bubble of its schedule laid out in time (`parallel.pipeline.timeline`), and
what sums of gradients take beyond the passes that hide them: rings, as in Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", JPDC 2009.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from typing import get_args

from raytrain_plus.job.setting_types import Sharded
from raytrain_plus.job.settings import Job, Parallel, Schedule
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.parallel.pipeline.layout import Chunks, chunk_stages, partition_layers
from raytrain_plus.parallel.pipeline.memory import Misfit, most_in_flight, partition_within_memory
from raytrain_plus.parallel.pipeline.partition import Layer
from raytrain_plus.parallel.pipeline.timeline import Cost, Orders, gpipe, makespan, one_forward_one_backward, simulate
from raytrain_plus.parallel.sizing import share_of
from raytrain_plus.parallel.state_bytes import NO_STATE, StateSize
from raytrain_plus.planner.layer_profile import LayerProfile, LinkSpeed, Mode, ModelProfile
from raytrain_plus.planner.space import Choice

BUCKET_BYTES, GPU_BUCKET_BYTES = 4 << 20, 64 << 20
"""Bytes of gradients that are summed together: those of `parallel.gradients`, which loads torch."""
BACKWARD = 2 / 3
"""The share of its passes that a layer's backward pass takes."""
HOST_PER_S = 10e9
"""Bytes per second between a GPU and its host, in pinned memory over PCIe, about; and of an optimizer on the host."""
SLICED_SUMS = 4
"""Sums over the workers that share a layer's slices: two in its forward and two in its backward pass."""
MESSAGE_S = 0.0005
"""Seconds that a worker computes to send or take a message between stages, about."""
COPIES = 4
"""Copies of a state that only one replica holds: at most two of a worker's own, and two of another's."""
ROUNDING = 1e-6
"""By how much bounds stay away from what they bound, because sums of parts are rounded."""
HALVINGS = 30
LAID_OUT = 4
"""Microbatches per stage that are laid out in time; more of them add the time of the slowest stage each."""
MOST_PASSES = 500
"""The most forward passes that are laid out; the bubble of more follows from how long stages wait for one another."""
WAITS: Mapping[Schedule, float] = {
    "gpipe": 1.0,
    "1f1b": 1.0,
    "interleaved": 1 / 2,
    "zero-bubble": 1 / 6,
    "pipedream": 0.0,
}
"""The share of its passes of a microbatch that others wait for a stage, before their first and after their last pass.

With two chunks per stage it is half of them; zero-bubble makes backward passes for weights meanwhile.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerMemory:
    """The bytes of the fullest worker, by kind."""

    weights: int
    gradients: int
    masters: int
    optimizer: int
    activations: int
    copies: int
    """Of checkpoints, and for other workers; 0 if they are in the memory of a host beside the GPU."""
    process: int

    @property
    def total(self) -> int:
        """The sum of all."""
        return sum(self.kinds.values())

    @property
    def kinds(self) -> dict[str, int]:
        """The bytes by kind."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """The seconds of a step, by part."""

    compute: float
    """The passes of the slowest stage."""
    bubble: float
    """Waiting for other stages, and for cores that stages share."""
    sums: float
    """Exchange of gradients and weights beyond what passes hide."""
    rest: float
    """The optimizer, and what a step costs beside all this."""

    @property
    def total(self) -> float:
        """The sum of all."""
        return self.compute + self.bubble + self.sums + self.rest


@dataclass(frozen=True, slots=True)
class ChoiceCost:
    """What a choice costs."""

    memory: WorkerMemory
    time: StepTime
    partition: tuple[Chunks, ...] = ()
    """The layers of each stage's chunks; empty for one stage."""


def ring_bytes(size: float, members: int) -> float:
    """Return the bytes that each member of a ring sends to sum `size` bytes: nearly constant in their number.

    >>> [ring_bytes(1.0, members) for members in (1, 2, 4, 1000)]
    [0.0, 1.0, 1.5, 1.998]
    """
    return 2 * (members - 1) / members * size


def ring_s(size: float, members: int, link: LinkSpeed, bucket: int = BUCKET_BYTES) -> float:
    """Return the seconds of a sum over a ring, in buckets."""
    if members == 1 or not size:
        return 0.0
    return link.seconds(ring_bytes(size, members), messages=2 * (members - 1) * max(1.0, size / bucket))


def gather_s(size: float, members: int, link: LinkSpeed, bucket: int = BUCKET_BYTES) -> float:
    """Return the seconds in which each member gets `size` bytes of which all hold equal parts."""
    return ring_s(size, members, link, bucket) / 2


def mfu(operations: float, seconds: float, workers: int, peak: float) -> float:
    """Return the model FLOPs utilisation of a step: `operations` of all workers, and the `peak` of one.

    >>> round(mfu(124e15, 1.0, 1024, 312e12), 3)
    0.388
    """
    return operations / (seconds * workers * peak)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One stage, or a whole model in one: sums over its layers."""

    state: StateSize
    kept: float
    """Bytes that a microbatch keeps."""
    again: float
    """Bytes that the largest layer keeps while it is computed again."""
    seconds: float
    longest: float
    """Seconds of its slowest layer."""
    update_s: float


@dataclass(slots=True)
class CostModel:
    """The costs of choices for a job; those of parts that several choices share are computed once."""

    job: Job
    """The choices change its free settings only."""
    profile: ModelProfile
    rows: int = field(init=False)
    """Rows of a microbatch."""
    apart: bool = field(init=False)
    """Whether a worker's memory is not the host's."""
    _parallels: dict[Sharded, Parallel] = field(init=False)
    _layers: dict[tuple[Mode, int], list[tuple[LayerProfile, _Stage]]] = field(init=False, default_factory=dict)
    _wholes: dict[tuple[Mode, int], _Stage] = field(init=False, default_factory=dict)
    """By the value of `recompute`, and the workers that share slices."""
    _partitions: dict[tuple[Mode, tuple[int, int], Schedule], tuple[tuple[Chunks, ...], list[_Stage]]] = field(
        init=False, default_factory=dict
    )
    _bottlenecks: dict[tuple[Mode, int, int], float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        data, parallel = self.job.data, self.job.parallel
        self.rows = data.batch_size // data.shards // parallel.microbatches
        self.apart = bool(self.job.workers.gpus)
        self._parallels = {sharded: replace(parallel, sharded=sharded) for sharded in get_args(Sharded)}

    @property
    def _bucket(self) -> int:
        return GPU_BUCKET_BYTES if self.apart else BUCKET_BYTES

    def microbatches(self, shape: Shape) -> int:
        """Return those of the fullest replica in a step."""
        return -(-self.job.data.shards // shape.replicas) * self.job.parallel.microbatches

    def crowd(self, workers: int) -> float:
        """Return how many of so many workers share one core, or the cores that one worker uses; at least 1."""
        return max(1.0, min(workers, self.profile.on_one) / self.profile.cores)

    def least_s(self, choice: Choice) -> float:
        """Return seconds that no partition of the model stays below."""
        shape, whole, count = choice.shape, self._whole(choice), self.microbatches(choice.shape)
        stages, schedule, crowd = shape.stages, choice.settings.schedule, self.crowd(shape.size)
        slowest = max(whole.seconds / stages, self._bottleneck(choice, len(chunk_stages(schedule, stages))))
        laid_out = self._laid_out(choice)
        least = max(
            whole.seconds * _least_span(schedule, stages, count) if laid_out else 0.0,
            count * slowest if laid_out else self._filled_s(choice, whole.seconds, slowest),
            self._shared_s(choice, whole.seconds),
        )
        sums = self._exchange_s(choice, whole.state.changed / stages, whole.state.weights / stages) * crowd
        if self._hides_sums(shape):
            # A slower stage takes longer than what it hides.
            least = max(least, (count - BACKWARD) * slowest + sums)
        else:
            least += sums
        if choice.settings.offload == "none":
            least += float(self._share(choice)) * whole.update_s / stages * crowd
        return (least + self.profile.step_s) * (1 - ROUNDING)

    def _bottleneck(self, choice: Choice, chunks: int) -> float:
        """Return seconds that the slowest of so many chunks of layers takes at least, however these are divided."""
        key = (choice.settings.recompute, choice.shape.tensor_ranks, chunks)
        if key not in self._bottlenecks:
            seconds = [stage.seconds for _, stage in self._of_layers(choice)]
            low, high = 0.0, sum(seconds)
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                low, high = (low, middle) if _divides(seconds, chunks, middle) else (middle, high)
            self._bottlenecks[key] = low
        return self._bottlenecks[key]

    def _hides_sums(self, shape: Shape) -> bool:
        """Return whether sums hide behind passes; on shared cores they take time from them."""
        return self.profile.cores >= 2 * min(shape.size, self.profile.on_one)

    def least_bytes(self, choice: Choice) -> float:
        """Return bytes that the fullest worker of no partition stays below."""
        whole = self._whole(choice)
        held = sum(self._held(choice, whole.state).values()) + self._in_flight(choice) * whole.kept
        return (held / choice.shape.stages + self.profile.process_bytes) * (1 - ROUNDING)

    def of(self, choice: Choice, room: float) -> ChoiceCost | Misfit:
        """Return what a choice costs, or why a worker with `room` bytes is too small for it."""
        found = self._priced(choice, *self._fastest(choice))
        if found.memory.total <= room:
            return found
        if choice.shape.stages > 1:
            partition = self._fitting(choice, room)
            if isinstance(partition, Misfit):
                return partition
            found = self._priced(choice, partition, self._stages(choice, partition))
            if found.memory.total <= room:
                return found
        layer, largest = max(self._of_layers(choice), key=lambda one: one[1].state.saved)
        need = found.memory.total
        return Misfit(choice.shape.stages, 0, need, int(room), layer.name, self._bytes(choice, largest))

    def _priced(self, choice: Choice, partition: tuple[Chunks, ...], stages: Sequence[_Stage]) -> ChoiceCost:
        memories = (self._memory(choice, stage) for stage in stages)
        fullest = max(memories, key=lambda memory: memory.total)
        return ChoiceCost(fullest, self._time(choice, stages, partition), partition)

    def _fastest(self, choice: Choice) -> tuple[tuple[Chunks, ...], list[_Stage]]:
        """Return the fastest partition, and its stages; how many replicas there are does not matter."""
        shape, schedule = choice.shape, choice.settings.schedule
        if shape.stages == 1:
            return (), [self._whole(choice)]
        key = (choice.settings.recompute, shape.layout, schedule)
        if key not in self._partitions:
            first = self.job.parallel.first_layers(shape.stages)
            layers = self._as_layers(choice)
            partition = partition_layers(layers, schedule, shape.stages, first_layers=first)
            assert partition is not None, "there is no memory limit"
            self._partitions[key] = partition, self._stages(choice, partition)
        return self._partitions[key]

    def _fitting(self, choice: Choice, room: float) -> tuple[Chunks, ...] | Misfit:
        """Return a partition that fits, as a run makes it."""
        beside = self.profile.process_bytes + int(max(stage.again for _, stage in self._of_layers(choice)))
        shape, schedule = choice.shape, choice.settings.schedule
        found = partition_within_memory(
            self._as_layers(choice),
            schedule,
            shape.stages,
            self.microbatches(shape),
            max(0, int(room) - beside),
            self.job.parallel.first_layers(shape.stages),
        )
        return replace(found, bytes=found.bytes + beside, room=int(room)) if isinstance(found, Misfit) else found

    def _as_layers(self, choice: Choice) -> list[Layer]:
        return [
            Layer(one.name, stage.seconds, self._bytes(choice, stage), activations=int(stage.kept), cost=one.cost)
            for one, stage in self._of_layers(choice)
        ]

    def _stages(self, choice: Choice, partition: tuple[Chunks, ...]) -> list[_Stage]:
        return [self._joined(choice, {name for chunk in chunks for name in chunk}) for chunks in partition]

    def _of_layers(self, choice: Choice) -> list[tuple[LayerProfile, _Stage]]:
        """Return each layer as a stage of its own."""
        mode, ranks = choice.settings.recompute, choice.shape.tensor_ranks
        if (mode, ranks) not in self._layers:
            self._layers[mode, ranks] = [(layer, self._alone(layer, mode, ranks)) for layer in self.profile.layers]
        return self._layers[mode, ranks]

    def _alone(self, layer: LayerProfile, mode: Mode, ranks: int) -> _Stage:
        passes, plain = layer.passes[mode], layer.passes["none"]
        held = 1 - layer.sliced + layer.sliced / ranks
        levels = ranks.bit_length() - 1
        near = self.profile.inside if self.profile.inside is not None and ranks <= self.profile.on_one else None
        link = near or self.profile.link
        summed = SLICED_SUMS * levels * link.seconds(layer.sent.at(self.rows)) if layer.sliced else 0.0
        kept, seconds = passes.kept.at(self.rows), passes.seconds.at(self.rows) * float(held) + summed
        return _Stage(
            state=layer.state.times(held),
            kept=kept * float(held),
            again=max(0.0, plain.kept.at(self.rows) - kept) * float(held),
            seconds=seconds,
            longest=seconds,
            update_s=layer.update_s * float(held),
        )

    def _whole(self, choice: Choice) -> _Stage:
        key = (choice.settings.recompute, choice.shape.tensor_ranks)
        if key not in self._wholes:
            self._wholes[key] = self._joined(choice, {layer.name for layer in self.profile.layers})
        return self._wholes[key]

    def _joined(self, choice: Choice, names: Collection[str]) -> _Stage:
        found = [stage for layer, stage in self._of_layers(choice) if layer.name in names]
        state = sum((stage.state for stage in found), NO_STATE)
        return _Stage(
            state=state if self.profile.layered else replace(state, largest=state.weights + state.gradients),
            kept=sum(stage.kept for stage in found),
            again=max(stage.again for stage in found),
            seconds=sum(stage.seconds for stage in found),
            longest=max(stage.seconds for stage in found),
            update_s=sum(stage.update_s for stage in found),
        )

    def _share(self, choice: Choice) -> Fraction:
        """Return the share of a sharded state that a worker holds."""
        return share_of(self._parallels[choice.settings.sharded], choice.shape.replicas)

    def _held(self, choice: Choice, state: StateSize) -> Mapping[str, int]:
        offloaded = choice.settings.offload == "optimizer"
        return state.held(choice.settings.sharded, self._share(choice), offloaded=offloaded, apart=self.apart)

    def _copies(self, choice: Choice, state: StateSize) -> int:
        if self.apart:
            return 0
        shape = choice.shape
        only = COPIES * state.saved if shape.replicas == 1 and shape.size > 1 else 0
        return max(only, state.saved // shape.replicas)

    def _bytes(self, choice: Choice, stage: _Stage) -> int:
        """Return the bytes of a stage's state, with copies."""
        return sum(self._held(choice, stage.state).values()) + self._copies(choice, stage.state)

    def _memory(self, choice: Choice, stage: _Stage) -> WorkerMemory:
        held = dict(self._held(choice, stage.state))
        if choice.settings.schedule == "pipedream":
            # Passes of older steps use the weights before the newest update.
            held["weights"] += stage.state.weights
        return WorkerMemory(
            **held,
            activations=int(self._in_flight(choice) * stage.kept + stage.again),
            copies=self._copies(choice, stage.state),
            process=self.profile.process_bytes,
        )

    def _in_flight(self, choice: Choice) -> int:
        """Return the microbatches whose activations a worker keeps at once."""
        count = self.microbatches(choice.shape)
        if choice.settings.sharded == "full":
            # All of them pass a layer before they pass the next one.
            return count
        return most_in_flight(choice.settings.schedule, choice.shape.stages, count)

    def _shared_s(self, choice: Choice, replica_s: float) -> float:
        """Return the seconds of all passes if workers of a machine share its cores evenly.

        `replica_s`: those of a microbatch through all stages, on one of the workers that share slices.
        """
        shape = choice.shape
        passes = self.job.data.shards * self.job.parallel.microbatches
        sent_s = 2 * self._crossings(choice) * self._message_s
        return passes * (replica_s + sent_s) / (shape.replicas * shape.stages) * self.crowd(shape.size)

    def _crossings(self, choice: Choice) -> int:
        """Return how often a microbatch passes from one stage to another, in its forward pass."""
        return len(chunk_stages(choice.settings.schedule, choice.shape.stages)) - 1

    @property
    def _message_s(self) -> float:
        """Seconds of a message between stages."""
        return MESSAGE_S + self.profile.link.seconds(max(layer.sent.at(self.rows) for layer in self.profile.layers))

    def _time(self, choice: Choice, stages: Sequence[_Stage], partition: tuple[Chunks, ...]) -> StepTime:
        shape, count = choice.shape, self.microbatches(choice.shape)
        crowd = self.crowd(shape.size)
        slowest = max(stage.seconds for stage in stages)
        span = count * slowest
        if len(stages) > 1:
            span = self._span(choice, partition, slowest)
        span = max(span, self._shared_s(choice, sum(stage.seconds for stage in stages)))
        compute = span if len(stages) == 1 else min(span, count * slowest * crowd)
        sums = max(self._exchange_s(choice, stage.state.changed, stage.state.weights) for stage in stages)
        window = BACKWARD * slowest if self._hides_sums(shape) else 0.0
        least = min(1.0, self._bucket / max(1, max(stage.state.changed for stage in stages)))
        share = float(self._share(choice))
        update = max(self._update_s(choice, stage, share, crowd) for stage in stages)
        return StepTime(
            compute=compute,
            bubble=span - compute,
            sums=max(sums * crowd - window, sums * least),
            rest=self.profile.step_s + update,
        )

    def _span(self, choice: Choice, partition: tuple[Chunks, ...], slowest: float) -> float:
        """Return the seconds from the first pass of a replica to its last."""
        schedule, stages = choice.settings.schedule, choice.shape.stages
        count = self.microbatches(choice.shape)
        seconds = {layer.name: stage.seconds for layer, stage in self._of_layers(choice)}
        places = chunk_stages(schedule, stages)
        rest = [list(chunks) for chunks in partition]
        thirds = [sum(seconds[name] for name in rest[place].pop(0)) / 3 for place in places]
        few = self._laid_out(choice)
        if not few:
            return self._filled_s(choice, sum(seconds.values()), slowest)
        bars = simulate(
            _orders(schedule, stages, few),
            [Cost(third, third, third) for third in thirds],
            self._message_s,
        )
        return makespan(bars) + (count - few) * slowest

    def _laid_out(self, choice: Choice) -> int:
        """Return how many microbatches are laid out in time; 0 if stages or steps are too many for that."""
        schedule, stages = choice.settings.schedule, choice.shape.stages
        count = self.microbatches(choice.shape)
        few = min(count, LAID_OUT * stages)
        if schedule == "interleaved":
            # As many rounds of equally many microbatches as it needs.
            few = min(count, few - few % stages or count)
        passes = len(chunk_stages(schedule, stages)) * few
        return 0 if stages == 1 or schedule == "pipedream" or passes > MOST_PASSES else few

    def _filled_s(self, choice: Choice, replica_s: float, slowest: float) -> float:
        """Return the seconds of a pipeline from how long its stages wait for one another."""
        schedule, count = choice.settings.schedule, self.microbatches(choice.shape)
        # With pipedream, only the first of the steps that are committed together fills the pipeline.
        waits = 1 / self.job.parallel.commit_every if schedule == "pipedream" else WAITS[schedule]
        filling = replica_s - slowest + 2 * self._crossings(choice) * self._message_s
        return count * slowest + waits * filling

    def _exchange_s(self, choice: Choice, changed: float, weights: float) -> float:
        """Return the seconds in which a worker exchanges gradients and weights with those that hold the same stage."""
        replicas, link, bucket = choice.shape.replicas, self.profile.link, self._bucket
        grads = changed
        if self.job.reduction == "exact":
            grads *= 2
        elif self.job.compression != "none":
            grads /= 2
        if choice.settings.sharded == "full":
            # Weights for both passes, and gradients to those that change them.
            return 2 * gather_s(weights, replicas, link, bucket) + gather_s(grads, replicas, link, bucket)
        moved = gather_s(weights, replicas, link, bucket) if choice.settings.sharded == "optimizer" else 0.0
        return ring_s(grads, replicas, link, bucket) + moved

    def _update_s(self, choice: Choice, stage: _Stage, share: float, crowd: float) -> float:
        if choice.settings.offload == "optimizer" and self.apart:
            state = stage.state
            moved = state.gradients + state.weights + 2 * (state.changed + state.kept)
            return share * moved / HOST_PER_S
        return share * stage.update_s * crowd


def _divides(seconds: Sequence[float], parts: int, most: float) -> bool:
    """Return whether layers can be divided into so many parts, in order, that take `most` seconds each at most."""
    used, now = 1, 0.0
    for one in seconds:
        if one > most:
            return False
        if now + one > most:
            used, now = used + 1, 0.0
        now += one
    return used <= parts


def _least_span(schedule: Schedule, stages: int, count: int) -> float:
    """Return the least seconds of `count` microbatches through `stages` stages that take one second together.

    Stage p waits for its first microbatch, and after its last one for the stages before it. The least of the largest of
    those sums is reached if all are equal.
    """
    waits = WAITS[schedule]
    if stages == 1 or not waits:
        return count / stages
    return waits / (1 - (1 - waits / count) ** stages)


@cache
def _orders(schedule: Schedule, stages: int, microbatches: int) -> Orders:
    if schedule == "gpipe":
        return gpipe(stages, microbatches)
    if schedule == "1f1b":
        return one_forward_one_backward(stages, microbatches)
    # Imported here because it loads torch, whose schedules these are.
    from raytrain_plus.parallel.pipeline.schedule import orders

    return orders(schedule, stages, microbatches)
