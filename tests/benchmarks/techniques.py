"""The platform's own step beside the same loop written by hand, in each precision: one worker, one shard, no Ray.

python -m tests.benchmarks.techniques [--rounds 5] [--width 512] [--depth 8]

Both loops take turns in one process of one thread, and its CPU time counts, so other work on the machine matters
little. The model is the byte GPT, by default with 25 million parameters.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import get_args

import torch
from torch import nn

from examples.byte_gpt import CONTEXT, ByteGPT
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reader import Microbatch
from raytrain_plus.job import setting_types
from raytrain_plus.job.task_loader import build_task
from raytrain_plus.task import RunFacts
from raytrain_plus.training.build import whole_steps
from raytrain_plus.training.context import StepContext
from raytrain_plus.training.masters import to_bfloat16
from raytrain_plus.training.model import build_model
from raytrain_plus.training.precision import Precision
from raytrain_plus.training.technique import Technique
from raytrain_plus.training.thread_control import Control
from raytrain_plus.training.train_state import TrainState
from raytrain_plus.training.trained import Trained

ROWS, STEPS, CLIP_NORM = 8, 2, 1.0
"""Rows and number of the steps that one turn makes."""
CPU = torch.device("cpu")
Step = Callable[[int], float]
"""Makes the step of that number, and returns its loss."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    # A CPU has no TF32, and takes minutes for products in float16.
    names = [name for name in get_args(setting_types.Precision) if name not in ("tf32", "fp16")]
    loops: dict[str, tuple[Step, Step]] = {}
    for name in names:
        loops[name] = own(task(options.width, options.depth), name), plain(task(options.width, options.depth), name)
    taken = interleaved([loop for pair in loops.values() for loop in pair], options.rounds)
    print(f"steps/s of {ROWS} rows of {CONTEXT} bytes, {options.rounds} rounds of {STEPS} steps, one thread")
    print(f"{'precision':12} {'platform':>9} {'by hand':>9} {'ratio':>6} {'to fp32':>8}")
    first = statistics.median(taken[0])
    for number, name in enumerate(names):
        mine, other = taken[2 * number], taken[2 * number + 1]
        ratio = statistics.median(b / a for a, b in zip(mine, other, strict=True))
        speed = statistics.median(mine)
        print(f"{name:12} {1 / speed:9.2f} {1 / statistics.median(other):9.2f} {ratio:6.3f} {first / speed:8.2f}")


def interleaved(loops: Sequence[Step], rounds: int) -> list[list[float]]:
    """Return, for each loop, the CPU seconds of a step in each round; a first round does not count."""
    taken: list[list[float]] = [[] for _ in loops]
    step = 0
    for number in range(rounds + 1):
        for loop, seconds in zip(loops, taken, strict=True):
            start = time.process_time()
            for one in range(step, step + STEPS):
                loop(one)
            if number:
                seconds.append((time.process_time() - start) / STEPS)
        step += STEPS
    return taken


def task(width: int, depth: int) -> ByteGPT:
    arguments = {"width": width, "depth": depth, "heads": width // 64, "dropout": 0.0}
    made = build_task(ByteGPT, arguments, RunFacts(total_steps=10_000, batch_size=ROWS))
    assert isinstance(made, ByteGPT)
    return made


def batch(step: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {"bytes": torch.randint(0, 256, (ROWS, CONTEXT + 1), dtype=torch.uint8, generator=draw)}


def own(made: ByteGPT, name: setting_types.Precision) -> Step:
    """Return the platform's step."""
    state = TrainState(
        made,
        [build_model(made, 0, CPU)],
        seed=0,
        shards=1,
        clip_norm=CLIP_NORM,
        device=CPU,
        technique=Technique(Precision(name)),
        shard_rows=ROWS,
    )
    steps, control = whole_steps(state), Control()
    control.begin(0)
    context = StepContext(world=SoloWorld(), control=control, wait_s=60)

    def step(number: int) -> float:
        return steps.run(number, {0: [Microbatch(batch(number), ROWS)]}, context).loss

    return step


def plain(made: ByteGPT, name: setting_types.Precision) -> Step:
    """Return the step that a user writes by hand."""
    model = build_model(made, 0, CPU).module.train()
    named = list(model.named_parameters())
    masters = Trained(named, to_bfloat16(named) if name == "bf16-params" else {})
    optimizer = made.optimizer(masters.named)
    scheduler = made.scheduler(optimizer)
    dtype = Precision(name).computed_in

    def step(number: int) -> float:
        for value in model.parameters():
            value.grad = None
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = made.loss(model, batch(number))
        loss.backward()
        masters.share_gradients()
        nn.utils.clip_grad_norm_([value for _, value in masters.named], CLIP_NORM)
        optimizer.step()
        scheduler.step()
        masters.copy_to_model()
        return float(loss.detach())

    return step


if __name__ == "__main__":
    main()
