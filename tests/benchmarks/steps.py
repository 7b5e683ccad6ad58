"""Steps per second: a bare Horovod loop, torch DDP, and this platform; interleaved, two workers, one thread each.

The platform's own loop without Ray and controller stands beside them: what these cost while nothing fails.

python -m tests.benchmarks.steps [--rounds 5] [--models byte_gpt mlp ...]
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raytrain_plus import Job
from raytrain_plus.collective.rendezvous import RendezvousServer
from raytrain_plus.data.prepare import prepare
from raytrain_plus.job.settings import Data, Workers
from raytrain_plus.launch.runner import run
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.storage.local import LocalFolder
from tests.benchmarks.loop import credentials_for

REPOSITORY = Path(__file__).parents[2]
LOOP_S = 300.0

SIZES = {
    "byte_gpt": ("tests.benchmarks.tasks:ByteGPT", 8, 160, 80),
    "mlp": ("tests.benchmarks.tasks:Mlp", 32, 3000, 1500),
    "mlp_20ms": ("tests.benchmarks.tasks:Mlp", 256, 900, 450),
    "paced_20ms": ("tests.benchmarks.tasks:Paced", 64, 900, 450),
}
"""task, rows per shard, steps, of them warm-up"""
COST = ("mlp_20ms", "paced_20ms")
"""Steps of about 20 ms, on which the cost of Ray and controller is measured: while two workers keep both cores busy, so
that whatever else runs takes from them; and while they wait for a device, as workers with GPUs do."""
OWN = "raytrain_plus' loop, no Ray, no controller"


def job(folder: Path, model: str, name: str, *, shards: int, rows: int, workers: int, cache_mb: int = 1024) -> Job:
    task, _, steps, _ = SIZES[model]
    return Job(
        name=name,
        task=task,
        data=Data(path=str(folder / model), batch_size=rows, shards=shards, cache_mb=cache_mb),
        steps=steps,
        workers=Workers(min=workers),
        collective="horovod",
        storage=str(folder / "runs"),
    )


def loop(kind: str, file: Path, warm_up: int, size: int = 2) -> float:
    """Return the seconds per step of a loop without the platform, for its slowest rank."""
    server = RendezvousServer("127.0.0.1", size=size, peers=["127.0.0.1"])
    port = server.start()
    if kind == "ddp":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.benchmarks.loop", kind, str(file)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(port), str(warm_up)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env=credentials_for(server, rank),
        )
        for rank in range(size)
    ]
    try:
        return max(float(json.loads(rank.communicate(timeout=LOOP_S)[0].splitlines()[-1])) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        server.close()


def platform(asked: Job, warm_up: int) -> tuple[float, float]:
    """Return the seconds per step of this platform after warm-up, and the share of them spent waiting for data."""
    result = run(asked, fresh=True, quiet=True, roots=[REPOSITORY])
    assert result.status == "finished", result.error
    events = read_events(LocalFolder(result.path))
    times = [event["time"] for event in events if event["kind"] == "step_committed"]
    return (times[-1] - times[warm_up - 1]) / (len(times) - warm_up), result.data_wait


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raytrain-bench-") as name:
        measure(Path(name), options.rounds, options.models)


def measure(folder: Path, rounds: int, models: Sequence[str]) -> None:
    for model in models:
        prepare("tests.benchmarks.tasks:prepare", folder / model, [REPOSITORY])
    seconds: dict[str, dict[str, list[float]]] = {model: defaultdict(list) for model in models}
    waits: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for model in models:
            _, rows, _, warm_up = SIZES[model]
            base = job(folder, model, model, shards=2, rows=2 * rows, workers=2)
            file = folder / f"{model}.yaml"
            file.write_text(base.to_yaml())
            took = seconds[model]
            took["bare Horovod loop"].append(loop("horovod", file, warm_up))
            took["raytrain_plus"].append(platform(base, warm_up)[0])
            took[OWN].append(loop("own", file, warm_up))
            if model in COST:
                continue
            took["torch DDP"].append(loop("ddp", file, warm_up))
            eight = job(folder, model, f"{model}-8", shards=8, rows=2 * rows, workers=2)
            took["raytrain_plus, 8 shards"].append(platform(eight, warm_up)[0])
            streamed = job(folder, model, f"{model}-streamed", shards=2, rows=2 * rows, workers=2, cache_mb=0)
            each, wait = platform(streamed, warm_up)
            took["raytrain_plus, streamed from Parquet"].append(each)
            waits[model].append(wait)
            alone = job(folder, model, f"{model}-alone", shards=1, rows=rows, workers=1)
            took["raytrain_plus, one worker, half the batch"].append(platform(alone, warm_up)[0])
    for model in models:
        report(model, seconds[model], waits[model])


def report(model: str, seconds: dict[str, list[float]], waits: list[float]) -> None:
    """Print medians over rounds; ratios are taken round by round, because the machine's speed drifts."""
    bare = seconds["bare Horovod loop"]
    print(f"\n{model}: two workers, one thread each, medians of {len(bare)} interleaved rounds")
    print(f"  {'':44}{'steps/s':>9}{'of bare Horovod':>17}{'  (range)'}")
    for name, values in seconds.items():
        ratios = [b / v for b, v in zip(bare, values, strict=True)]
        spread = f"  ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"  {name:44}{1 / statistics.median(values):9.1f}{statistics.median(ratios):17.3f}{spread}")
    both = seconds["raytrain_plus"]
    if model in COST:
        cost: Any = statistics.median(b / a - 1 for a, b in zip(seconds[OWN], both, strict=True))
        print(f"  Ray and controller cost {100 * cost:.1f} % of a step")
        return
    alone = seconds["raytrain_plus, one worker, half the batch"]
    weak: Any = statistics.median(a / b for a, b in zip(alone, both, strict=True))
    print(f"  weak scaling from 1 to 2 workers: {weak:.3f} of ideal")
    print(f"  streamed: {100 * statistics.median(waits):.2f} % of step time waiting for data")


if __name__ == "__main__":
    main()
