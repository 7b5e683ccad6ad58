"""The platform's own step on one GPU, beside a plain loop: no Ray, one worker, a GPT of 406 million parameters.

python -m tests.benchmarks.gpu [--rounds 5] [--steps 6] [--warm-up 4] [--mode eager|compiled|both] [--all]
    [--limit-s 420] [--size tiny --device cpu]

Both compute in bf16 autocast, with fused AdamW, from batches in pinned memory. The plain loop passes all rows of a step
at once, and never waits for the GPU; one contestant is the same loop in 12 passes. Each contestant takes turns with the
plain loop, and the medians of the rounds are compared. A row is printed as soon as it is measured. On an H100 the usual
ones take less than eight minutes; what would begin after seven is left out. With more time, `--warm-up 20 --steps 40
--all --limit-s 3600` measures 1, 4 and 12 shards with each reduction, with clip_norm and without.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from examples.gpt import GPT, SIZES
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.device_copies import pinned
from raytrain_plus.job.task_loader import build_task
from raytrain_plus.observe.step_profile import peak_of
from raytrain_plus.task import RunFacts
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.model.precision import Precision
from raytrain_plus.training.model.randomness import make_deterministic
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.step_options import Technique

ROWS = 24
"""Rows of a step: a multiple of every number of shards."""
WARM_UP = 4
"""Steps that do not count: they measure grids, load kernels, and compile."""
BATCHES = 4
"""Different batches, made beforehand."""
CLIP_NORM = 1.0
VOCABULARY = {"406m": 50_257, "tiny": 512}
SHAPES = {"406m": "350m", "tiny": "tiny"}
"""The sizes of `examples.gpt`, of which the larger one has 406 million parameters if its head is not tied."""
LIMIT_S = 420.0
"""Seconds after which no contestant begins."""
Step = Callable[[int], object]
"""Makes the step of that number."""


class Untied(GPT):
    """GPT with a head of its own, so that both loops have the same parameters, and a fused optimizer on GPUs."""

    def tied(self) -> dict[str, str]:
        return {}

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        named = list(parameters)
        groups = [
            {"params": [value for _, value in named if value.dim() > 1], "weight_decay": 0.1},
            {"params": [value for _, value in named if value.dim() <= 1], "weight_decay": 0.0},
        ]
        fused = named[0][1].is_cuda
        return torch.optim.AdamW(groups, lr=self.size.lr, betas=(0.9, 0.95), fused=fused)


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way to make the steps."""

    shards: int
    exact: bool = False
    clip: bool = True
    plain: bool = False
    """The plain loop, with a pass for each shard."""

    @property
    def name(self) -> str:
        if self.plain:
            return f"plain loop, {self.shards} passes"
        return f"{self.shards} shard{'s' * (self.shards > 1)}, {'exact' if self.exact else 'ring'}" + (
            "" if self.clip else ", no clip_norm"
        )


CONTESTANTS = (
    Contestant(1),
    Contestant(12),
    Contestant(12, plain=True),
    Contestant(1, exact=True),
    Contestant(12, exact=True),
    Contestant(4),
    Contestant(1, clip=False),
)
"""The most important ones first."""
ALL = (
    *CONTESTANTS,
    *(
        one
        for one in itertools.starmap(Contestant, itertools.product((1, 4, 12), (False, True), (True, False)))
        if one not in CONTESTANTS
    ),
)
WANTED = "wanted of the plain loop: 0.97 with 1 shard, 0.93 with 12; compiled, an MFU of 50 %"


