"""Shared by the peers: the model they train, the log of their steps, and how one of their workers is killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch
from torch import nn

from examples.byte_gpt import VOCABULARY, ByteGPT
from tests.benchmarks.incidents import Finished, Incident, frontier, incident

REPOSITORY = Path(__file__).parents[3]
WORKERS = 4
CHECKPOINT_EVERY = 50
"""steps"""
START_S = 180.0
"""the limit for a peer's start, up to the step of the kill"""
RECOVERY_S = 120.0
"""the limit for training to continue after a kill"""
POLL_S = 0.05
PROOF = 5
"""steps beyond the last one before the kill that show that training continued"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A byte GPT, and how much text one worker feeds it in a step."""

    width: int
    rows: int
    length: int
    """bytes to predict per row"""


SIZES = {
    "byte_gpt": Size(width=128, rows=2, length=128),
    "25m": Size(width=720, rows=2, length=32),
}
"""0.9 M parameters, as in the examples; 25 M: with AdamW's two averages, 300 MB of state"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Everything that one worker needs for a step: equal in all workers and peers, except the rank's batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: dict[str, torch.Tensor]
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor]


def training(name: str, rank: int) -> Training:
    """Return the model called `name`, seeded, and random bytes, drawn once for each rank."""
    torch.set_num_threads(1)
    size = SIZES[name]
    task = ByteGPT(width=size.width)
    torch.manual_seed(0)
    model = nn.Sequential(*(build() for build in task.layers().values()))
    generator = torch.Generator().manual_seed(rank)
    text = torch.randint(VOCABULARY, (size.rows, size.length + 1), generator=generator, dtype=torch.uint8)
    optimizer = task.optimizer(list(model.named_parameters()))
    return Training(model=model, optimizer=optimizer, batch={"bytes": text}, loss=task.loss)


class Log:
    """Append a line for each step that this process has finished to `steps-<pid>.ndjson` in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._pid = os.getpid()
        self._file = (folder / f"steps-{self._pid}.ndjson").open("a", buffering=1)

    def finished(self, step: int) -> None:
        self._file.write(json.dumps({"time": time.time(), "pid": self._pid, "step": step}) + "\n")

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def read_steps(folder: Path) -> list[Finished]:
    """Return the steps that all processes have finished so far, without incomplete lines."""
    return [
        Finished(**json.loads(line))
        for file in sorted(folder.glob("steps-*.ndjson"))
        for line in file.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


@contextlib.contextmanager
def started(
    module: str, folder: Path, *arguments: str, under: Sequence[str] = (), settings: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m module FOLDER ARGUMENTS` while the context lasts, then nothing of it: it, its children, its workers.

    `under` are the words of a launcher that come before it, `settings` environment variables. Output goes to
    `output.txt` in `folder`.
    """
    command = [sys.executable, *under, "-m", module, str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path_of_modules(), **(settings or {})}
    with (folder / "output.txt").open("ab") as output:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            yield process
        finally:
            end(process, folder)


def path_of_modules() -> str:
    """Return PYTHONPATH for processes that import this repository's tests."""
    return os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))


def end(process: subprocess.Popen[bytes], folder: Path, timeout_s: float = 20.0) -> None:
    """End `process` by SIGTERM, and by SIGKILL its remaining children and the workers that logged steps."""
    others = {child.pid: child for child in _children(process.pid)}
    for pid in {record.pid for record in read_steps(folder)} - others.keys():
        with contextlib.suppress(psutil.Error):
            worker = psutil.Process(pid)
            if str(folder) in worker.cmdline():  # and its number is not that of another process by now
                others[pid] = worker
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(others.values(), timeout=2.0)
    for left in alive:
        with contextlib.suppress(psutil.Error):
            left.kill()
    psutil.wait_procs(alive, timeout=timeout_s)


def _children(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


Choose = Callable[[Path, Set[int], random.Random], Set[int]]
"""Chooses the processes to kill, given a run's folder and the processes that step."""


def one_by_chance(folder: Path, pids: Set[int], chance: random.Random) -> Set[int]:
    return {chance.choice(sorted(pids))}


def kill_some(
    start: Callable[[Path], AbstractContextManager[object]],
    folder: Path,
    kills: int,
    *,
    replaces: bool,
    spares: int = 0,
    choose: Choose = one_by_chance,
) -> list[Incident]:
    """Return the cost of `kills` kills, in as few runs of `start` as possible, each in a new folder under `folder`.

    Each kill meets `WORKERS` workers: a peer that does not replace the dead, or did not recover, is started again. It
    meets `spares` warm spares too.
    """
    chance = random.Random(0)
    incidents: list[Incident] = []
    while len(incidents) < kills:
        run = folder / f"run-{len(incidents)}"
        run.mkdir(parents=True)
        with start(run):
            incidents.append(kill_one(run, chance, spares, choose))
            while replaces and len(incidents) < kills and incidents[-1].stall_s is not None:
                incidents.append(kill_one(run, chance, spares, choose))
    return incidents


def kill_one(folder: Path, chance: random.Random, spares: int = 0, choose: Choose = one_by_chance) -> Incident:
    """Wait until `WORKERS` processes step together and `spares` others are warm; kill some, and wait for training.

    `choose` selects the processes to kill from those that step. The kill comes at a step drawn between one and two
    checkpoints from here, so that its distance to the last checkpoint varies. Raises `TimeoutError` if training does
    not get there in `START_S`.
    """
    base = max((record.step for record in read_steps(folder)), default=0)
    at = base + chance.randrange(CHECKPOINT_EVERY, 2 * CHECKPOINT_EVERY) + PROOF

    def steady() -> bool:
        records = read_steps(folder)
        if not records or frontier(records)[-1].step < at or len(stepping(records)) != WORKERS:
            return False
        return sum(map(psutil.pid_exists, practised(records))) >= spares

    if not awaited(steady, START_S):
        wanted = f"{WORKERS} workers that step together" + f", and {spares} warm spares" * (spares > 0)
        raise TimeoutError(f"no {wanted}, {START_S:.0f} s after the start or the last kill; see {folder}")
    records = read_steps(folder)
    killed = choose(folder, stepping(records), chance)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    killed_at = time.time()
    last = max(record.step for record in read_steps(folder) if record.time <= killed_at)
    awaited(lambda: max(record.step for record in read_steps(folder)) >= last + PROOF, RECOVERY_S)
    return incident(read_steps(folder), killed_at, killed)


def stepping(records: list[Finished]) -> set[int]:
    """Return the processes that are at most one step behind the newest."""
    newest = max(record.step for record in records)
    return {record.pid for record in records if record.step >= newest - 1}


def practised(records: list[Finished]) -> set[int]:
    """Return the processes that have finished step 0 and no later one: a spare makes only that step to warm up."""
    return {record.pid for record in records} - {record.pid for record in records if record.step > 0}


def awaited(true: Callable[[], bool], timeout_s: float) -> bool:
    """Return whether `true` holds within `timeout_s`; check every `POLL_S`, because files do not notify readers."""
    deadline = time.monotonic() + timeout_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint that is either complete or absent."""
    unfinished = path.with_suffix(".unfinished")
    torch.save(content, unfinished)
    unfinished.replace(path)
