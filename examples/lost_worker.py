"""Train on three workers, kill one, and draw what happened: python -m examples.lost_worker

The run is a real one, on this machine. It is stopped some steps after the replacement has joined.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from examples.lanes import Event, svg
from raytrain_plus import Data, Job, Workers, start

PICTURE = Path(__file__).with_name("lost_worker.svg")
TITLE = "A byte-level GPT on three workers"
STANDBY_S = 25.0
"""Seconds of training before the kill, in which a process gets ready to replace a lost worker."""
SHOWN_S = 6.0
"""Those of them that are drawn."""
AFTER = 60
"""Steps after the replacement has joined."""
LIMIT_S = 100.0
"""Maximum seconds to wait for each stage."""


def main() -> None:
    """Make the run and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=PICTURE, help="file of the picture")
    to = parser.parse_args().to
    with tempfile.TemporaryDirectory(prefix="lost-worker-") as folder:
        to.write_text(svg(events_of_a_loss(Path(folder)), TITLE))
    print(f"wrote {to}")


def events_of_a_loss(folder: Path) -> list[Event]:
    """Return the events of a run in `folder`, one worker of which was killed and replaced, without its first steps."""
    job = Job(
        name="lost_worker",
        task="examples.byte_gpt:ByteGPT",
        args={"width": 64, "depth": 2, "warmup": 5},
        data=Data(path=str(folder / "data" / "train"), prepare="examples.byte_gpt:prepare", batch_size=24, shards=12),
        steps=100_000,
        workers=Workers(min=2, max=3),
        storage=str(folder / "runs"),
    )
    handle = start(job)
    try:
        _until(lambda: handle.events("step_committed"))
        time.sleep(STANDBY_S)
        killed_at = time.time()
        victim = handle.events("view_formed")[-1]["members"][1]
        os.kill(victim["pid"], signal.SIGKILL)
        _until(lambda: handle.events("worker_joined"))
        at = len(handle.events("step_committed"))
        _until(lambda: len(handle.events("step_committed")) > at + AFTER)
    finally:
        handle.stop()
        handle.result(timeout_s=LIMIT_S)
    return [
        event for event in handle.events() if event["kind"] != "step_committed" or event["time"] > killed_at - SHOWN_S
    ]


def _until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the run did not get there within {LIMIT_S:.0f} s")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
