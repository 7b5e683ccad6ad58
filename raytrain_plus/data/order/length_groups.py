"""Lay the items of a dataset out in blocks of similar length, so that little of a batch is padding.

The scattered order of the items is cut into windows of `WINDOW` global batches, and each window sorted by length, the
longest first. Blocks are cut from that. What an epoch does with blocks is as ever: it permutes them, and the rows
inside each. So a microbatch has rows of one block or two, every row is used once an epoch, and the audit needs no
lengths.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints = npt.NDArray[np.int64]
WINDOW = 50
"""Global batches that are sorted together, as `transformers.Trainer` does."""
BATCHES = 8
"""Microbatches of a block: more would keep the same rows together, fewer pad more where two blocks meet."""


@dataclass(frozen=True, slots=True, eq=False)
class LengthGroups:
    """Which item is at each position, in blocks of similar length."""

    column: str
    """The column that says the length."""
    block: int
    """Positions of a block."""
    order: Ints
    """The item at each position."""

    @property
    def sha256(self) -> str:
        """The hash of the order and the size of its blocks."""
        return hashlib.sha256(self.order.astype("<i8").tobytes() + b"%d" % self.block).hexdigest()


def length_groups(column: str, lengths: Ints, scattered: Ints, batch_size: int, microbatch: int) -> LengthGroups:
    """Return the groups of items of these lengths. `scattered`: the items in an order without meaning.

    >>> found = length_groups("ids", np.array([5, 1, 9, 3]), np.array([2, 0, 3, 1]), batch_size=2, microbatch=1)
    >>> found.order.tolist(), found.block
    ([2, 0, 3, 1], 8)
    """
    block = BATCHES * microbatch
    # Whole blocks.
    window = -(-WINDOW * batch_size // block) * block
    order = scattered.copy()
    for start in range(0, len(order), window):
        inside = order[start : start + window]
        order[start : start + window] = inside[np.argsort(-lengths[inside], kind="stable")]
    return LengthGroups(column, block, order)


def lengths_in(values: pa.ChunkedArray) -> Ints | None:
    """Return the length of each value of a column: of lists and texts how many they hold, of numbers themselves.

    None if the column has neither; a missing value has the length 0.
    """
    held = values.type
    if pa.types.is_integer(held):
        found = values
    elif pa.types.is_string(held) or pa.types.is_large_string(held):
        found = pc.utf8_length(values)
    elif pa.types.is_list(held) or pa.types.is_large_list(held) or pa.types.is_fixed_size_list(held):
        found = pc.list_value_length(values)
    else:
        return None
    return np.asarray(found.fill_null(0).to_numpy(), dtype=np.int64)
