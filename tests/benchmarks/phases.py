"""Where the time of a step goes, phase by phase, beside torch DDP or a plain loop with the same passes.

python -m tests.benchmarks.phases [--models mlp gpt2] [--workers 2 1] [--rounds 3]

Each contestant runs by itself, in turn; a row is the median over the rounds, of rank 0, in milliseconds a step. The
backward passes of torch DDP contain its sums; here `sums` is what is left of them after the passes. The other phases of
a step here are its header, its norms, and its report. No trace is made, so that the phases cost nothing themselves.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from raytrain_plus import Data, Job, Workers, start
from raytrain_plus.data.prepare import prepare
from raytrain_plus.job.task_loader import build_task, load_task
from raytrain_plus.job.yaml import load_job
from raytrain_plus.membership.view import host_shards
from raytrain_plus.observe.step_profile import Phase
from raytrain_plus.training.step.step import SynchronousSteps
from tests.benchmarks.costs import REPOSITORY
from tests.benchmarks.loop import prepared
from tests.benchmarks.tasks import Gpt2, Mlp

FILE = "BENCHMARK_PHASES"
"""The variable of the environment that says where rank 0 writes its phases."""
SETTLE_S, COUNT_S = 20.0, 5.0
"""Seconds after the first step in which standbys load their modules, and seconds that are then measured."""
LIMIT_S = 120.0
ROWS = {"mlp": 32, "gpt2": 8}
"""Rows of a worker in a step."""
NAMED = {"exposed": "sums"}
COLUMNS = ("forward", "backward", "sums", "optimizer", "data", "rest")
Phases = dict[str, float]
"""Milliseconds a step of each phase, and of the whole `step`."""


class Stopwatch:
    """The seconds of each phase: `thread_control.Watch`."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.phase: Phase = "rest"
        self._since = time.perf_counter()

    def enter(self, phase: Phase) -> None:
        now = time.perf_counter()
        self.seconds[self.phase] += now - self._since
        self.phase, self._since = phase, now

    def look(self) -> None:
        """Sums are not watched."""


@cache
def watch_steps() -> None:
    """Measure the phases of this process's steps, and write them where the environment says."""
    plain, measured = SynchronousSteps.run, Measured()

    def run(self: SynchronousSteps, step: int, shards: Any, context: Any) -> Any:
        context.control.watch = measured.watch
        measured.step_begins(context.world.rank)
        return plain(self, step, shards, context)

    SynchronousSteps.run = run  # type: ignore[method-assign]


class Measured:
    """Measures the steps between two moments, and writes their mean phases."""

    def __init__(self) -> None:
        self.watch = Stopwatch()
        self._begun = time.monotonic()
        self._steps = -1
        """The steps that count so far; -1 before the first one."""

    def step_begins(self, rank: int) -> None:
        """Count, between two steps."""
        at = time.monotonic() - self._begun
        if self._steps >= 0:
            self._steps += 1
        elif at >= SETTLE_S:
            self._steps = 0
            self.watch.enter("rest")
            self.watch.seconds.clear()
        if self._steps > 0 and at >= SETTLE_S + COUNT_S:
            self.watch.enter("rest")
            found = {NAMED.get(phase, phase): 1e3 * s / self._steps for phase, s in self.watch.seconds.items()}
            if rank == 0:
                whole = Path(os.environ[FILE])
                whole.with_suffix(".part").write_text(json.dumps({**found, "step": sum(found.values())}))
                whole.with_suffix(".part").rename(whole)
            self._begun, self._steps = math.inf, -1


class WatchedMlp(Mlp):
    def __init__(self) -> None:
        super().__init__()
        watch_steps()


class WatchedGpt2(Gpt2):
    def __init__(self) -> None:
        super().__init__()
        watch_steps()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 1])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raytrain-phases-") as name:
        for model in options.models:
            prepare("tests.benchmarks.tasks:prepare", Path(name) / model, [REPOSITORY])
            for workers in options.workers:
                measure(Path(name), model, workers, options.rounds)


