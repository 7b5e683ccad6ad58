"""Show how far a conversion of data is: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TextIO

import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from raytrain_plus.storage.size_text import size_text

EVERY_S = 5.0
"""Seconds between two lines."""
SHORT_S = 1.0
"""A conversion that takes less than these seconds shows nothing."""


class Told(Protocol):
    """Shows how many bytes of a source are read, and how many there are. `copying`: they are copied first."""

    def __call__(self, read: int, of: int, *, copying: bool = False) -> None: ...


@contextmanager
def conversion_view(
    stream: TextIO, name: str, again: bool, verb: tuple[str, str] = ("converting", "converted"), into: str = "Parquet"
) -> Iterator[Told]:
    """Yield a function that shows how many bytes of a source are read, and how many there are.

    `again`: the source has changed since it was converted. `verb`: what is done, and was done. `into`: what it becomes.
    The last line says what the conversion took.
    """
    doing, done = verb
    start = last = time.monotonic()
    total = 0
    what = shown = f"{doing} {name} to {into}"
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(),
        console=Console(file=stream), transient=True, disable=not stream.isatty(),
    )  # fmt: skip
    task = bar.add_task(what, total=None)

    def told(read: int, of: int, *, copying: bool = False) -> None:
        nonlocal last, total, start, shown
        if shown != (shown := f"copying {name}" if copying else what):
            # The speed is that of the conversion alone.
            start = time.monotonic()
        # Another process may convert it instead.
        if not total and again:
            print(f"{name} has changed since it was {done}: {doing} it again", file=stream, flush=True)
        if not total:
            bar.start()
        total, now = of, time.monotonic()
        bar.update(task, completed=read, total=of, description=shown)
        if bar.disable and now - last >= EVERY_S:
            last = now
            rate = size_text(int(read / (now - start)))
            print(f"{shown}: {size_text(read)} of {size_text(of)}, {rate}/s", file=stream, flush=True)

    try:
        yield told
    finally:
        bar.stop()
    took = time.monotonic() - start
    if total and took >= SHORT_S:
        most = size_text(pa.default_memory_pool().max_memory() or 0)
        print(
            f"{done} {name}, {size_text(total)}, in {took:.1f} s with up to {most} of memory",
            file=stream,
            flush=True,
        )


@contextmanager
def reading_view(stream: TextIO, name: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows how many items of a dataset without an index have been read.

    Nothing is shown if it is never called, as when they have been read before.
    """
    start = last = time.monotonic()
    total = 0

    def told(read: int) -> None:
        nonlocal last, total
        if not total:
            print(f"reading {name} once, into Parquet, because it has no index", file=stream, flush=True)
        total, now = read, time.monotonic()
        if now - last >= EVERY_S:
            last = now
            print(f"reading {name}: {read:,} rows, {read / (now - start):,.0f}/s", file=stream, flush=True)

    yield told
    if total:
        print(f"read {name}: {total:,} rows in {time.monotonic() - start:.1f} s", file=stream, flush=True)
