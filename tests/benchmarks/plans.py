"""Predicted and measured seconds of a step, for plans of one model on this machine, and whether the order agrees.

The byte GPT, and the same with one block that is much wider than the others. Each plan is a real run; the first steps
are left out. Kendall's tau compares the orders; the chosen plan stands beside the fastest measured.

python -m tests.benchmarks.plans [--steps 24] [--models byte_gpt padded]
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from examples.byte_gpt import Block, ByteGPT
from raytrain_plus import Job
from raytrain_plus.checks.planned import ProfiledTask, ProfilingHere
from raytrain_plus.checks.trial_process import trying_apart
from raytrain_plus.data.prepare import prepare_data
from raytrain_plus.job.data_settings import Data
from raytrain_plus.job.settings import Parallel, Workers
from raytrain_plus.launch.runner import run
from raytrain_plus.membership.mesh import Shape
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.parallel.pipeline.memory import Misfit
from raytrain_plus.planner.cost import CostModel
from raytrain_plus.planner.plan_table import choice_text
from raytrain_plus.planner.space import Choice, FreeSettings
from raytrain_plus.storage.folders.local import LocalFolder

REPOSITORY = Path(__file__).parents[2]
PLANS = (
    Choice(Shape(1), FreeSettings("none", "none", "none", "1f1b")),
    Choice(Shape(1), FreeSettings("none", "full", "none", "1f1b")),
    Choice(Shape(2), FreeSettings("none", "none", "none", "1f1b")),
    Choice(Shape(2), FreeSettings("none", "full", "none", "1f1b")),
    Choice(Shape(3), FreeSettings("optimizer", "none", "none", "1f1b")),
    Choice(Shape(4), FreeSettings("none", "none", "none", "1f1b")),
    Choice(Shape(1, 2), FreeSettings("none", "none", "none", "1f1b")),
    Choice(Shape(1, 2), FreeSettings("none", "none", "none", "gpipe")),
    Choice(Shape(1, 2), FreeSettings("none", "full", "none", "1f1b")),
    Choice(Shape(1, 2), FreeSettings("none", "none", "none", "interleaved")),
    Choice(Shape(1, 3), FreeSettings("none", "none", "none", "1f1b")),
    Choice(Shape(2, 2), FreeSettings("none", "none", "none", "1f1b")),
    Choice(Shape(3), FreeSettings("full", "none", "none", "1f1b")),
)


class PaddedGPT(ByteGPT):
    """The byte GPT, whose last block is much more expensive than the others."""

    def layers(self) -> dict[str, Callable[[], nn.Module]]:
        """Return the layers, the last block with four blocks in it."""
        four = [partial(Block, self.width, self.heads, self.depth, self.dropout)] * 4
        return {**super().layers(), f"block{self.depth - 1}": lambda: nn.Sequential(*(build() for build in four))}


MODELS = {"byte_gpt": "examples.byte_gpt:ByteGPT", "padded": "tests.benchmarks.plans:PaddedGPT"}


def job_of(folder: Path, model: str, steps: int) -> Job:
    """Return the job of which all plans are variants."""
    return Job(
        name=model,
        task=MODELS[model],
        data=Data(path=str(folder / "data" / "train"), prepare="examples.byte_gpt:prepare", batch_size=48, shards=12),
        steps=steps,
        workers=Workers(min=1, cpus=0.25),
        parallel=Parallel(microbatches=2, holders=2),
        storage=str(folder / "runs"),
    )


def measured_s(asked: Job, choice: Choice) -> float:
    """Return the median seconds of a step of a run with this choice, without the first third."""
    parallel = replace(
        asked.parallel,
        pipeline=choice.shape.stages,
        sharded=choice.settings.sharded,
        schedule=choice.settings.schedule,
    )
    workers = replace(asked.workers, min=choice.shape.size, max=choice.shape.size)
    made = replace(asked, parallel=parallel, workers=workers, recompute=choice.settings.recompute)
    result = run(made, fresh=True, quiet=True, roots=[REPOSITORY])
    assert result.status == "finished", result.error
    times = [event["time"] for event in read_events(LocalFolder(result.path)) if event["kind"] == "step_committed"]
    first = len(times) // 3
    return statistics.median(after - before for before, after in itertools.pairwise(times[first:]))


def kendall_tau(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the rank correlation of two orders.

    >>> kendall_tau([1, 2, 3], [1, 2, 3]), kendall_tau([1, 2, 3], [3, 2, 1])
    (1.0, -1.0)
    """
    pairs = list(itertools.combinations(range(len(one)), 2))
    agree = sum(1 if (one[a] - one[b]) * (other[a] - other[b]) > 0 else -1 for a, b in pairs)
    return agree / len(pairs)


def main() -> None:
    """Print the table of each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    for model in options.models:
        with tempfile.TemporaryDirectory(prefix="raytrain-bench-") as name:
            report(model, Path(name), options.steps)


def report(model: str, folder: Path, steps: int) -> None:
    """Measure the plans of a model, and print them beside their predictions."""
    asked = job_of(folder, model, steps)
    prepare_data(asked, [REPOSITORY])
    with trying_apart(asked, [REPOSITORY], ProfilingHere) as trying:
        result: Any = trying.result()
    profiled: ProfiledTask = result
    costs = CostModel(asked, profiled.model)
    predicted, measured = [], []
    print(f"{model}: load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for choice in PLANS:
        cost = costs.of(choice, float("inf"))
        assert not isinstance(cost, Misfit)
        predicted.append(cost.time.total)
        measured.append(measured_s(asked, choice))
        both = f"{1000 * predicted[-1]:8.0f} ms predicted {1000 * measured[-1]:8.0f} ms measured"
        print(f"  {choice_text(choice):42} {both}", flush=True)
    chosen = min(range(len(PLANS)), key=predicted.__getitem__)
    print(
        f"  Kendall tau {kendall_tau(predicted, measured):.2f}; the chosen plan takes "
        f"{measured[chosen] / min(measured):.2f} of the fastest; load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
