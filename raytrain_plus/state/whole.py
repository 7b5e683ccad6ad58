"""Hash the whole state and write its model to a file, from the workers that hold its stages. Pure.

It fetches a few tensors at a time, so that no process has to hold the model, let alone the optimizer's state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

from raytrain_plus.errors import Interrupted
from raytrain_plus.membership.pieces import Piece, Pieces, assign, union
from raytrain_plus.state.entry import Entry, to_export
from raytrain_plus.state.tensorfile import header

BATCH = 64 << 20
"""Maximum bytes requested at once; a larger tensor is requested alone."""

Begin = Callable[[int, tuple[str, ...]], Callable[[], Sequence[Any]]]
"""Starts to fetch these tensors from the holder with this number; the returned function waits for their bytes."""


class Digest(Protocol):
    """A hash object, as in `hashlib`."""

    def update(self, data: Any, /) -> None: ...


def model_file(inventories: Sequence[Sequence[Entry]], begin: Begin, digest: Digest) -> Iterator[Any]:
    """Yield the pieces of a safetensors file of the model, and update `digest` with the whole state.

    `inventories`: for each holder, the tensors that it has; a tensor that several have comes from one of them. Raises
    `Interrupted` if a holder delivers other sizes than its inventory lists.
    """
    entries = ordered(inventories)
    exported = set(to_export(entry.name for _, entry in entries))
    model = [entry for _, entry in entries if entry.name in exported]
    yield header(
        [(entry.name.partition("/")[2], entry.dtype, entry.shape, entry.size) for entry in model], {"format": "pt"}
    )
    begun: deque[tuple[list[Entry], Callable[[], Sequence[Any]]]] = deque()
    for holder, batch in batches(entries, BATCH):
        # Fetch the next batch while one is being written.
        begun.append((batch, begin(holder, tuple(entry.name for entry in batch))))
        if len(begun) > 1:
            yield from _taken(*begun.popleft(), digest, exported)
    while begun:
        yield from _taken(*begun.popleft(), digest, exported)


def ordered(inventories: Sequence[Sequence[Entry]]) -> list[tuple[int, Entry]]:
    """Return every tensor once, by name, with the number of the holder that delivers it."""
    entries = {entry.name: entry for inventory in inventories for entry in inventory}
    held = {holder: Pieces.of(Piece(entry.name) for entry in inventory) for holder, inventory in enumerate(inventories)}
    given = assign(union(held.values()), held, {name: entry.size for name, entry in entries.items()})
    holders = {name: holder for holder, pieces in given.items() for name in pieces.names}
    return [(holders[name], entries[name]) for name in sorted(entries)]


def batches(entries: Sequence[tuple[int, Entry]], most: int) -> Iterator[tuple[int, list[Entry]]]:
    """Yield runs of tensors from one holder, of up to `most` bytes, as (holder, tensors).

    >>> state = [Entry(name=name, dtype="uint8", shape=(4,), size=4) for name in "abcd"]
    >>> [(holder, [entry.name for entry in batch]) for holder, batch in batches(list(zip((0, 0, 0, 1), state)), 8)]
    [(0, ['a', 'b']), (0, ['c']), (1, ['d'])]
    """
    batch: list[Entry] = []
    giver, size = -1, 0
    for holder, entry in entries:
        if batch and (holder != giver or size + entry.size > most):
            yield giver, batch
            batch, size = [], 0
        giver = holder
        batch.append(entry)
        size += entry.size
    if batch:
        yield giver, batch


def _taken(
    batch: list[Entry], wait: Callable[[], Sequence[Any]], digest: Digest, exported: Collection[str]
) -> Iterator[Any]:
    for entry, data in zip(batch, wait(), strict=True):
        if memoryview(data).nbytes != entry.size:
            raise Interrupted(f"{entry.name} arrived with {memoryview(data).nbytes} bytes, expected {entry.size}")
        digest.update(entry.head)
        digest.update(entry.scalar or data)
        if entry.name in exported:
            yield data
