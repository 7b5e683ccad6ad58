"""Find the rows that a run skipped, for the audit: which they are, and whether they contradict each other.

A row that was skipped cannot be used, whoever reads it. Without `data.transform`, what is done to a row is the same in
all epochs, so a row that was skipped in one epoch and used in another is a fault: one of the two reads was wrong. The
transform's generator has another key in each epoch, so a transform may refuse a row in one of them only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raytrain_plus.audit.audit_faults import KEPT, Faults
from raytrain_plus.audit.audit_order import ExpectedOrder, Ints, Skips, Words


@dataclass(frozen=True, slots=True)
class SkippedRows:
    """The rows that were due and skipped."""

    times: int = 0
    """How often a row was skipped, in all epochs."""
    rows: int = 0
    """The number of different rows."""
    named: tuple[str, ...] = ()
    """The first `KEPT` of these."""


def find_skipped(
    expected: ExpectedOrder, entries: npt.NDArray[Any], due_to: int, faults: Faults, *, transformed: bool
) -> SkippedRows:
    """Return the rows that right `entries` up to step `due_to` skipped; report those that another epoch used.

    `transformed`: whether the job has a `data.transform`.
    """
    times, rows, named = 0, 0, list[str]()
    for order, own, skips, due in expected.by_source(entries, due_to):
        if not len(skips):
            continue
        ids = order.ids_between(skips["shard"], skips["position"], skips["position"] + 1)
        kinds, firsts = np.unique(ids, return_index=True)
        times, rows = times + len(skips), rows + len(kinds)
        for first in np.sort(firsts)[: KEPT - len(named)].tolist():
            named.append(order.row_named(int(skips["shard"][first]), int(skips["position"][first]), ids[first]))
        if not transformed:
            found = list(_used_too(order, own, skips, kinds, due))
            faults.add_many(len(found), found)
    return SkippedRows(times, rows, tuple(named))


def _used_too(order: ExpectedOrder, entries: npt.NDArray[Any], skips: Skips, ids: Words, due: Ints) -> Iterator[str]:
    """Yield a description of each row among `ids` that an epoch used."""
    skipped = set(zip(skips["shard"].tolist(), skips["position"].tolist(), strict=True))
    entries = entries[np.lexsort((entries["start"], entries["shard"]))]
    starts = [entries["start"][entries["shard"] == shard] for shard in range(order.shards)]
    ends = [one["start"] + one["rows"] for one in (entries[entries["shard"] == shard] for shard in range(order.shards))]
    for epoch, shard, position, row in order.places_of(ids, due):
        entry = int(np.searchsorted(starts[shard], position, side="right")) - 1
        covered = entry >= 0 and position < ends[shard][entry]
        if covered and (shard, position) not in skipped:
            yield (
                f"{order.row_named(shard, position, row)} was used in epoch {epoch} and skipped in another one, "
                "although it is read alike in all epochs"
            )