def measure(folder: Path, model: str, workers: int, rounds: int) -> None:
    """Measure all contestants for a model, in turn, and print their medians."""
    kinds = ["loop", "torch", "horovod"] if workers > 1 else ["loop", "torch"]
    found: dict[str, list[Phases]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind in kinds:
            found[kind].append(_phases(folder / f"{model}-{workers}-{kind}-{number}", model, kind, workers))
    print(f"\n{model}, {workers} {'workers' if workers > 1 else 'worker'}: ms a step, medians of {rounds} rounds")
    print(f"{'':28}{'step':>8}" + "".join(f"{name:>10}" for name in COLUMNS))
    loop = "torch DDP" if workers > 1 else "plain loop"
    for kind, rows in found.items():
        values = [statistics.median(row.get(name, 0.0) for row in rows) for name in ("step", *COLUMNS)]
        name = loop if kind == "loop" else f"raytrain_plus, {kind}"
        print(f"{name:28}{values[0]:8.2f}" + "".join(f"{value:10.2f}" for value in values[1:]), flush=True)


def _phases(folder: Path, model: str, kind: str, workers: int) -> Phases:
    """Run a contestant; return its phases."""
    folder.mkdir()
    file = folder / "phases.json"
    job = Job(
        name="phases",
        task=f"tests.benchmarks.phases:Watched{model.capitalize()}",
        data=Data(path=str(folder.parent / model), batch_size=ROWS[model] * workers, shards=workers),
        steps=1_000_000,
        workers=Workers(min=workers),
        collective="horovod" if kind == "horovod" else "torch",
        storage=str(folder / "runs"),
    )
    given = {FILE: str(file)}
    if kind == "loop":
        _run_loop(folder, replace(job, task=job.task.replace("phases:Watched", "tasks:")), given, workers)
    else:
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": given},
        )
        try:
            handle = start(job, roots=[REPOSITORY])
            _await(file)
            handle.stop()
            handle.result()
        finally:
            ray.shutdown()
    found: Phases = json.loads(file.read_text())
    return found


def _run_loop(folder: Path, job: Job, given: dict[str, str], workers: int) -> None:
    text = folder / "job.yaml"
    # The loop repeats what it has prepared.
    text.write_text(replace(job, steps=100).to_yaml())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.benchmarks.phases", "loop", str(text)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(workers), str(port)], cwd=REPOSITORY, env={**os.environ, **given})
        for rank in range(workers)
    ]
    try:
        _await(Path(given[FILE]))
    finally:
        for one in ranks:
            one.kill()
            one.wait()


def _await(file: Path) -> None:
    until = time.monotonic() + LIMIT_S
    while not file.exists():
        assert time.monotonic() < until, f"no phases within {LIMIT_S:g} s"
        time.sleep(0.2)


def loop(text: str, rank: int, size: int, port: int) -> None:
    """Make the steps of a loop by hand, one rank's, and write the phases of those that count."""
    torch.set_num_threads(1)
    job, roots = load_job(text)
    assert isinstance(job.task, str)
    task = build_task(load_task(job.task, roots), job.args)
    batches = [of_step[0] for of_step in prepared(job, host_shards(job.data.shards, size)[rank], task.collate)]
    torch.manual_seed(job.seed)
    model: Any = task.model()
    optimizer = task.optimizer(list(model.named_parameters()))
    if size > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
        model = torch.nn.parallel.DistributedDataParallel(model)
    measured = Measured()
    watch = measured.watch
    for batch in itertools.cycle(batches):
        measured.step_begins(rank)
        optimizer.zero_grad()
        watch.enter("forward")
        loss: Any = task.loss(model, batch)
        watch.enter("backward")
        loss.backward()
        watch.enter("rest")
        loss.item()
        watch.enter("optimizer")
        optimizer.step()
        watch.enter("rest")


if __name__ == "__main__":
    if sys.argv[1:2] == ["loop"]:
        loop(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        main()
