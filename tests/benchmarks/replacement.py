"""Measure the seconds from the SIGKILL of a worker to the next `view_formed` of the full size; the digits are trained.

The next kill comes `--pause` seconds after that.

python -m tests.benchmarks.replacement [--workers 1 2 3 4] [--kills 9] [--pause 10]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raytrain_plus import Data, Elastic, Job, Workers, run
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.storage.folders.local import LocalFolder
from tests.benchmarks.peers.model import end, path_of_modules

REPOSITORY = Path(__file__).parents[2]
NAME = "digits"
LIMIT_S = 180.0
"""Maximum seconds until the group has its full size."""


def drive(folder: Path, workers: int) -> None:
    """Train on a Ray of its own until this process is ended."""
    job = Job(
        name=NAME,
        task="examples.digits:Digits",
        data=Data(path=str(folder / "data/train"), prepare="examples.digits:prepare", batch_size=96, shards=12),
        steps=10_000_000,
        workers=Workers(min=1, max=workers),
        elastic=Elastic(stop_grace_s=3),
        storage=str(folder / "runs"),
    )
    run(job, quiet=True, roots=[REPOSITORY])


def measure(folder: Path, workers: int, kills: int, pause_s: float) -> list[float]:
    """Return the seconds from each kill to the full size."""
    command = [sys.executable, "-m", "tests.benchmarks.replacement", "--drive", str(folder), str(workers)]
    settings = {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled", "PYTHONPATH": path_of_modules()}
    chance, seconds = random.Random(0), []
    with (folder / "output.txt").open("ab") as output:
        driver = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **settings},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            for _ in range(kills):
                awaited(lambda: full(folder, workers, since=0.0), driver)
                time.sleep(pause_s)
                view = awaited(lambda: full(folder, workers, since=0.0), driver)
                killed_at = time.time()
                os.kill(chance.choice(view["members"])["pid"], signal.SIGKILL)
                view = awaited(lambda since=killed_at: full(folder, workers, since), driver)  # type: ignore[misc]
                seconds.append(view["time"] - killed_at)
        finally:
            end(driver, folder)
    return seconds


def full(folder: Path, workers: int, since: float) -> dict[str, Any] | None:
    """Return the newest view if it has all workers and is younger than `since`, in Unix seconds."""
    run_folder = folder / "runs" / NAME
    events = read_events(LocalFolder(run_folder)) if run_folder.is_dir() else []
    views = [event for event in events if event["kind"] == "view_formed" and event["time"] > since]
    return views[-1] if views and len(views[-1]["members"]) == workers else None


def awaited(find: Callable[[], dict[str, Any] | None], driver: subprocess.Popen[bytes]) -> dict[str, Any]:
    """Return what `find` finds within `LIMIT_S`."""
    until = time.monotonic() + LIMIT_S
    while (found := find()) is None:
        if time.monotonic() > until or driver.poll() is not None:
            raise TimeoutError(f"the group did not get its full size within {LIMIT_S:.0f} s, or its driver ended")
        time.sleep(0.1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--kills", type=int, default=9)
    parser.add_argument("--pause", type=float, default=10.0, help="seconds between the full size and the next kill")
    parser.add_argument("--drive", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        drive(Path(options.drive[0]), int(options.drive[1]))
        return
    print(f"seconds from a SIGKILL to the full size, {options.kills} kills each")
    for workers in options.workers:
        with tempfile.TemporaryDirectory(prefix="replacement-") as name:
            seconds = sorted(measure(Path(name), workers, options.kills, options.pause))
        print(f"  of {workers}: median {statistics.median(seconds):.1f}, longest {seconds[-1]:.1f}", flush=True)


if __name__ == "__main__":
    main()
