"""A part of a model: consecutive layers that a worker holds, with the gradients and buffers of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from raytrain_plus.errors import TaskError, TrainingError
from raytrain_plus.parallel.autocast import Modes, check_modes
from raytrain_plus.parallel.gradients import Gradients, bucket_bytes
from raytrain_plus.parallel.half_precision import check_carried, ring_wire
from raytrain_plus.parallel.wire import Exact, MakeWire, Rider
from raytrain_plus.state.named import dtype_name
from raytrain_plus.task import Task
from raytrain_plus.torch_compat import has_accumulated_hooks, write_count
from raytrain_plus.training.exchange import header
from raytrain_plus.training.model.added_state import AddedState
from raytrain_plus.training.model.model import Built, modules_in_evaluation
from raytrain_plus.training.model.randomness import LayerKeys, MicrobatchKeys
from raytrain_plus.training.weights.buffers import Buffers
from raytrain_plus.training.weights.first_bucket import digits
from raytrain_plus.training.weights.gathered_layer import free_weight
from raytrain_plus.training.weights.step_options import Technique


@dataclass(frozen=True, slots=True)
class ModelPart:
    """The whole model, or one chunk of it."""

    module: nn.Module
    parameters: Sequence[tuple[str, nn.Parameter]]
    """All parameters, including frozen ones."""
    gradients: Gradients
    buffers: Buffers
    keys: LayerKeys
    technique: Technique
    masters: Mapping[str, nn.Parameter]
    """The float32 weights that parameters are copies of, by name; see `masters`. Without values if gathered."""
    in_evaluation: Sequence[nn.Module]
    """The modules that were built in evaluation mode, and stay in it."""
    added: AddedState
    """Refuses what its first forward pass adds to it."""
    hooked: Sequence[str]
    """See `hooked_parameters`."""

    def writes(self) -> list[int]:
        """Return how often each parameter has been written."""
        return [write_count(value) for _, value in self.parameters]

    @contextmanager
    def forward(self, step: int, shard: int, microbatch: int, before: Sequence[int]) -> Iterator[MicrobatchKeys]:
        """Open for a microbatch's forward pass; yields its random keys, which are set.

        Raises `TrainingError` if the pass has changed a gradient, or a parameter since `writes` returned `before`, or
        if the first one has added state to the model.
        """
        keyed = self.keys.begin(step, shard, microbatch)
        written = self.gradients.writes()
        with self.keys.opened(keyed), self.technique.precision.autocast():
            yield keyed
        self.gradients.check_unchanged(written)
        self.check_unchanged(before)
        self.added.check()

    @contextmanager
    def evaluating(self, shard: int, microbatch: int) -> Iterator[None]:
        """Open for a held-out microbatch's forward pass, with its random keys set."""
        keyed = self.keys.begin("evaluate", shard, microbatch)
        with self.keys.opened(keyed), self.technique.precision.autocast():
            yield

    def check_unchanged(self, before: Sequence[int]) -> None:
        """Raise `TrainingError` if a parameter was written since `before`."""
        now = self.writes()
        if now != before:
            changed = next(name for (name, _), a, b in zip(self.parameters, now, before, strict=True) if a != b)
            raise TrainingError(
                f"the loss changed the parameter '{changed}' in place, in every microbatch; only the optimizer step "
                "may: keep a moving average in a buffer (register_buffer), and use no max_norm in an embedding"
            )


def hooked_parameters(module: nn.Module) -> list[str]:
    """Return the trained parameters with hooks that see the sum of what was added to their gradients."""
    return [name for name, value in module.named_parameters() if value.requires_grad and has_accumulated_hooks(value)]


def check_hooks(hooked: Sequence[str]) -> None:
    """Raise `TrainingError` for such hooks, which would see other gradients on other numbers of workers."""
    if hooked:
        raise TrainingError(
            f"the parameter '{hooked[0]}' has a hook of register_post_accumulate_grad_hook, which would see the sum "
            "over as many microbatches as its worker has computed: use register_hook, which sees the gradient of each "
            "microbatch"
        )