@dataclass(frozen=True, slots=True)
class Setting:
    """What all loops share."""

    size: str
    device: torch.device
    compiled: bool
    contestants: tuple[Contestant, ...] = CONTESTANTS
    first: int = WARM_UP
    """Steps that do not count."""

    def task(self) -> Untied:
        arguments = {"size": SHAPES[self.size], "vocabulary": VOCABULARY[self.size]}
        made = build_task(Untied, arguments, RunFacts(total_steps=100_000, batch_size=ROWS))
        assert isinstance(made, Untied)
        return made

    def batches(self, parts: int) -> list[list[dict[str, torch.Tensor]]]:
        """Return batches of a step, each in so many parts, in pinned memory if there is a GPU."""
        draw = torch.Generator().manual_seed(0)
        rows, length = ROWS // parts, SIZES[SHAPES[self.size]].context + 1
        made = []
        for _ in range(BATCHES):
            tokens = torch.randint(0, VOCABULARY[self.size], (ROWS, length), dtype=torch.int32, generator=draw)
            batch = [{"tokens": part.clone()} for part in tokens.split(rows)]
            made.append([pinned(part) for part in batch] if self.device.type == "cuda" else batch)
        return made

    @property
    def tokens(self) -> int:
        """The tokens of a step."""
        return ROWS * SIZES[SHAPES[self.size]].context

    def operations(self, parameters: int) -> float:
        """Return the floating-point operations for a token, forward and backward, by the usual formula."""
        shape = SIZES[SHAPES[self.size]]
        return 6.0 * parameters + 12.0 * shape.depth * shape.width * shape.context


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table. Returns 1 if a contestant failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="of a round")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps that do not count")
    parser.add_argument("--all", action="store_true", help="measure every combination")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="begin none after so many seconds")
    parser.add_argument("--mode", choices=["eager", "compiled", "both"], default="both")
    parser.add_argument("--size", choices=[*SHAPES], default="406m")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU here: nothing is measured")
        return 0
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    # cuBLAS reads a variable of the environment at its first use.
    make_deterministic()
    torch.use_deterministic_algorithms(False)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
    print(f"{name}, torch {torch.__version__}: {ROWS} rows a step, bf16, fused AdamW")
    print(f"medians of {options.rounds} rounds of {options.steps} steps, in turns with the plain loop")
    print(f"{WANTED}; one GPU, which tells nothing about several")
    began, failed = time.monotonic(), False
    for compiled in {"eager": [False], "compiled": [True], "both": [False, True]}[options.mode]:
        setting = Setting(options.size, device, compiled, ALL if options.all else CONTESTANTS, options.warm_up)
        failed |= _mode(setting, options.rounds, options.steps, peak_of(name, "bf16"), began + options.limit_s)
    print(f"{time.monotonic() - began:.0f} s")
    return int(failed)


