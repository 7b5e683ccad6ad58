"""Which cuts of a model fit into the memory of workers. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raytrain_plus.job.settings import Schedule
from raytrain_plus.parallel.pipeline.layout import Chunks, laid_over
from raytrain_plus.parallel.pipeline.partition import Layer
from raytrain_plus.storage.size_text import size_text


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why no cut into so many stages fits."""

    stages: int
    stage: int
    """The largest one, of a cut by time."""
    bytes: int
    """What it takes."""
    room: int
    """What a worker has."""
    layer: str
    """The layer of it that takes the most."""
    layer_bytes: int

    def __str__(self) -> str:
        return (
            f"stage {self.stage} of {self.stages} takes {size_text(self.bytes)}, of which the layer '{self.layer}' "
            f"{size_text(self.layer_bytes)}, and a worker has {size_text(self.room)}"
        )


def within(
    layers: Sequence[Layer], schedule: Schedule, stages: int, microbatches: int, room: int
) -> tuple[Chunks, ...] | Misfit:
    """The chunks of each stage where none takes more than `room` bytes, of a cell of so many microbatches; as
    `layout.laid_over`, if it can be.

    >>> each = [Layer(name, 1.0, size) for name, size in zip("abc", (6, 2, 2))]
    >>> within(each, "1f1b", 2, 2, room=6)
    ((('a',),), (('b', 'c'),))
    >>> print(within(each, "1f1b", 2, 2, room=5))
    stage 0 of 2 takes 6 bytes, of which the layer 'a' 6 bytes, and a worker has 5 bytes
    """
    # Under pipedream there is another version of the weights, too, which are a quarter of what is kept of a layer.
    quarters = 5 if schedule == "pipedream" else 4
    in_flight = _open(schedule, stages, microbatches)
    whole = [replace(layer, bytes=layer.bytes * quarters // 4 + in_flight * layer.activations) for layer in layers]
    found = laid_over(whole, schedule, stages, room)
    if found is not None:
        return found
    sizes = {layer.name: layer.bytes for layer in whole}
    by_time = laid_over(whole, schedule, stages)
    assert by_time is not None, "nothing bounds it"
    takes = [sum(sizes[name] for chunk in chunks for name in chunk) for chunks in by_time]
    if max(takes) <= room:
        # One of a stage's chunks has more than its half.
        return by_time
    stage = takes.index(max(takes))
    layer = max((name for chunk in by_time[stage] for name in chunk), key=lambda name: sizes[name])
    return Misfit(stages, stage, takes[stage], room, layer, sizes[layer])


def _open(schedule: Schedule, stages: int, microbatches: int) -> int:
    """The most microbatches whose activations a chunk holds at once."""
    if stages == 1:
        return 1
    if schedule == "gpipe":
        return microbatches
    # Of two chunks each holds as many as there are stages, too, about.
    return min(microbatches, stages)
