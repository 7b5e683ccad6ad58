"""Which rows of a step were left out (`data.on_error: skip`), as every worker must know them for the ledger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from raytrain_plus.data.ledger.ledger import NOTE, SKIPPED
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import TrainingError
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.header import StepTotals


def skipped_rows(
    step: int,
    totals: StepTotals,
    shards: Mapping[int, Sequence[Microbatch]],
    context: StepContext,
    device: torch.device,
) -> bytes:
    """Return the `SKIPPED` rows of all shards of a step, given the microbatches of those hosted here.

    All members know from the header whether there are any: only then does this cost a reduction. Raises `TrainingError`
    if no shard has another row.
    """
    notes = np.frombuffer(totals.notes, NOTE)
    most = int(notes["skipped"].max())
    if not most:
        return b""
    if not totals.rows:
        raise _nothing_left(step, shards)
    table = torch.zeros(len(notes), most, dtype=torch.float64)
    for hosted, microbatches in shards.items():
        # One writer each, and every other member adds zero: so a place is counted from 1.
        places = sorted(position - microbatches[0].start + 1 for one in microbatches for position in one.skipped)
        table[hosted, : len(places)] = torch.tensor(places, dtype=torch.float64)
    table = table.to(device)
    context.reduce(table, "skipped", f"the skipped rows of step {step}")
    places_of = table.cpu().numpy().astype(np.int64)
    shard, column = np.nonzero(places_of)
    found = np.empty(len(shard), SKIPPED)
    found["shard"], found["offset"] = shard, places_of[shard, column] - 1
    return found.tobytes()


def _nothing_left(step: int, shards: Mapping[int, Sequence[Microbatch]]) -> TrainingError:
    causes = [why for microbatches in shards.values() for one in microbatches for why in one.skipped.values()]
    return TrainingError(
        f"data.on_error: skip leaves no row in any shard of step {step}, so there is nothing to train on; correct the "
        f"rows, or the function that cannot use them{': ' * bool(causes)}{''.join(causes[:1])}"
    )
