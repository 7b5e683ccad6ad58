"""What checkpoints cost: a training with and without them, interleaved; a large state saved and read, beside `dd`.

python -m tests.benchmarks.checkpoints [--rounds 5] [--gigabytes 2] [--only-state]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from raytrain_plus import Checkpoint, Data, Job, Workers, run
from raytrain_plus.data.prepare import prepare
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.state.holding import Holding, describe_state
from raytrain_plus.state.hostcopy import HostMemory
from raytrain_plus.state.stored.checkpoint import commit, read_tensors, write_share
from raytrain_plus.state.stored.manifest import Manifest, join_shares, name_of
from raytrain_plus.state.transfer import Snapshot, load_snapshot
from raytrain_plus.storage.folders.local import LocalFolder

REPOSITORY = Path(__file__).parents[2]
STEPS = 420
WARM_UP = 20
BLOCK = 4096
"""Number of rows and columns of a large state's matrices."""


def trained(folder: Path, every_steps: int | None) -> tuple[float, float, float]:
    """Steps per second, the 99th percentile of a step in seconds, the median of the copies in seconds."""
    name = "with" if every_steps else "without"
    job = Job(
        name=name,
        task="tests.benchmarks.tasks:Padded",
        data=Data(path=str(folder / "mlp"), batch_size=16, shards=2, cache_mb=1024),
        steps=STEPS,
        workers=Workers(min=2),
        checkpoint=Checkpoint(every_steps=every_steps, every_s=None),
        storage=str(folder / "runs"),
    )
    result = run(job, fresh=True, quiet=True, roots=[REPOSITORY])
    assert result.status == "finished", result.error
    events = list(read_events(LocalFolder(Path(result.path))))
    at = [event["time"] for event in events if event["kind"] == "step_committed"][WARM_UP:]
    stalls = [event["stall_s"] for event in events if event["kind"] == "checkpoint_saved"]
    saved = [event for event in events if event["kind"] == "checkpoint_saved"]
    assert every_steps is None or len(saved) >= (STEPS - WARM_UP) // every_steps, saved
    shutil.rmtree(result.path)
    gaps = sorted(after - before for before, after in pairwise(at))
    return (len(at) - 1) / (at[-1] - at[0]), gaps[int(0.99 * len(gaps))], statistics.median(stalls or [0.0])


