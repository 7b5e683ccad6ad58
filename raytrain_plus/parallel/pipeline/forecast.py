"""Forecast the cost of a partition: each stage's layers, parameters, memory and time, and the schedule's bubble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raytrain_plus.job.settings import Schedule
from raytrain_plus.parallel.pipeline.layout import Chunks, chunk_stages, partition_layers
from raytrain_plus.parallel.pipeline.partition import Layer
from raytrain_plus.parallel.pipeline.schedule import orders
from raytrain_plus.parallel.pipeline.timeline import Cost, bubble, most_open_passes, simulate


@dataclass(frozen=True, slots=True)
class StageForecast:
    """One stage of a model replica."""

    layers: Chunks
    parameters: int
    bytes: int
    """Parameters, gradients, optimizer state, and the activations of all microbatches in flight at once."""
    state_bytes: int
    """Parameters and optimizer state: the approximate size of a copy."""
    seconds: float
    """Forward and backward pass of one microbatch."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """One step of a model replica."""

    schedule: Schedule
    microbatches: int
    """Microbatches of the whole replica."""
    stages: tuple[StageForecast, ...]
    bubble: float
    """The share of the stages' time spent waiting."""
    given: bool = False
    """Whether the job gives the partition."""


def forecast(
    layers: Sequence[Layer],
    schedule: Schedule,
    stages: int,
    microbatches: int,
    first_layers: Sequence[str] | None = None,
) -> Forecast:
    """Return the forecast for a model replica with these stages and microbatches.

    `first_layers`: those of all chunks, if the job gives them. Assumes that a backward pass takes two thirds of a
    layer's time, half of that for its weights, and that transfers take no time.
    """
    by_name = {layer.name: layer for layer in layers}
    partition = partition_layers(layers, schedule, stages, first_layers=first_layers)
    assert partition is not None, "there is no memory limit"
    order = orders(schedule, stages, microbatches)
    found = []
    costs: dict[int, Cost] = {}
    where = chunk_stages(schedule, stages)
    for stage, chunks in enumerate(partition):
        own = [by_name[name] for chunk in chunks for name in chunk]
        open_at_once = most_open_passes(order[stage]) / len(chunks)
        found.append(
            StageForecast(
                layers=chunks,
                parameters=sum(layer.own_parameters for layer in own),
                bytes=sum(layer.bytes for layer in own) + round(open_at_once * sum(layer.activations for layer in own)),
                # Of the four values counted per parameter, all except the gradient.
                state_bytes=sum(layer.bytes for layer in own) * 3 // 4,
                seconds=sum(layer.seconds for layer in own),
            )
        )
        numbers = [number for number, holder in enumerate(where) if holder == stage]
        for number, chunk in zip(numbers, chunks, strict=True):
            third = sum(by_name[name].seconds for name in chunk) / 3
            costs[number] = Cost(third, third, third)
    bars = simulate(order, [costs[number] for number in sorted(costs)])
    return Forecast(schedule, microbatches, tuple(found), bubble(bars, stages), first_layers is not None)