def _mode(setting: Setting, rounds: int, steps: int, peak: float | None, until: float) -> bool:
    """Measure all contestants, eager or compiled, and print a row for each; return whether one failed."""
    plain, parameters = plain_loop(setting, 1, CLIP_NORM)
    warm_up(plain, setting)
    print(f"\n{'compiled layers' if setting.compiled else 'eager'}, {parameters:,} parameters")
    print(f"{'':24} {'ms':>9} {'tokens/s':>10} {'MFU':>7} {'of plain':>9} {'plain ms':>9}", flush=True)
    alone = [timed(plain, range(steps), setting.device) / steps for _ in range(rounds)]
    print(row("plain loop", alone, alone, setting, parameters, peak), flush=True)
    failed = False
    for one in setting.contestants:
        if time.monotonic() > until:
            print(f"{one.name:24} left out: there is no time", flush=True)
            continue
        try:
            mine, other = measured(setting, one, plain, rounds, steps)
        except Exception as error:
            failed = True
            print(f"{one.name:24} failed: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            continue
        finally:
            free(setting.device)
        print(row(one.name, mine, other, setting, parameters, peak), flush=True)
    del plain
    free(setting.device)
    return failed


def row(
    name: str,
    mine: Sequence[float],
    plain: Sequence[float],
    setting: Setting,
    parameters: int,
    peak: float | None,
) -> str:
    """Return a row of the table, given the seconds of a step in each round, here and in the plain loop."""
    seconds = statistics.median(mine)
    per_s = setting.tokens / seconds
    mfu = "-" if peak is None else f"{100 * per_s * setting.operations(parameters) / peak:.1f} %"
    ratio = statistics.median(b / a for a, b in zip(mine, plain, strict=True))
    return f"{name:24} {1e3 * seconds:9.2f} {per_s:10,.0f} {mfu:>7} {ratio:9.3f} {1e3 * statistics.median(plain):9.2f}"


def measured(
    setting: Setting, one: Contestant, plain: Step, rounds: int, steps: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of a step in each round, of a contestant and of the plain loop, which take turns."""
    clip_norm = CLIP_NORM if one.clip else None
    step = plain_loop(setting, one.shards, clip_norm)[0] if one.plain else own_loop(setting, one, clip_norm)
    with deterministic(one.exact):
        warm_up(step, setting)
    mine, other = list[float](), list[float]()
    numbers = itertools.count(setting.first)
    for _ in range(rounds):
        with deterministic(one.exact):
            mine.append(timed(step, itertools.islice(numbers, steps), setting.device) / steps)
        other.append(timed(plain, range(steps), setting.device) / steps)
    return mine, other


def timed(step: Step, numbers: Iterable[int], device: torch.device) -> float:
    """Return the seconds of these steps."""
    settle(device)
    start = time.perf_counter()
    for number in numbers:
        step(number)
    settle(device)
    return time.perf_counter() - start


def warm_up(step: Step, setting: Setting) -> None:
    """Make the first steps."""
    timed(step, range(setting.first), setting.device)


def settle(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free(device: torch.device) -> None:
    """Free what a contestant has left."""
    # Hooks tie a model and its gradients into cycles.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Compute as `reduction: exact` does while the context is open, if that is wanted."""
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def own_loop(setting: Setting, one: Contestant, clip_norm: float | None) -> Step:
    """Return the platform's step."""
    made = setting.task()
    state = TrainState(
        made,
        [build_model(made, 0, setting.device)],
        Summing(one.shards, exact=one.exact),
        seed=0,
        technique=Technique(Precision("bf16", setting.device), compiled=setting.compiled, clip_norm=clip_norm),
    )
    steps, control = whole_steps(state), Control()
    control.begin(0)
    context = StepContext(world=SoloWorld(), control=control, wait_s=60)
    given = [
        {shard: [Microbatch(part, ROWS // one.shards)] for shard, part in enumerate(batch)}
        for batch in setting.batches(one.shards)
    ]
    return lambda number: steps.run(number, given[number % BATCHES], context)


def plain_loop(setting: Setting, passes: int, clip_norm: float | None) -> tuple[Step, int]:
    """Return the step that a user writes by hand, in so many passes, and the number of parameters."""
    made, device = setting.task(), setting.device
    model: Any = build_model(made, 0, device).module.train()
    if setting.compiled:
        for layer in model:
            layer.compile()
    named = list(model.named_parameters())
    optimizer = made.optimizer(named)
    scheduler = made.scheduler(optimizer)
    values = [value for _, value in named]
    given = setting.batches(passes)
    copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def fetched(number: int) -> list[dict[str, torch.Tensor]]:
        with torch.cuda.stream(copies):
            return [
                {name: value.to(device, non_blocking=True) for name, value in part.items()}
                for part in given[number % BATCHES]
            ]

    ahead = {"batch": fetched(0)}

    def step(number: int) -> None:
        if copies is not None:
            torch.cuda.current_stream(device).wait_stream(copies)
        batch, ahead["batch"] = ahead["batch"], fetched(number + 1)
        for part in batch:
            if copies is not None:
                part["tokens"].record_stream(torch.cuda.current_stream(device))
            with torch.autocast(device.type, torch.bfloat16):
                loss = made.loss(model, part) / passes
            loss.backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(values, clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    return step, sum(value.numel() for value in values)


if __name__ == "__main__":
    sys.exit(main())
