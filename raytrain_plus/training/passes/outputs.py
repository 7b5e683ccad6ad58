"""Gather the values of held-out rows, and have one worker summarise them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import torch

from raytrain_plus.errors import TrainingError
from raytrain_plus.task import Task
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.passes.metric_sums import MetricSums, Outputs, numbers

PADDING = -100
"""What fills rows of numbers up to the longest one: a label that losses leave out."""


def summarise(task: Task, sums: MetricSums, context: StepContext, *, shards: int, step: int) -> dict[str, float]:
    """Return what the task's `summarise` returns for all held-out rows, on every member of the world.

    Raises `TrainingError` if batches have different outputs, or none, or `summarise` returns anything but numbers.
    """
    outputs = _gathered(sums, context, shards, step)
    found = b""
    if outputs is not None:
        context.control.enter("computing")
        found = json.dumps(numbers(task.summarise(outputs))).encode()
        context.control.enter("collective")
    what = f"the summary of the evaluation after step {step}"
    length = torch.tensor([len(found)])
    context.reduce(length, "evaluation.summary.length", what, "max")
    told = torch.zeros(int(length), dtype=torch.int64)
    told[: len(found)] = torch.from_numpy(np.frombuffer(found, dtype=np.uint8).astype(np.int64))
    context.reduce(told, f"evaluation.summary.{len(told)}", what)
    decoded: dict[str, float] = json.loads(bytes(told.tolist()))
    return decoded


def forms(sums: MetricSums) -> list[str]:
    """Return each output's name, dtype and dimensions of a row, by name. Raises `TrainingError` if batches differ.

    Rows of numbers below 0 may be longer in some batches: see `padded`.
    """
    found: list[str] | None = None
    for batches in sums.outputs.values():
        for outputs in batches:
            form = [f"{name} ({outputs[name].dtype}, {_dimensions(outputs[name])})" for name in sorted(outputs)]
            if found is not None and form != found:
                one, other = ", ".join(found) or "none", ", ".join(form) or "none"
                raise TrainingError(f"evaluate returned different values of rows for different batches: {one}; {other}")
            found = form
    return found or []


def _dimensions(rows: torch.Tensor) -> str:
    shape = tuple(rows.shape[1:])
    return f"{len(shape)} dimensions" if shape and _holds(rows.dtype) else str(shape)


def _holds(dtype: torch.dtype) -> bool:
    """Return whether numbers of this type can be `PADDING`."""
    return dtype.is_floating_point or (dtype.is_signed and not dtype.is_complex)


def padded(rows: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Return rows whose dimensions have these lengths: what is added at their ends is `PADDING`.

    >>> padded(torch.tensor([[1, 2]]), [3]).tolist()
    [[1, 2, -100]]
    """
    added = [
        pair for old, new in zip(reversed(rows.shape[1:]), reversed(lengths), strict=True) for pair in (0, new - old)
    ]
    return torch.nn.functional.pad(rows, added, value=PADDING) if any(added) else rows


def _lengths(batches: Sequence[Outputs], names: Sequence[str], context: StepContext, step: int) -> list[list[int]]:
    """Return the largest lengths of each output's dimensions, over all members."""
    own = [[max(sizes) for sizes in zip(*(one[name].shape[1:] for one in batches), strict=True)] for name in names]
    found = torch.tensor([length for lengths in own for length in lengths], dtype=torch.int64)
    if len(found):
        context.reduce(found, "evaluation.lengths", f"the evaluation after step {step}", "max")
    every = iter(found.tolist())
    return [[next(every) for _ in lengths] for lengths in own]


def _gathered(sums: MetricSums, context: StepContext, shards: int, step: int) -> Outputs | None:
    """Return all outputs in the order of rows on the first member, None on the others."""
    world = context.world
    batches = [outputs for shard in sorted(sums.outputs) for outputs in sums.outputs[shard]]
    if not batches or not batches[0]:
        raise TrainingError(
            "the task defines summarise, but evaluate returned no values of rows: return tensors whose first dimension "
            "is the rows of the batch"
        )
    names = sorted(batches[0])
    # Each shard's rows, and its member, have one writer.
    places = torch.zeros(2, shards, dtype=torch.int64)
    for shard, rows in sums.rows.items():
        places[0, shard], places[1, shard] = rows, world.rank
    context.reduce(places, "evaluation.rows", f"the evaluation after step {step}")
    rows, members = places.tolist()
    most = max(sum(rows[shard] for shard in range(shards) if members[shard] == rank) for rank in range(world.size))
    found = {}
    for number, (name, lengths) in enumerate(zip(names, _lengths(batches, names, context, step), strict=True)):
        own = torch.cat([padded(outputs[name], lengths) for outputs in batches])
        row = own[:1].reshape(-1).view(torch.uint8).numel()
        sent = torch.zeros(most, row, dtype=torch.uint8)
        sent[: len(own)] = own.reshape(-1).view(torch.uint8).view(len(own), row)
        every = torch.empty(world.size, most, row, dtype=torch.uint8)
        if row:
            work = world.gather(sent, every, f"evaluation.outputs.{number}")
            context.wait([work], f"the outputs '{name}' of the evaluation after step {step}")
        if world.rank == 0:
            found[name] = _ordered(every, rows, members).view(own.dtype).view(sum(rows), *own.shape[1:])
    return found if world.rank == 0 else None


def _ordered(every: torch.Tensor, rows: Sequence[int], members: Sequence[int]) -> torch.Tensor:
    """Return the bytes of all rows in the order of shards, given those that each member has, in that order."""
    taken = [0] * len(every)
    parts = []
    for count, member in zip(rows, members, strict=True):
        parts.append(every[member, taken[member] : taken[member] + count])
        taken[member] += count
    return torch.cat(parts).reshape(-1)
