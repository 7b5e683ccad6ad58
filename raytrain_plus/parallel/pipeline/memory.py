"""Find the partitions of a model that fit into the workers' memory. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from raytrain_plus.job.settings import Schedule
from raytrain_plus.parallel.pipeline.layout import Chunks, partition_layers, result_depends_on_partition
from raytrain_plus.parallel.pipeline.partition import Layer
from raytrain_plus.storage.size_text import size_text

MOMENTS_BYTES = 8
"""Bytes of an optimizer's state for each trained value: two float32 numbers, as a rule."""


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why no partition into that number of stages fits."""

    stages: int
    stage: int
    """The largest stage of the best partition without a limit."""
    bytes: int
    """Bytes that the stage needs."""
    room: int
    """Bytes that a worker has."""
    layer: str
    """The layer of the stage that needs the most."""
    layer_bytes: int

    def __str__(self) -> str:
        return (
            f"stage {self.stage} of {self.stages} needs {size_text(self.bytes)} (the layer '{self.layer}': "
            f"{size_text(self.layer_bytes)}), but a worker has {size_text(self.room)}"
        )


def partition_within_memory(
    layers: Sequence[Layer],
    schedule: Schedule,
    stages: int,
    microbatches: int,
    room: int,
    first_layers: Sequence[str] | None = None,
) -> tuple[Chunks, ...] | Misfit:
    """Return each stage's chunks such that no stage needs more than `room` bytes, or why that is impossible.

    `microbatches`: the number in the model replica. The partition is that of `layout.partition_layers` if it fits.
    Memory does not change one that the job gives, or one on which results depend.

    >>> each = [Layer(name, 1.0, size) for name, size in zip("abc", (6, 2, 2))]
    >>> partition_within_memory(each, "1f1b", 2, 2, room=6)
    ((('a',),), (('b', 'c'),))
    >>> print(partition_within_memory(each, "1f1b", 2, 2, room=5))
    stage 0 of 2 needs 6 bytes (the layer 'a': 6 bytes), but a worker has 5 bytes
    """
    # pipedream keeps one more version of the weights, which are a quarter of a layer's state.
    quarters = 5 if schedule == "pipedream" else 4
    in_flight = most_in_flight(schedule, stages, microbatches)
    whole = [replace(layer, bytes=layer.bytes * quarters // 4 + in_flight * layer.activations) for layer in layers]
    fixed = first_layers is not None or result_depends_on_partition(schedule)
    if not fixed and (found := partition_layers(whole, schedule, stages, room)):
        return found
    sizes = {layer.name: layer.bytes for layer in whole}
    best = partition_layers(whole, schedule, stages, first_layers=first_layers)
    assert best is not None, "there is no memory limit"
    takes = [sum(sizes[name] for chunk in chunks for name in chunk) for chunks in best]
    if max(takes) <= room:
        # If not fixed, one of a stage's chunks needs more than half of the stage's memory.
        return best
    stage = takes.index(max(takes))
    layer = max((name for chunk in best[stage] for name in chunk), key=lambda name: sizes[name])
    return Misfit(stages, stage, takes[stage], room, layer, sizes[layer])


def sharing_optimizer(layers: Sequence[Layer], share: Fraction) -> list[Layer]:
    """Return layers of whose optimizer's state a worker holds only this share: of two numbers for each trained value.

    >>> [layer.bytes for layer in sharing_optimizer([Layer("a", 1.0, 160, parameters=10)], Fraction(1, 4))]
    [100]
    """
    rest = 1 - share
    return [replace(layer, bytes=layer.bytes - int(rest * MOMENTS_BYTES * layer.parameters)) for layer in layers]


def hosting_slices(layers: Sequence[Layer], ranks: int) -> list[Layer]:
    """Return layers of whose tensor slices a worker hosts one share of `ranks`.

    >>> [found] = hosting_slices([Layer("a", 1.0, 160, 10, sliced_bytes=120, sliced_parameters=8)], 4)
    >>> found.bytes, found.parameters
    (70, 4)
    """
    return [
        replace(
            layer,
            bytes=layer.bytes - layer.sliced_bytes + layer.sliced_bytes // ranks,
            parameters=layer.parameters - layer.sliced_parameters + layer.sliced_parameters // ranks,
            copied=layer.copied - layer.sliced_copied + layer.sliced_copied // ranks,
        )
        for layer in layers
    ]


def most_in_flight(schedule: Schedule, stages: int, microbatches: int) -> int:
    """Return the most microbatches whose activations a chunk holds at once."""
    if stages == 1:
        return 1
    if schedule == "gpipe":
        return microbatches
    # With two chunks per stage, each chunk also holds about as many as there are stages.
    return min(microbatches, stages)
