"""Assign a model's chunks to stages under each schedule, and check each schedule's requirements. Pure."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping, Sequence

from raytrain_plus.job.settings import Schedule
from raytrain_plus.parallel.pipeline.partition import Layer, LayerSpan, balanced_spans

MICROBATCHES = 1 << 16
"""Above the most microbatches that a replica can number between synchronisations of its stages."""


def chunk_stages(schedule: Schedule, stages: int) -> tuple[int, ...]:
    """Return, for each chunk of the model in order, the stage that has it.

    >>> chunk_stages("1f1b", 3), chunk_stages("interleaved", 3), chunk_stages("zero-bubble", 3)
    ((0, 1, 2), (0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    once = tuple(range(stages))
    if schedule == "interleaved":
        return once + once
    return once + once[::-1] if schedule == "zero-bubble" else once


def directions(schedule: Schedule, stages: int, ranks: int) -> list[tuple[int, int]]:
    """Return who sends tensors to whom in a model replica: (sender, receiver), by position.

    Stages whose chunks follow each other exchange activations and their gradients, among workers of one of the `ranks`;
    those of a stage exchange what `tensor.link` sums.

    >>> directions("1f1b", 3, 1), directions("1f1b", 1, 2)
    ([(0, 1), (1, 0), (1, 2), (2, 1)], [(0, 1), (1, 0)])
    >>> directions("interleaved", 3, 1)[-2:], len(directions("1f1b", 2, 4))
    ([(2, 0), (2, 1)], 24)
    """
    neighbours = itertools.pairwise(chunk_stages(schedule, stages))
    pairs = {(one * ranks + rank, other * ranks + rank) for one, other in neighbours for rank in range(ranks)}
    distances = [1 << level for level in range(ranks.bit_length() - 1)]
    positions = range(stages * ranks)
    # Positions of a stage differ in the lowest bits only.
    pairs |= {(one, one - one % ranks + (one % ranks ^ distance)) for one in positions for distance in distances}
    return sorted({pair for one, other in pairs if one != other for pair in ((one, other), (other, one))})


def result_depends_on_partition(schedule: Schedule) -> bool:
    """Return whether another partition trains differently; the partition must then be the same in every run."""
    return schedule == "pipedream"


def splits(schedule: Schedule) -> bool:
    """Return whether backward passes come in two parts."""
    return schedule == "zero-bubble"


def schedule_fault(schedule: Schedule, stages: int, microbatches: int) -> str:
    """Return why a model replica cannot use this schedule; empty if it can.

    `microbatches`: the number between two synchronisations of its stages.

    >>> schedule_fault("1f1b", 4, 3)
    '1f1b needs at least as many microbatches per replica as stages: 4, not 3'
    """
    if schedule in ("1f1b", "pipedream") and microbatches < stages:
        return f"{schedule} needs at least as many microbatches per replica as stages: {stages}, not {microbatches}"
    if schedule == "interleaved" and microbatches % max(1, microbatches // stages):
        rounds = microbatches // stages
        return f"interleaved needs a number of microbatches per replica divisible by {rounds}, not {microbatches}"
    if microbatches >= MICROBATCHES:
        return f"a replica can run at most {MICROBATCHES - 1} microbatches together, not {microbatches}"
    return ""


Chunks = tuple[tuple[str, ...], ...]
"""The layers of each of a stage's chunks, by name, in order."""


def first_layers_fault(first: Sequence[str], layers: Sequence[str]) -> str:
    """Return why the chunks of a model with these layers cannot begin with the layers `first`; empty if they can.

    >>> first_layers_fault(["embed", "blok1"], ["embed", "block1", "head"])
    "the model has no layer 'blok1'; the nearest name is 'block1'"
    >>> first_layers_fault(["block1", "head"], ["embed", "block1", "head"])
    "'block1' is not the model's first layer, which is 'embed'"
    >>> first_layers_fault(["embed", "head", "block1"], ["embed", "block1", "head"])
    "'block1' does not come after 'head' in the model, but before it"
    """
    for name in first:
        if name not in layers:
            [near] = difflib.get_close_matches(name, layers, 1, cutoff=0.0)
            return f"the model has no layer '{name}'; the nearest name is '{near}'"
    if first[0] != layers[0]:
        return f"'{first[0]}' is not the model's first layer, which is '{layers[0]}'"
    for before, after in itertools.pairwise(first):
        if before == after:
            return f"'{after}' is named twice"
        if layers.index(after) < layers.index(before):
            return f"'{after}' does not come after '{before}' in the model, but before it"
    return ""


def partition_layers(
    layers: Sequence[Layer],
    schedule: Schedule,
    stages: int,
    most_bytes: int | None = None,
    first_layers: Sequence[str] | None = None,
) -> tuple[Chunks, ...] | None:
    """Return each stage's chunks for the partition whose slowest chunk is fastest; with pipedream, by counted costs.

    `first_layers`: those of all chunks, if the job gives them; then the partition is theirs, and `most_bytes` is not
    used. Otherwise returns None if no such partition keeps every stage within `most_bytes`, which is divided equally
    among its chunks. Raises `ValueError` if there are fewer layers than chunks.

    >>> each = [Layer(name, 1.0, 0) for name in "abcd"]
    >>> partition_layers(each, "1f1b", 2), partition_layers(each, "zero-bubble", 2)
    (((('a', 'b'),), (('c', 'd'),)), ((('a',), ('d',)), (('b',), ('c',))))
    >>> partition_layers(each, "1f1b", 2, first_layers=("a", "d"))
    ((('a', 'b', 'c'),), (('d',),))
    """
    where = chunk_stages(schedule, stages)
    order = [layer.name for layer in layers]
    if first_layers is not None:
        borders = [*(order.index(name) for name in first_layers), len(order)]
        spans: tuple[LayerSpan, ...] | None = tuple(itertools.pairwise(borders))
    else:
        most = None if most_bytes is None else most_bytes * stages // len(where)
        spans = balanced_spans(layers, len(where), most, counted=result_depends_on_partition(schedule))
    if spans is None:
        return None
    names = [tuple(order[first:last]) for first, last in spans]
    return tuple(
        tuple(chunk for chunk, holder in zip(names, where, strict=True) if holder == stage) for stage in range(stages)
    )


def tied_groups(tied: Mapping[str, str]) -> list[list[str]]:
    """Return groups of tied parameters from copy -> owner; each group in the order of names.

    >>> tied_groups({"head.out": "embed.in", "mid.out": "embed.in"})
    [['embed.in', 'head.out', 'mid.out']]
    """
    groups: dict[str, list[str]] = {}
    for copy, owner in tied.items():
        groups.setdefault(owner, [owner]).append(copy)
    return [sorted(names) for _, names in sorted(groups.items())]
