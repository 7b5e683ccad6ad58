"""Steps per second of a small CNN on JPEGs of 100 kB, beside torch DDP with its DataLoader; interleaved.

Both decode the same files to the same size, in two processes for each of two workers. Each round runs each of them from
its start: one that waited for its turn would decode ahead meanwhile.

python -m tests.benchmarks.images [--rounds 5] [--images 600]
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import ray
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from raytrain_plus import Job, Task
from raytrain_plus.job.data_settings import Data
from raytrain_plus.job.settings import Elastic, Workers
from raytrain_plus.launch.runner import start
from tests.benchmarks.costs import REPOSITORY
from tests.benchmarks.gate import Gate, gated

SIZE = (96, 96)
ROWS = 16
"""Images of a worker in a step."""
SETTLE_S, OPEN_S = 15.0, 20.0
"""Seconds in which a contestant's processes start and its queues settle, and those that are measured."""
START_S = 120.0
DDP, FILES, INDEXED = "torch DDP and DataLoader", "raytrain_plus, data.format: images", "raytrain_plus, data.dataset"


class Cnn(Task):
    """A small CNN."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
            nn.Flatten(), nn.Linear(512, 10),
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: object) -> torch.Tensor:
        images, labels = (batch["image"], batch["label"]) if isinstance(batch, dict) else batch  # type: ignore[misc]
        return F.cross_entropy(model(images.float() / 255), labels)


GatedCnn = gated(Cnn)


class Images(Dataset[tuple[torch.Tensor, int]]):
    """The images of a folder, decoded as `data.image_size` decodes them."""

    def __init__(self, folder: Path) -> None:
        self._files = sorted(folder.rglob("*.jpg"))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with Image.open(self._files[index]) as opened:
            image = opened.convert("RGB").resize(SIZE, Image.Resampling.BILINEAR)
        return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy()), int(self._files[index].parent.name)


def indexed() -> Images:
    """Return the images of the folder in the environment, for `data.dataset`."""
    return Images(Path(os.environ["BENCHMARK_IMAGES"]))


def write(folder: Path, count: int) -> None:
    """Write JPEGs of about 100 kB in ten classes."""
    rng = np.random.default_rng(0)
    for number in range(count):
        small = Image.fromarray(rng.integers(0, 256, (90, 120, 3), dtype=np.uint8))
        at = folder / str(number % 10) / f"{number:05d}.jpg"
        at.parent.mkdir(parents=True, exist_ok=True)
        noise = rng.normal(0, 12, (375, 500, 3))
        pixels = np.asarray(small.resize((500, 375))) + noise
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(at, quality=88)


def loop(folder: Path, gate: str, rank: int, port: int) -> None:
    """Train one rank of DDP until it is killed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    task, data = GatedCnn(gate), Images(folder)
    model = nn.parallel.DistributedDataParallel(task.model())
    optimizer = task.optimizer(model.named_parameters())
    sampler: DistributedSampler[tuple[torch.Tensor, int]] = DistributedSampler(data, 2, rank)
    loader = DataLoader(data, ROWS, sampler=sampler, num_workers=2, persistent_workers=True, drop_last=True)
    for epoch in range(1_000_000):
        sampler.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss = task.loss(model, batch)
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            optimizer.step()
            loss.item()


@contextmanager
def ranks(folder: Path, gate: Gate) -> Iterator[None]:
    """Start two ranks of DDP; kill them, and the processes of their loaders, on exit."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.benchmarks.images", "--folder", str(folder), "--gate", str(gate.folder)]
    started = [
        subprocess.Popen([*command, "--rank", str(rank), "--port", str(port)], cwd=REPOSITORY) for rank in (0, 1)
    ]
    try:
        yield
    finally:
        for rank in started:
            # Its loader's processes notice that it has ended.
            rank.kill()
            rank.wait()


@contextmanager
def platform(folder: Path, gate: Gate, data: Data) -> Iterator[None]:
    """Start a run of this platform; stop it on exit."""
    job = Job(
        name=gate.folder.name,
        task="tests.benchmarks.images:GatedCnn",
        args={"gate": str(gate.folder)},
        data=data,
        steps=1_000_000,
        workers=Workers(min=2),
        collective="torch",
        elastic=Elastic(hang_timeout_s=3600),
        storage=str(folder / "runs"),
    )
    handle = start(job, roots=[REPOSITORY])
    try:
        yield
    finally:
        gate.open()
        handle.stop()
        handle.result()


def measure(folder: Path, rounds: int, count: int) -> dict[str, list[float]]:
    """Let each contestant train in turn, once a round, from its start, and print each figure as it comes."""
    images = folder / "images"
    write(images, count)
    sizes = [file.stat().st_size for file in images.rglob("*.jpg")]
    print(f"{count} images of {statistics.mean(sizes) / 1000:.0f} kB", flush=True)
    os.environ["BENCHMARK_IMAGES"] = str(images)
    taken: dict[str, list[float]] = defaultdict(list)
    common = {"batch_size": 2 * ROWS, "shards": 2, "cache_mb": 0}
    files = Data(path=str(images), image_size=SIZE, **common)  # type: ignore[arg-type]
    by_index = Data(dataset="tests.benchmarks.images:indexed", **common)  # type: ignore[arg-type]
    with ExitStack() as stack:
        ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False)
        stack.callback(ray.shutdown)
        for number in range(1, rounds + 1):
            for name, data in ((DDP, None), (FILES, files), (INDEXED, by_index)):
                gate = Gate(folder / "gates" / f"{name.rpartition(' ')[2]}-{number}")
                with ranks(images, gate) if data is None else platform(folder, gate, data):
                    taken[name].append(_stepped(name, gate))
                print(f"round {number}: {name}: {1 / taken[name][-1]:.2f} steps/s", flush=True)
    return taken


def _stepped(name: str, gate: Gate) -> float:
    """Return a contestant's seconds a step, those of its slower process, once it has settled."""
    deadline = time.monotonic() + START_S
    while sum(len(times) > 10 for times in gate.passed().values()) < 2:
        assert time.monotonic() < deadline, f"{name} has not begun to train within {START_S:g} s"
        time.sleep(0.1)
    time.sleep(SETTLE_S)
    begin = time.time()
    time.sleep(OPEN_S)
    counted = [times[times >= begin] for times in gate.passed().values()]
    return max(float(times[-1] - times[0]) / (len(times) - 1) for times in counted if len(times) > 1)


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--images", type=int, default=600)
    for name in ("--folder", "--gate", "--rank", "--port"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        loop(Path(options.folder), options.gate, int(options.rank), int(options.port))
        return
    with tempfile.TemporaryDirectory(prefix="raytrain-bench-") as name:
        taken = measure(Path(name), options.rounds, options.images)
    for who, seconds in taken.items():
        shares = statistics.median(theirs / ours for theirs, ours in zip(taken[DDP], seconds, strict=True))
        print(f"{who:36}{1 / statistics.median(seconds):8.2f} steps/s{shares:8.2f} of DDP")


if __name__ == "__main__":
    main()
