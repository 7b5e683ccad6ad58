"""The platform's own step beside the same loop written by hand, with each technique: one worker, one shard, no Ray.

python -m tests.benchmarks.techniques [--only precision compile recompute generation] [--rounds 5] [--width 512]

All loops take turns in one process of one thread, and its CPU time counts, so other work on the machine matters
little. The model is the byte GPT, by default with 25 million parameters.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
import torch._dynamo
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from examples.byte_gpt import CONTEXT, ByteGPT
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.job import setting_types
from raytrain_plus.job.task_loader import build_task
from raytrain_plus.task import RunFacts
from raytrain_plus.torch_compat import DEAR_OPERATIONS, compiled_graphs
from raytrain_plus.training.exchange.context import StepContext
from raytrain_plus.training.exchange.thread_control import Control
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.model.precision import Precision
from raytrain_plus.training.model.recompute import recompute_layers
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.masters import to_bfloat16
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.training.weights.optimized_rows import Trained
from raytrain_plus.training.weights.step_options import Technique
from raytrain_plus.trial.measure import measure_layers

ROWS, STEPS, CLIP_NORM = 8, 2, 1.0
"""Rows and number of the steps that one turn makes."""
CPU = torch.device("cpu")
RECOMPUTE: tuple[setting_types.Recompute, ...] = ("none", "selective", "full")
Step = Callable[[int], float]
"""Makes the step of that number, and returns its loss."""
Change = Callable[[nn.Module], None]
"""What a user does to the model, by hand."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=[*SECTIONS])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    made = partial(task, options.width, options.depth)
    parameters = sum(value.numel() for value in build_model(made(), 0, CPU).module.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {ROWS} rows of {CONTEXT} bytes, {options.rounds} rounds, one thread")
    for name in options.only:
        SECTIONS[name](made, options.rounds)


def precision(made: Callable[[], ByteGPT], rounds: int) -> None:
    """Print steps/s in each precision."""
    # A CPU has no TF32, and takes minutes for products in float16.
    names = [name for name in get_args(setting_types.Precision) if name not in ("tf32", "fp16")]
    show(
        {name: (own(made(), Technique(Precision(name))), plain(made(), name)) for name in names},
        rounds,
    )


def compiled(made: Callable[[], ByteGPT], rounds: int) -> None:
    """Print steps/s of compiled layers, beside the layers, and the whole model, compiled by hand."""
    loops = {}
    for name in ("fp32", "bf16"):
        ours = own(made(), Technique(Precision(name), compiled=True))
        loops[f"{name}, eager"] = own(made(), Technique(Precision(name))), plain(made(), name)
        loops[f"{name}, layers"] = ours, plain(made(), name, compile_each)
        loops[f"{name}, whole"] = ours, plain(made(), name, nn.Module.compile)
    show(loops, rounds)


def recompute(made: Callable[[], ByteGPT], rounds: int) -> None:
    """Print steps/s of layers that are computed again, and the bytes that a forward pass keeps."""
    by_hand: dict[Any, Change] = {
        "none": lambda model: None,
        "selective": partial(again_each, context_fn=partial(create_selective_checkpoint_contexts, [*DEAR_OPERATIONS])),
        "full": again_each,
    }
    show(
        {
            str(name): (own(made(), Technique(recompute=name)), plain(made(), change=by_hand[name]))
            for name in RECOMPUTE
        },
        rounds,
    )
    print(f"{'kept, MB':12} {'forecast':>9} {'measured':>9} {'ratio':>6} {'to first':>8}")
    first = 0.0
    for name in RECOMPUTE:
        forecast = sum(
            layer.activations
            for layer in measure_layers(made(), 0, Technique(recompute=name), Microbatch(batch(0), ROWS))
        )
        found = kept(made(), name)
        first = first or found
        print(f"{name!s:12} {forecast / 1e6:9.1f} {found / 1e6:9.1f} {forecast / found:6.3f} {found / first:8.2f}")


def generation(made: Callable[[], ByteGPT], rounds: int) -> None:
    """Print CPU seconds of the first and the second step of a generation that was formed again."""
    print(f"{'generation':32} {'first':>9} {'second':>9} {'ratio':>6} {'graphs':>8}")
    for name, technique in (("eager", Technique()), ("compiled", Technique(compiled=True))):
        # What other loops of this process have compiled does not count.
        torch._dynamo.reset()
        state = state_of(made(), technique)
        donor = state_of(made(), technique)
        before, start = compiled_graphs(), time.process_time()
        steps_of(state)(0)
        print(f"{name + ', the first of the process':32} {time.process_time() - start:9.2f}", end="")
        second, _ = timed(steps_of(state), 1)
        print(f" {second:9.2f} {'':6} {compiled_graphs() - before:8}")
        steps_of(donor)(0)

        def keeps(state: TrainState = state) -> TrainState:
            return state

        def takes(state: TrainState = state, donor: TrainState = donor) -> TrainState:
            state.adopt(donor.snapshot())
            return state

        def anew(technique: Technique = technique, donor: TrainState = donor) -> TrainState:
            built = state_of(made(), technique)
            built.adopt(donor.snapshot())
            return built

        for way, form in (("keeps its state", keeps), ("takes a state", takes), ("is built again", anew)):
            before, pairs = compiled_graphs(), []
            for number in range(rounds):
                step = steps_of(form())
                pairs.append(timed(step, 2 + 2 * number))
            first, second = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(a / b for a, b in pairs)
            print(f"{f'{name}, {way}':32} {first:9.3f} {second:9.3f} {ratio:6.3f} {compiled_graphs() - before:8}")


SECTIONS: Mapping[str, Callable[[Callable[[], ByteGPT], int], None]] = {
    "precision": precision,
    "compile": compiled,
    "recompute": recompute,
    "generation": generation,
}


def show(loops: Mapping[str, tuple[Step, Step]], rounds: int) -> None:
    """Print steps/s of pairs of loops, the platform's and one by hand; a loop that is in two pairs runs once."""
    different = list(dict.fromkeys(loop for pair in loops.values() for loop in pair))
    taken = dict(zip(different, interleaved(different, rounds), strict=True))
    print(f"{'steps/s':12} {'platform':>9} {'by hand':>9} {'ratio':>6} {'to first':>8} {'by hand':>8}")
    first: tuple[Step, Step] = next(iter(loops.values()))
    for name, (mine, other) in loops.items():
        gains = (ratio(taken[a], taken[b]) for a, b in zip(first, (mine, other), strict=True))
        speeds = (1 / statistics.median(taken[loop]) for loop in (mine, other))
        print(
            f"{name:12} {next(speeds):9.2f} {next(speeds):9.2f} {ratio(taken[other], taken[mine]):6.3f}",
            f"{next(gains):8.2f} {next(gains):8.2f}",
        )


def ratio(these: Sequence[float], those: Sequence[float]) -> float:
    """Return the median over rounds of these seconds by those."""
    return statistics.median(a / b for a, b in zip(these, those, strict=True))


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


def timed(step: Step, number: int) -> tuple[float, float]:
    """Return the CPU seconds of two steps."""
    start = time.process_time()
    step(number)
    between = time.process_time()
    step(number + 1)
    return between - start, time.process_time() - between


def task(width: int, depth: int) -> ByteGPT:
    arguments = {"width": width, "depth": depth, "heads": width // 64, "dropout": 0.0}
    made = build_task(ByteGPT, arguments, RunFacts(total_steps=10_000, batch_size=ROWS))
    assert isinstance(made, ByteGPT)
    return made


def batch(step: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return {"bytes": torch.randint(0, 256, (ROWS, CONTEXT + 1), dtype=torch.uint8, generator=draw)}


def own(made: ByteGPT, technique: Technique) -> Step:
    """Return the platform's step."""
    return steps_of(state_of(made, technique))


def state_of(made: ByteGPT, technique: Technique) -> TrainState:
    return TrainState(
        made, [build_model(made, 0, CPU)], Summing(1), seed=0, technique=replace(technique, clip_norm=CLIP_NORM)
    )


def steps_of(state: TrainState) -> Step:
    """Return the steps of a generation that has just been formed."""
    steps, control = whole_steps(state), Control()
    control.begin(0)
    context = StepContext(world=SoloWorld(), control=control, wait_s=60)

    def step(number: int) -> float:
        return steps.run(number, {0: [Microbatch(batch(number), ROWS)]}, context).loss

    return step


def plain(made: ByteGPT, name: setting_types.Precision = "fp32", change: Change = lambda model: None) -> Step:
    """Return the step that a user writes by hand, with a `change` of the model."""
    model = build_model(made, 0, CPU).module.train()
    named = list(model.named_parameters())
    masters = Trained(named, to_bfloat16(named) if name == "bf16-params" else {})
    optimizer = made.optimizer(masters.named)
    scheduler = made.scheduler(optimizer)
    dtype = Precision(name).computed_in
    change(model)

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


def compile_each(model: nn.Module) -> None:
    """Have each layer compiled."""
    for layer in model.children():
        layer.compile()


def again_each(model: nn.Module, **settings: Any) -> None:
    """Have each layer computed again in the backward pass."""
    for layer in model.children():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **settings)


def kept(made: ByteGPT, name: setting_types.Recompute) -> int:
    """Return the bytes that a forward pass keeps beside the parameters, as torch measures them."""
    model = build_model(made, 0, CPU).module.train()
    recompute_layers(dict(model.named_children()), name)
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        loss = made.loss(model, batch(0))
        found = tracker.get_tracker_snapshot("current")[CPU]
    now = {str(getattr(kind, "value", kind)): size for kind, size in found.items()}
    assert torch.isfinite(loss)
    return int(now["Total"] - now["Parameter"])


if __name__ == "__main__":
    main()
