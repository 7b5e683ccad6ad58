"""How long JSON Lines take to become Parquet, here and by Ray Data's own read and write, interleaved.

python -m tests.benchmarks.conversion [--gb 1] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def write(file: Path, size: float) -> None:
    """Write so many bytes of rows with a text, a number, a fraction and a short list."""
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, n))) for n in rng.integers(2, 10, 5000)]
    with file.open("w") as out:
        number = 0
        while out.tell() < size:
            texts = rng.choice(words, (1000, 60))
            for text in texts:
                row = {"id": number, "text": " ".join(text), "x": number / 7, "list": [number % 5, number % 7]}
                out.write(json.dumps(row) + "\n")
                number += 1


def ours(file: Path, folder: Path) -> None:
    """Convert the file as a run does."""
    from raytrain_plus.data.convert.conversion import converted

    converted(file, "jsonl", lambda read, of: None, folder)


def ray_data(file: Path, folder: Path) -> None:
    """Convert the file by Ray Data."""
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    start = time.monotonic()
    ray.data.read_json(str(file), lines=True).write_parquet(str(folder))
    print(f"{time.monotonic() - start:.2f} beside its start")


WAYS = {"raytrain_plus": ours, "ray_data": ray_data}


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, file, folder = options.one
        start = time.monotonic()
        WAYS[name](Path(file), Path(folder))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
        print(f"took {time.monotonic() - start:.2f} {peak:.0f}")
        return
    found: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(prefix="conversion-") as made:
        file = Path(made) / "rows.jsonl"
        write(file, options.gb * 1e9)
        for number in range(options.rounds):
            for name in WAYS:
                words = [sys.executable, "-m", "tests.benchmarks.conversion", "--one", name, str(file)]
                told = subprocess.run([*words, f"{made}/{name}{number}"], capture_output=True, text=True, check=True)
                print(f"{name:14} {told.stdout.strip().replace(chr(10), '; ')} MB", flush=True)
                found[name].append(float(told.stdout.split("took ")[1].split()[0]))
    mine, theirs = (statistics.median(found[name]) for name in WAYS)
    print(f"{options.gb:g} GB: {mine:.1f} s here, {theirs:.1f} s by Ray Data with its start: {mine / theirs:.2f}")


if __name__ == "__main__":
    main()
