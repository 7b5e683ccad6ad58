"""The metrics that the task's loss returns: their sums on each shard, and their means over a step. Pure.

Each shard's values have one writer and are added in shard order, as the losses are, so their means do not depend on the
number of workers. They follow the header in a step's first bucket. How much room they have there is a part of the
state: as many as the most metrics of any step so far. So workers that have the same state agree on it. A step with more
metrics than that (the first one) sums them separately.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raytrain_plus.errors import TrainingError

Table = npt.NDArray[np.float64]
"""A row for each shard, a column for each metric."""


@dataclass(slots=True)
class OwnMetrics:
    """The metrics of the shards that one replica hosts, in one step."""

    names: tuple[str, ...] = ()
    """In the order of the columns."""
    sums: Table | None = None
    """For each shard, the sums of metric times weight; zero for shards of other replicas. None without metrics."""


def signature(names: Iterable[str]) -> int:
    """Return a number of 31 bits for these names: their count, and a checksum; 0 for none."""
    ordered = sorted(names)
    if not ordered:
        return 0
    return len(ordered) << 24 | zlib.crc32("\0".join(ordered).encode()) & 0xFFFFFF


def number_of(signatures: Mapping[int, int]) -> int:
    """Return how many metrics the shards with these signatures have."""
    return max((signed >> 24 for signed in signatures.values()), default=0)


def own_metrics(by_shard: Mapping[int, Mapping[str, float]], shards: int) -> OwnMetrics:
    """Return the metrics of the hosted shards, given each one's sums.

    If they have different names, `check_same` finds it when all shards are known.
    """
    names = tuple(sorted({name for of_shard in by_shard.values() for name in of_shard}))
    if not names:
        return OwnMetrics()
    sums = np.zeros((shards, len(names)))
    for shard, of_shard in by_shard.items():
        sums[shard] = [of_shard.get(name, 0.0) for name in names]
    return OwnMetrics(names, sums)


def check_same(signatures: Mapping[int, int], step: int) -> None:
    """Raise `TrainingError` if shards have metrics of different names."""
    first = min(signatures, default=0)
    for shard, signed in signatures.items():
        if signed != signatures[first]:
            raise differing(step, shard, f"for shard {first}")


def differing(step: int, shard: int, other: str) -> TrainingError:
    """Return the error of a shard for which the loss returned other names than elsewhere."""
    return TrainingError(
        f"the loss returned metrics of other names for shard {shard} in step {step} than {other}: it must return the "
        "same names for every microbatch of a step; return NaN for a metric that a microbatch lacks"
    )


def means(names: Sequence[str], sums: Table, weight: float) -> dict[str, float]:
    """Return the mean of each metric over the weight of all shards, added in shard order.

    Columns after those of `names` are empty.
    """
    columns = sums.T.tolist()
    return {
        name: sum(column) / weight if weight else float("nan") for name, column in zip(names, columns, strict=False)
    }
