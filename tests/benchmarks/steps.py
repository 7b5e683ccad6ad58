"""Steps per second beside torch DDP, a bare Horovod loop and a plain loop, with the same passes; interleaved.

Two workers, one thread each, on both of the platform's worlds; and one worker beside a loop without any library. The
loops accumulate over as many shards as the platform, and read their loss after every pass, as it does. All contestants
for a model are started first, and then step in turn (`gate`), so that no start disturbs a measurement.

python -m tests.benchmarks.steps [--rounds 9] [--models digits mlp gpt2]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import ray

from raytrain_plus import Job
from raytrain_plus.data.prepare import prepare
from raytrain_plus.job.data_settings import Data
from raytrain_plus.job.settings import Elastic, Workers
from raytrain_plus.launch.handle import Handle
from raytrain_plus.launch.runner import start
from tests.benchmarks.costs import REPOSITORY, ranks_of
from tests.benchmarks.gate import Gate


class Model(NamedTuple):
    """What is trained; a step has `rows`, of which one worker alone takes half."""

    task: str
    prepare: str
    rows: int
    shards: tuple[int, ...]


MODELS = {
    "digits": Model("tests.benchmarks.tasks:GatedDigits", "examples.digits:prepare", 96, (2, 12)),
    "mlp": Model("tests.benchmarks.tasks:GatedMlp", "tests.benchmarks.tasks:prepare", 64, (2,)),
    "gpt2": Model("tests.benchmarks.tasks:GatedGpt2", "tests.benchmarks.tasks:prepare", 16, (2,)),
}
DDP, BARE, PLAIN = "torch DDP", "bare Horovod", "plain loop, one worker"
TORCH, HOROVOD, ALONE = "raytrain_plus, torch", "raytrain_plus, Horovod", "raytrain_plus, one worker"
OPEN_S, SETTLE_S = 2.4, 0.4
"""Seconds for which a contestant steps in a round, and how many of them do not count."""
LOAD_S = 20.0
"""Seconds after the last start in which standbys load their modules, before anything is measured."""
START_S = 120.0
Taken = dict[tuple[str, int], dict[str, list[float]]]
"""Seconds a step by model and shards, then by contestant: one number a round."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    start, seconds = time.monotonic(), Taken()
    with tempfile.TemporaryDirectory(prefix="raytrain-bench-") as name:
        for model in options.models:
            seconds |= measure(Path(name), options.rounds, model)
            report(model, seconds)
    print(f"\n{options.rounds} rounds in {(time.monotonic() - start) / 60:.0f} minutes")


def measure(folder: Path, rounds: int, name: str) -> Taken:
    """Start every contestant for a model, let each step in turn, once a round, and print each figure as it comes."""
    prepare(MODELS[name].prepare, folder / name, [REPOSITORY])
    seconds: Taken = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack:
        # One Ray for all runs, which never use more than two cores at a time.
        ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False)
        stack.callback(ray.shutdown)
        started = [
            (shards, who, passes, _started(stack, folder, name, kind, shards, workers))
            for shards in MODELS[name].shards
            for who, kind, workers in contestants(shards == MODELS[name].shards[0])
            for passes in (shards // 2 if workers == 2 else 1,)
        ]
        time.sleep(LOAD_S)
        for number in range(1, rounds + 1):
            for shards, who, passes, gate in started:
                taken = _stepped(gate) * passes
                seconds[name, shards][who].append(taken)
                print(f"round {number}: {name}, {shards} shards, {who}: {1 / taken:.1f} steps/s", flush=True)
        for *_, gate in started:
            gate.open()
    return dict(seconds)


def contestants(with_one: bool) -> list[tuple[str, str, int]]:
    """Return each contestant's name, kind and number of workers."""
    two = [(DDP, "ddp", 2), (TORCH, "torch", 2), (BARE, "horovod-loop", 2), (HOROVOD, "horovod", 2)]
    return two + ([(PLAIN, "plain", 1), (ALONE, "torch", 1)] if with_one else [])


def _started(stack: ExitStack, folder: Path, name: str, kind: str, shards: int, workers: int) -> Gate:
    """Start a contestant, which `stack` ends; return its gate, closed after its first steps."""
    model = MODELS[name]
    gate = Gate(folder / "gates" / f"{name}-{kind}-{workers}-{shards}")
    own = kind in ("torch", "horovod")
    job = Job(
        name=gate.folder.name,
        task=model.task,
        args={"gate": str(gate.folder)},
        data=Data(
            path=str(folder / name),
            batch_size=model.rows * workers // 2,
            shards=shards if workers == 2 else 1,
        ),
        # A plain loop repeats what it has prepared.
        steps=1_000_000 if own else 100,
        workers=Workers(min=workers),
        collective="horovod" if kind == "horovod" else "torch",
        elastic=Elastic(hang_timeout_s=3600),
        storage=str(folder / "runs"),
    )
    if own:
        stack.callback(_stop, start(job, roots=[REPOSITORY]), gate)
    else:
        file = folder / f"{job.name}.yaml"
        file.write_text(job.to_yaml())
        stack.enter_context(ranks_of(kind.removesuffix("-loop"), file, -1, workers))
    deadline = time.monotonic() + START_S
    while sum(len(times) > 20 for times in gate.passed().values()) < workers:
        assert time.monotonic() < deadline, f"{job.name} has not begun to train within {START_S:g} s"
        time.sleep(0.1)
    gate.close()
    return gate


def _stop(handle: Handle, gate: Gate) -> None:
    gate.open()
    handle.stop()
    handle.result()


def _stepped(gate: Gate) -> float:
    """Let a contestant step; return its seconds a pass, those of its slowest process."""
    begin = time.time() + SETTLE_S
    gate.open()
    time.sleep(OPEN_S)
    gate.close()
    counted = [times[times >= begin] for times in gate.passed().values()]
    return max(float(times[-1] - times[0]) / (len(times) - 1) for times in counted if len(times) > 1)


def report(name: str, seconds: Taken) -> None:
    """Print medians; ratios are taken round by round, because the machine's pace drifts."""
    for shards in MODELS[name].shards:
        taken = seconds[name, shards]
        print(f"\n{name}, {shards} shards{'':24}{'steps/s':>9}{'of DDP':>9}{'of bare Horovod':>17}")
        for who, values in taken.items():
            row = f"  {who:36}{1 / statistics.median(values):9.1f}"
            if who not in (PLAIN, ALONE):
                row += f"{_ratio(taken[DDP], values):9.2f}{_ratio(taken[BARE], values):17.2f}"
            elif who == ALONE:
                beyond = statistics.median(ours - plain for ours, plain in zip(values, taken[PLAIN], strict=True))
                row += f"   {_ratio(taken[PLAIN], values):.2f} of the plain loop, {1000 * beyond:.2f} ms above it"
            print(row)
    few, many = MODELS[name].shards[0], MODELS[name].shards[-1]
    if many > few:
        for ours, theirs in ((TORCH, DDP), (HOROVOD, BARE)):
            rounds = zip(*(seconds[name, shards][who] for who in (ours, theirs) for shards in (many, few)), strict=True)
            cost = statistics.median((a - b - (c - d)) / (many - few) * 2 for a, b, c, d in rounds)
            print(f"  each further shard on a worker costs {1000 * cost:.2f} ms beyond its passes ({ours}, {theirs})")


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Return the median, over rounds, of our pace as a share of theirs."""
    return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


if __name__ == "__main__":
    main()
