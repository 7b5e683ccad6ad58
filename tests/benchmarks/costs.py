"""What Ray, the controller, streaming and more workers cost while nothing fails: two workers, one thread each.

A bare Horovod loop, torch DDP and the platform's own loop without Ray and controller stand beside the platform, with
the same passes, interleaved. `steps` compares the pace with its peers'.

python -m tests.benchmarks.costs [--rounds 5] [--models byte_gpt mlp ...]
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raytrain_plus import Job
from raytrain_plus.collective.rendezvous import RendezvousServer
from raytrain_plus.data.prepare import prepare
from raytrain_plus.job.data_settings import Data
from raytrain_plus.job.settings import Workers
from raytrain_plus.launch.runner import run
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.storage.folders.local import LocalFolder
from tests.benchmarks.loop import credentials_for

REPOSITORY = Path(__file__).parents[2]
LOOP_S = 300.0

SIZES = {
    "byte_gpt": ("tests.benchmarks.tasks:ByteGPT", 16, 160, 80, 8),
    "mlp": ("tests.benchmarks.tasks:Mlp", 64, 3000, 1500, 8),
    "digits": ("examples.digits:Digits", 96, 3000, 1500, 12),
    "mlp_20ms": ("tests.benchmarks.tasks:Mlp", 512, 900, 450, 2),
    "paced_20ms": ("tests.benchmarks.tasks:Paced", 128, 900, 450, 2),
}
"""task, rows of a step, steps, of them warm-up, and the larger of two numbers of shards; the smaller is 2"""
PREPARE = {"digits": "examples.digits:prepare"}
COST = ("mlp_20ms", "paced_20ms")
"""Steps of about 20 ms, on which the cost of Ray and controller is measured: while two workers keep both cores busy, so
that whatever else runs takes from them; and while they wait for a device, as workers with GPUs do."""
BARE = "bare Horovod loop"
OWN = "raytrain_plus' loop, no Ray, no controller"
ALONE = "raytrain_plus, one worker, half the batch"


def job(folder: Path, model: str, name: str, *, shards: int, rows: int, workers: int, cache_mb: int = 1024) -> Job:
    task, _, steps, *_ = SIZES[model]
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
    with ranks_of(kind, file, warm_up, size) as ranks:
        return max(float(json.loads(rank.communicate(timeout=LOOP_S)[0].splitlines()[-1])) for rank in ranks)


@contextmanager
def ranks_of(kind: str, file: Path, warm_up: int, size: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the ranks of a loop without the platform; kill them on exit."""
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
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
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
        prepare(PREPARE.get(model, "tests.benchmarks.tasks:prepare"), folder / model, [REPOSITORY])
    seconds: dict[str, dict[str, list[float]]] = {model: defaultdict(list) for model in models}
    waits: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        for model in models:
            _, rows, _, warm_up, many = SIZES[model]
            took = seconds[model]
            for shards in sorted({2, many}):
                asked = job(folder, model, f"{model}-{shards}", shards=shards, rows=rows, workers=2)
                file = folder / f"{model}.yaml"
                file.write_text(asked.to_yaml())
                took[f"{BARE}, {shards} shards"].append(loop("horovod", file, warm_up))
                took[f"raytrain_plus, {shards} shards"].append(platform(asked, warm_up)[0])
                took[f"{OWN}, {shards} shards"].append(loop("own", file, warm_up))
                if model not in COST:
                    took[f"torch DDP, {shards} shards"].append(loop("ddp", file, warm_up))
            if model in COST:
                continue
            streamed = job(folder, model, f"{model}-streamed", shards=2, rows=rows, workers=2, cache_mb=0)
            each, wait = platform(streamed, warm_up)
            took["raytrain_plus, streamed from Parquet, 2 shards"].append(each)
            waits[model].append(wait)
            alone = job(folder, model, f"{model}-alone", shards=1, rows=rows // 2, workers=1)
            took[ALONE].append(platform(alone, warm_up)[0])
    for model in models:
        report(model, seconds[model], waits[model])


def report(model: str, seconds: dict[str, list[float]], waits: list[float]) -> None:
    """Print medians over rounds; ratios are taken round by round, because the machine's speed drifts."""
    rounds = len(next(iter(seconds.values())))
    print(f"\n{model}: two workers, one thread each, medians of {rounds} interleaved rounds")
    print(f"  {'':52}{'steps/s':>9}{'of bare Horovod':>17}{'  (range)'}")
    for name, values in seconds.items():
        bare = seconds.get(f"{BARE}, {name.rpartition(', ')[2]}", seconds[f"{BARE}, 2 shards"])
        ratios = [b / v for b, v in zip(bare, values, strict=True)]
        spread = f"  ({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"  {name:52}{1 / statistics.median(values):9.1f}{statistics.median(ratios):17.3f}{spread}")
    both = seconds["raytrain_plus, 2 shards"]
    if model in COST:
        cost: Any = statistics.median(b / a - 1 for a, b in zip(seconds[f"{OWN}, 2 shards"], both, strict=True))
        print(f"  Ray and controller cost {100 * cost:.1f} % of a step")
        return
    many = SIZES[model][-1]
    # Beyond the cost of the same passes in a bare loop.
    shard: Any = statistics.median(
        (ours - ours_2 - (bare - bare_2)) / (many - 2) * 2
        for ours, ours_2, bare, bare_2 in zip(
            seconds[f"raytrain_plus, {many} shards"],
            both,
            seconds[f"{BARE}, {many} shards"],
            seconds[f"{BARE}, 2 shards"],
            strict=True,
        )
    )
    print(f"  each further shard on a worker costs {1000 * shard:.2f} ms beyond its passes in a bare loop")
    weak: Any = statistics.median(a / b for a, b in zip(seconds[ALONE], both, strict=True))
    print(f"  weak scaling from 1 to 2 workers: {weak:.3f} of ideal")
    print(f"  streamed: {100 * statistics.median(waits):.2f} % of step time waiting for data")


if __name__ == "__main__":
    main()