@dataclass(frozen=True, slots=True)
class Summing:
    """How the gradients of a step are summed over shards and workers."""

    shards: int
    exact: bool = False
    """Whether sums over shards have the same bits in any order."""
    make_wire: MakeWire = ring_wire
    """How gradients travel if their sums need not be exact."""
    bucket_bytes: int | None = None
    """The size of buckets; None for that of the device."""

    @property
    def exact_shards(self) -> int | None:
        """The number of shards if sums are exact."""
        return self.shards if self.exact else None

    @property
    def wire(self) -> MakeWire:
        """How gradients travel."""
        return partial(Exact, shards=self.shards) if self.exact else self.make_wire

    @property
    def header(self) -> Rider:
        """Returns how many numbers the header of a step needs."""
        return lambda dtype: digits(header.size(self.shards), dtype)


def make_parts(
    task: Task, built: Iterable[Built], summing: Summing, technique: Technique, *, seed: int, gathered: bool = False
) -> tuple[ModelPart, ...]:
    """Allocate gradients and buffers for what was built; the first part carries the header.

    `gathered`: weights and gradients have memory only when needed (`gathered`), and no part carries the header. Raises
    `TaskError` for parameters whose gradients cannot be summed, or not exactly, or that its precision excludes.
    """
    return tuple(
        _make_part(task, one, summing, technique, seed=seed, number=number, gathered=gathered)
        for number, one in enumerate(built)
    )


def _make_part(
    task: Task, built: Built, summing: Summing, technique: Technique, *, seed: int, number: int, gathered: bool
) -> ModelPart:
    device, label = technique.precision.device, f".{number}"
    named, in_evaluation = list(built.module.named_parameters()), modules_in_evaluation(built.module)
    hooked = hooked_parameters(built.module)
    check_summable(named, exact=summing.exact)
    keys = LayerKeys(built.module, built.layers, seed)
    masters = technique.apply(built, keys.recall)
    if gathered:
        masters = {name: nn.Parameter(torch.empty_like(one, device="meta")) for name, one in masters.items()}
        for _, value in named:
            if value.requires_grad:
                free_weight(value)
    built.module.register_forward_pre_hook(_checks_modes(keys, technique.precision.modes))
    return ModelPart(
        built.module,
        named,
        Gradients(
            [(name, value) for name, value in named if value.requires_grad],
            summing.bucket_bytes or bucket_bytes(device),
            rider=None if number or gathered else summing.header,
            make_wire=summing.wire,
            label=label,
            waits=gathered,
            device=device,
        ),
        Buffers(built.module, task, summing.exact_shards, label, device),
        keys,
        technique,
        masters,
        in_evaluation,
        AddedState(built.module),
        hooked,
    )


def _checks_modes(keys: LayerKeys, modes: Modes) -> Callable[[nn.Module, object], None]:
    """Return a hook that checks, at calls of the model in a pass, that the task has left autocast as it is."""

    def check(_: nn.Module, __: object) -> None:
        if keys.current is not None:
            check_modes(modes)

    return check


def check_summable(named: Sequence[tuple[str, nn.Parameter]], *, exact: bool) -> None:
    """Raise `TaskError` for a parameter whose gradients cannot be summed over workers, or not exactly."""
    check_carried(named)
    if exact and (which := inexact_parameter(named)):
        raise TaskError(
            f"{which}, which `reduction: exact` does not support",
            where="reduction: exact",
            expected="float32 or float64 parameters",
            remedy="keep the parameters in float32, or use reduction: ring",
        )


def inexact_parameter(named: Sequence[tuple[str, nn.Parameter]]) -> str:
    """Return the name and type of a parameter whose gradients cannot be summed exactly, in words; empty for none."""
    for name, value in named:
        if value.requires_grad and dtype_name(value.dtype) not in ("float32", "float64"):
            return f"the parameter '{name}' is {dtype_name(value.dtype)}"
    return ""
