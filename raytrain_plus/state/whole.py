"""The whole state out of what those have that hold its stages: its hash, and a file of its model. Pure.

A few tensors after the other: nobody has to hold the model, let alone the optimizer's figures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from raytrain_plus.errors import Interrupted
from raytrain_plus.state.entry import Entry
from raytrain_plus.state.tensorfile import header

BATCH = 64 << 20
"""Bytes that are asked for at once; a tensor that is larger comes alone."""

Begin = Callable[[int, tuple[str, ...]], Callable[[], Sequence[Any]]]
"""Begins to get these tensors from the holder with this number; what it returns waits for their bytes."""


class Digest(Protocol):
    """As of `hashlib`."""

    def update(self, data: Any, /) -> None: ...


def model_file(inventories: Sequence[Sequence[Entry]], begin: Begin, digest: Digest) -> Iterator[Any]:
    """The pieces of a safetensors file of the model, while `digest` gets what the hash of the state is of.

    `inventories`: for each holder, what it has; where two have a tensor, it comes from the first. Raises `Interrupted`
    where something else comes than a holder said that it had.
    """
    entries = ordered(inventories)
    model = [entry for _, entry in entries if entry.of_model]
    yield header(
        [(entry.name.partition("/")[2], entry.dtype, entry.shape, entry.size) for entry in model], {"format": "pt"}
    )
    begun: deque[tuple[list[Entry], Callable[[], Sequence[Any]]]] = deque()
    for holder, batch in batches(entries, BATCH):
        # While one is written the next one is on its way.
        begun.append((batch, begin(holder, tuple(entry.name for entry in batch))))
        if len(begun) > 1:
            yield from _taken(*begun.popleft(), digest)
    while begun:
        yield from _taken(*begun.popleft(), digest)


def ordered(inventories: Sequence[Sequence[Entry]]) -> list[tuple[int, Entry]]:
    """Every tensor once, by name, with the number of who gives it."""
    found: dict[str, tuple[int, Entry]] = {}
    for holder, entries in enumerate(inventories):
        for entry in entries:
            found.setdefault(entry.name, (holder, entry))
    return [found[name] for name in sorted(found)]


def batches(entries: Sequence[tuple[int, Entry]], most: int) -> Iterator[tuple[int, list[Entry]]]:
    """Runs of tensors that one holder gives, of up to `most` bytes.

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


def _taken(batch: list[Entry], wait: Callable[[], Sequence[Any]], digest: Digest) -> Iterator[Any]:
    for entry, data in zip(batch, wait(), strict=True):
        if memoryview(data).nbytes != entry.size:
            raise Interrupted(f"{entry.name} came with {memoryview(data).nbytes} bytes, not {entry.size}")
        digest.update(entry.head)
        digest.update(entry.scalar or data)
        if entry.of_model:
            yield data
