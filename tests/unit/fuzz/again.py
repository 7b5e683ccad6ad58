"""Fuzz one kind of input for a range of seeds: `python -m tests.unit.fuzz.again jobs 0 20000`.

With one number, run only that seed and print its input. Prints the outcomes, and exits with 1 at the first fault.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.unit.fuzz import folders, jobs, parquet
from tests.unit.fuzz.verdict import tried

KINDS = ("jobs", "parquet", "folders")


@contextlib.contextmanager
def ready(kind: str, folder: Path) -> Iterator[Callable[[int], str]]:
    """Yield a function that tries one seed of a kind; an empty folder is the working directory meanwhile."""
    before = Path.cwd()
    # Two levels down, so that paths with `..` in a job stay inside the folder.
    inside = folder / "in" / "side"
    inside.mkdir(parents=True)
    os.chdir(inside)
    try:
        if kind == "jobs":
            jobs.data_in(inside)
            yield lambda seed: jobs.check(seed, inside)
        elif kind == "parquet":
            bases = parquet.bases_in(inside)
            yield lambda seed: parquet.check(seed, bases)
        else:
            base = folders.base_in(inside)
            yield lambda seed: folders.check(seed, base)
    finally:
        os.chdir(before)


def found(kind: str, first: int, last: int, folder: Path) -> Counter[Any]:
    """Return the outcomes of the seeds from `first` up to, not including, `last`. Raises `Fault`."""
    with ready(kind, folder) as one:
        return Counter(tried(range(first, last), one, kind))


def main() -> None:
    """Fuzz with the arguments of the command line."""
    kind, first, *rest = sys.argv[1:]
    last = int(rest[0]) if rest else int(first) + 1
    if kind == "jobs" and not rest:
        print(jobs.made(int(first)))
    with tempfile.TemporaryDirectory() as folder:
        print(dict(found(kind, int(first), last, Path(folder)).most_common(8)))


if __name__ == "__main__":
    main()