def training(rounds: int) -> None:
    """A state of 50 MB, steps of 100 ms, a checkpoint every ten steps."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare("tests.benchmarks.tasks:prepare", str(folder / "mlp"), [REPOSITORY])
        for number in range(rounds):
            without, every = trained(folder, None), trained(folder, 10)
            rows.append((every[0] / without[0], every[1] / (without[1] + every[2]), every[2]))
            print(
                f"  round {number}: {without[0]:.3f} steps/s without, {every[0]:.3f} with; p99 {1e3 * without[1]:.1f} "
                f"and {1e3 * every[1]:.1f} ms; a copy {1e3 * every[2]:.1f} ms",
                flush=True,
            )
    speed, p99, copy = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"median: {speed:.3f} of the speed without; p99 {p99:.3f} of (p99 without + copy); copy {1e3 * copy:.1f} ms")


def big_state(gigabytes: float) -> Holding:
    """Return transformer-like parameters with AdamW state, of this many gigabytes."""
    count = max(1, round(gigabytes * 2**30 / (3 * BLOCK * BLOCK * 4)))
    named = [(f"block.{number}", nn.Parameter(torch.rand(BLOCK, BLOCK))) for number in range(count)]
    optimizer = torch.optim.AdamW([value for _, value in named])
    for _, value in named:
        moments = {"exp_avg": torch.rand(BLOCK, BLOCK), "exp_avg_sq": torch.rand(BLOCK, BLOCK)}
        optimizer.state[value] = {"step": torch.tensor(1.0), **moments}
    return Holding({}, named, [], optimizer, None, {})


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def cold(folder: Path) -> None:
    """Drop these files from the page cache."""
    for file in folder.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def plain_read(file: Path) -> None:
    """Read a file without processing it."""
    with file.open("rb", buffering=0) as stream:
        buffer = bytearray(8 << 20)
        while stream.readinto(buffer):
            continue


def saving(rounds: int, gigabytes: float, where: Path | None) -> None:
    """The same bytes by `dd`, by us, by `torch.save` and by torch's distributed checkpoint; then read again."""
    held = big_state(gigabytes)
    state, _ = describe_state(held)
    size = sum(value.nbytes for value in state.values())
    memory = HostMemory()
    figures: dict[str, list[float]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=where) as name:
            folder = Path(name)
            run_folder = LocalFolder(folder / "ours")
            manifests: list[Manifest] = []

            def save_ours(run_folder: LocalFolder = run_folder, manifests: list[Manifest] = manifests) -> None:
                copies, tree = memory.copy(held, 0, lambda layer: (0,))
                files, tensors = join_shares([write_share(run_folder, name_of(0, 0), 0, 1, copies)])
                manifests.append(_manifest(files, tensors, tree))
                commit(run_folder, manifests[0])

            def save_torch(folder: Path = folder) -> None:
                with (folder / "torch.pt").open("wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())

            def read_ours(run_folder: LocalFolder = run_folder, manifests: list[Manifest] = manifests) -> None:
                [manifest] = manifests
                tensors = read_tensors(run_folder, manifest, dict.fromkeys(manifest.tensors))
                load_snapshot(Snapshot(manifest.step, tensors, json.dumps(manifest.tree).encode(), ""), held)

            zero = f"dd if=/dev/zero of={folder}/dd bs=8M count={size >> 23} conv=fsync"
            works: dict[str, Callable[[], object]] = {
                "write: dd, fsync": lambda zero=zero: subprocess.run(zero.split(), check=True, capture_output=True),
                "write: raytrain_plus (copy, hash, fsync, manifest)": save_ours,
                "write: torch.save, fsync": save_torch,
                "write: torch.distributed.checkpoint.async_save": lambda folder=folder: dcp.async_save(
                    state, checkpoint_id=str(folder / "dcp")
                ).result(),
                "read: plain, cold": lambda folder=folder: plain_read(folder / "dd"),
                "read: raytrain_plus (checked, in place), cold": read_ours,
                "read: torch.load, cold": lambda folder=folder: torch.load(folder / "torch.pt"),
            }
            for what, work in works.items():
                cold(folder)
                figures.setdefault(what, []).append(timed(work))
    for what, seconds in figures.items():
        base = figures["write: dd, fsync" if what.startswith("write") else "read: plain, cold"]
        ratio = statistics.median(plain / ours for plain, ours in zip(base, seconds, strict=True))
        print(
            f"  {what:<52}{size / statistics.median(seconds) / 1e6:>8.0f} MB/s   {ratio:.2f} of the plain one's speed"
        )


def _manifest(files: object, tensors: object, tree: object) -> Manifest:
    return Manifest(
        run="bench",
        step=0,
        generation=0,
        time=0.0,
        job={},
        task_sha256=None,
        versions={},
        data={"fingerprint": "", "rows": 1, "samples": 1},
        layout=[],
        random={},
        metrics={},
        stall_s=0.0,
        tree=tree,
        files=files,  # type: ignore[arg-type]
        tensors=tensors,  # type: ignore[arg-type]
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--where", type=Path, help="the folder to write large states in")
    parser.add_argument("--only-state", action="store_true", help="no training")
    parsed = parser.parse_args()
    print(f"a state of {parsed.gigabytes:g} GB:")
    saving(parsed.rounds, parsed.gigabytes, parsed.where)
    if parsed.only_state:
        return
    print("training, a state of 50 MB, steps of 100 ms, a checkpoint every ten steps:")
    training(parsed.rounds)


if __name__ == "__main__":
    main()
