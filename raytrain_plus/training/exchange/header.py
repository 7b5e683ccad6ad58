"""The header: what all workers must know of a step besides its gradients, as one int64 vector summed once per step.

    shard 0                              shard 1 ...   flags
    start | rows | ids | weight | loss | skipped       pause | save | ...     (`data.ledger.ledger.NOTE`, `Flags`)

Each shard's slots have one writer; every other worker adds zero. So the sum passes the writer's bits to all workers
unchanged. Every worker computes the same loss, in shard order, independent of the ring. The upper half of `rows` holds
the signature of the shard's metrics. The header travels with the first gradient bucket: see `rider`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raytrain_plus.data.ledger.ledger import NOTE
from raytrain_plus.training.exchange.step_metrics import signature

_SLOTS = NOTE.itemsize // 8
_ROW_BITS = 32


class ShardReport(NamedTuple):
    """One shard's report on its part of a step, as in `data.ledger.ledger.NOTE`."""

    start: int
    rows: int = 0
    ids: int = 0
    weight: float = 0.0
    loss: float = 0.0
    skipped: int = 0
    metrics: Mapping[str, float] = MappingProxyType({})
    """The sum of each metric times weight; not part of the note."""

    def plus(
        self, rows: int, ids: int, weight: float, loss: float, metrics: Mapping[str, float] = MappingProxyType({})
    ) -> ShardReport:
        """Return the report with one more microbatch of that mean loss and weight, and these mean metrics.

        Without weight, they are means of nothing, often NaN, and do not count.
        """
        return ShardReport(
            self.start,
            self.rows + rows,
            (self.ids + ids) % 2**64,
            self.weight + weight,
            self.loss + (loss * weight if weight else 0.0),
            self.skipped,
            {name: self.metrics.get(name, 0.0) + (value * weight if weight else 0.0) for name, value in metrics.items()}
            if metrics
            else self.metrics,
        )


class Flags(NamedTuple):
    """Flags that any worker may raise; all workers see them at the same step."""

    pause: bool = False
    """The group must stop at this boundary."""
    save: bool = False
    """A checkpoint of the state after this step is requested."""
    busy: bool = False
    """An earlier checkpoint is still being written."""
    uncopied: bool = False
    """No copy of the state can be made for a buddy: this worker has no buddy, or the previous copy is still being sent.
    """
    forming: bool = False
    """This worker is not ready to sum another way, which all workers begin at once: see `World.forming`."""


_FLAGS = len(Flags._fields) - 1
"""The slots of the flags: the last one is in the upper half of the one before, so that headers keep their length, and
sums over rings their bits."""


def either(flags: Iterable[Flags]) -> Flags:
    """Return the flags that at least one worker raises."""
    return Flags(*map(any, zip(*flags, strict=True)))


def size(shards: int) -> int:
    """Return the length of the header of a job with `shards` shards, without metrics."""
    return shards * _SLOTS + _FLAGS


def encode(reports: dict[int, ShardReport], shards: int, flags: Flags) -> npt.NDArray[np.int64]:
    """Return the header of a worker that hosts the shards in `reports`."""
    header = np.zeros(size(shards), dtype=np.int64)
    notes = header[:-_FLAGS].view(NOTE)
    for shard, report in reports.items():
        notes[shard] = report[:_SLOTS]
        notes["rows"][shard] |= signature(report.metrics) << _ROW_BITS
    header[-_FLAGS:] = flags[:-1]
    header[-1] |= flags.forming << _ROW_BITS
    return header


@dataclass(frozen=True, slots=True)
class StepTotals:
    """The step as every worker sees it after the header is summed."""

    rows: int
    weight: float
    loss: float
    """Mean over all weight, summed in shard order: the same bits on every worker."""
    bad_shards: tuple[int, ...]
    """Shards whose loss or weight is not finite."""
    flags: Flags
    """Flags that at least one worker raised."""
    notes: bytes
    """Each shard's `NOTE`, in shard order."""
    skipped_rows: bytes = b""
    """The rows that were left out, as `data.ledger.ledger.SKIPPED`; not from the header."""
    signatures: Mapping[int, int] = field(default_factory=dict)
    """The signature of the metrics of each shard that has rows."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Means over all weight, summed in shard order."""


def decode(header: npt.NDArray[np.int64]) -> StepTotals:
    """Decode a summed header."""
    notes = header[:-_FLAGS].view(NOTE).copy()
    signatures = (notes["rows"] >> _ROW_BITS).tolist()
    notes["rows"] &= (1 << _ROW_BITS) - 1
    counts = header[-_FLAGS:].tolist()
    rows, weights, losses = (notes[field].tolist() for field in ("rows", "weight", "loss"))
    # Added one at a time, in shard order: NumPy would use its own order.
    weight, loss = sum(weights), sum(losses)
    found = zip(weights, losses, strict=True)
    return StepTotals(
        rows=sum(rows),
        weight=weight,
        loss=loss / weight if weight else float("nan"),
        bad_shards=tuple(shard for shard, both in enumerate(found) if not all(map(math.isfinite, both))),
        flags=Flags(*[bool(count & (1 << _ROW_BITS) - 1) for count in counts])._replace(
            forming=bool(counts[-1] >> _ROW_BITS)
        ),
        notes=notes.tobytes(),
        signatures={shard: signed for shard, signed in enumerate(signatures) if rows[shard]},
    )
