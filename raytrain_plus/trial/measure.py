"""Measure the cost of each layer of a model, in seconds or counted: build, run and release them one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.device_copies import to_device
from raytrain_plus.errors import TaskError
from raytrain_plus.generators import set_random_key
from raytrain_plus.membership.slice_names import is_slice, layer_of
from raytrain_plus.parallel.pipeline.chunk import Chunk, PassWork
from raytrain_plus.parallel.pipeline.partition import Layer, counted_cost
from raytrain_plus.parallel.pipeline.timeline import Kind
from raytrain_plus.parallel.pipeline.transport import Returned, Tensors
from raytrain_plus.parallel.tensor.slicing import Slicing
from raytrain_plus.parallel.weighting import Weight
from raytrain_plus.task import Task
from raytrain_plus.torch_compat import counting_operations, pytree
from raytrain_plus.training.model.model import (
    WHOLE,
    Built,
    build_layers,
    build_model,
    no_parameter,
    pass_names,
    train_as_built,
)
from raytrain_plus.training.model.precision import Precision
from raytrain_plus.training.model.randomness import random_key
from raytrain_plus.training.model.recompute import check_layers
from raytrain_plus.training.passes.task_loss import TaskLoss, check_depends, task_loss
from raytrain_plus.training.weights.step_options import Technique
from raytrain_plus.trial.footprint import kept_bytes

TIMES = 2
"""How often a layer is timed; the fastest run counts."""
COPIES = 4
"""Copies of each parameter that a worker usually keeps: the parameter, its gradient and two optimizer values."""


def measure_layers(
    task: Task,
    seed: int,
    technique: Technique,
    microbatch: Microbatch,
    overlaps: bool = False,
    slicing: Slicing | None = None,
    *,
    in_one: bool = False,
) -> tuple[Layer, ...]:
    """Return the layers of the task's model with their measured costs.

    Each layer has the seconds of a microbatch's forward and backward pass, and the bytes that a worker keeps:
    parameters with gradients and optimizer state, and what a microbatch's forward pass makes and keeps. The last
    layer's seconds include the loss. `in_one`: see `model.layer_names`; the first module of a model without layers has
    the seconds and activations of all. `overlaps`: whether the schedule lets steps overlap; then each layer also has
    its `counted_cost`. `slicing`: how layers are cut; all slices are hosted here. Raises `TaskError` if the model does
    not declare its layers or does not support overlapping steps; errors of the task propagate.
    """
    work = Alone(partial(alone_loss, task), seed, technique, microbatch)
    names = pass_names(task, seed, in_one=in_one)
    check_layers(technique.recompute, () if names == WHOLE else names)
    copies = COPIES + (technique.decay is not None)
    given: Tensors | None = None
    found, trained = [], False
    for number, (name, built) in enumerate(each_layer(task, seed, technique, names, slicing)):
        if overlaps and built.tied:
            copy, owner = next(iter(built.tied.items()))
            raise TaskError(
                f"'{copy}' and '{owner}' are tied, but pipedream stages are never at the same step",
                where="parallel.schedule: pipedream",
                remedy="use another schedule, or do not tie the weights",
            )
        module = train_as_built(built.module)
        trained |= any(value.requires_grad for value in module.parameters())
        if number + 1 == len(names) and not trained:
            raise no_parameter()
        before = {buffer: value.clone() for buffer, value in module.named_buffers()} if overlaps else {}
        chunk = Chunk(module, number, [0] * len(names))
        # This pass also compiles and warms up.
        kept = kept_bytes(partial(forward, chunk, work, given))
        work.taken()
        seconds = []
        for _ in range(TIMES):
            output = forward(chunk, work, given)
            backward(chunk, output)
            seconds.append(work.taken())
        _check_buffers(module, before)
        counted = _counted(chunk, work, given) if overlaps else 0
        parts = {name: list(module.named_parameters())} if names != WHOLE else _of_children(module)
        for at, (part, named) in enumerate(parts.items()):
            costs = (0.0, 0, 0) if at else (min(seconds), kept, counted)
            found.append(_layer(part, named, built.tied, technique.precision, copies, *costs))
        given = output
    return tuple(found)


def _check_buffers(module: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    """Raise `TaskError` if a buffer has not the value any more that it had."""
    now, saved = dict(module.named_buffers()), module.state_dict(keep_vars=True).keys()
    for buffer, value in before.items():
        found = now.get(buffer)
        if buffer not in saved and (found is None or found.shape != value.shape):
            # The module's own, such as a mask that has grown.
            continue
        if found is None or not torch.equal(found, value):
            raise TaskError(
                f"the buffer '{buffer}' changes in a forward pass, but pipedream overlaps steps",
                where="parallel.schedule: pipedream",
                remedy="use another schedule, or layers without running statistics (LayerNorm, GroupNorm) or experts",
            )


def _of_children(module: nn.Module) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Return the parameters of each of a model's modules, with their slices."""
    found: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, child in module.named_children():
        found.setdefault(layer_of(name), []).extend(child.named_parameters(prefix=name))
    return found


def _layer(
    name: str,
    named: Sequence[tuple[str, nn.Parameter]],
    tied: Collection[str],
    precision: Precision,
    copies: int,
    seconds: float,
    kept: int,
    counted: int,
) -> Layer:
    """Return the cost of a layer; a worker keeps `kept` copies of its parameters.

    `tied`: the parameters that are copies of another layer's.
    """
    sizes = {at: precision.parameter_bytes(value, copies) for at, value in named}
    counts = {at: value.numel() for at, value in named if value.requires_grad}
    return Layer(
        name,
        seconds,
        sum(sizes.values()),
        sum(counts.values()),
        kept,
        counted,
        sum(size for at, size in sizes.items() if is_slice(at)),
        sum(count for at, count in counts.items() if is_slice(at)),
        sum(count for at, count in counts.items() if at in tied),
        sum(count for at, count in counts.items() if at in tied and is_slice(at)),
    )


def count_operations(
    task: Task, seed: int, precision: Precision, microbatch: Microbatch, *, staged: bool
) -> dict[str, int]:
    """Return the operations of a microbatch's forward and backward pass, without recomputation.

    Matrix products, convolutions and attention count. `staged`: by layer of the task's model; else, and for one that
    has no layers, of the whole model, under the name "". The model is built for this, and freed. Errors of the task
    propagate.
    """
    # What compiled layers compute cannot be counted.
    technique = Technique(precision)
    work = Alone(partial(alone_loss, task), seed, technique, microbatch)
    names = pass_names(task, seed, in_one=True) if staged else WHOLE
    built = each_layer(task, seed, technique, names) if staged else [("", build_model(task, seed, precision.device))]
    given: Tensors | None = None
    found = {}
    for number, (name, one) in enumerate(built):
        train_as_built(one.module)
        chunk = Chunk(one.module, number, [0] * len(names))
        with counting_operations() as operations:
            given = forward(chunk, work, given)
            backward(chunk, given)
        found[name] = operations()
    return found


def each_layer(
    task: Task, seed: int, technique: Technique, names: tuple[str, ...], slicing: Slicing | None = None
) -> Iterator[tuple[str, Built]]:
    """Yield what has these names of `pass_names`; if the task declares its layers, one after the other is built."""
    for name, built in zip(names, build_layers(task, seed, technique.precision.device, slicing, names), strict=True):
        technique.apply(built)
        yield name, built


def forward(chunk: Chunk, work: PassWork, given: Tensors | None) -> Any:
    """Run the forward pass of a layer that gets the output of the layer before, and return its own."""
    chunk.begin(work, 1)
    if given is not None:
        chunk.set_local_fwd_input(given, 0)
    return chunk.forward_one_chunk(0)


def backward(chunk: Chunk, output: Any) -> None:
    """Run the layer's backward pass, with gradients of one."""
    if isinstance(output, Tensors):
        chunk.set_local_bwd_input(Returned([torch.ones_like(one) for one in output.values if one.requires_grad]), 0)
    chunk.backward_one_chunk(0)


def _counted(chunk: Chunk, work: PassWork, given: Tensors | None) -> int:
    """Return the layer's `counted_cost`, from one more forward and backward pass."""
    layers, elements = chunk.submod, 0

    def add(_: nn.Module, __: Any, output: Any) -> None:
        nonlocal elements
        elements += sum(value.numel() for value in pytree.tree_leaves(output) if isinstance(value, torch.Tensor))

    hook = layers.register_forward_hook(add)
    try:
        with counting_operations() as operations:
            backward(chunk, forward(chunk, work, given))
    finally:
        hook.remove()
    return counted_cost(operations(), sum(value.numel() for value in layers.parameters()), elements)


def alone_loss(task: Task, model: nn.Module, batch: Any, rows: int) -> TaskLoss:
    """Return the loss of a batch whose gradients are not multiplied by its weight."""
    found = task_loss(task, model, batch, rows)
    check_depends(found.loss, "the loss of a microbatch")
    return found._replace(weight=1.0)


class Alone(PassWork):
    """A microbatch, as `chunk.PassWork`, with timed passes."""

    def __init__(
        self, loss: Callable[[nn.Module, Any, int], Any], seed: int, technique: Technique, microbatch: Microbatch
    ) -> None:
        """Prepare. `loss`: returns `PassWork.loss`, given the model, a batch, and its rows."""
        self._loss = loss
        self._seed = seed
        self._precision = technique.precision
        self._device = technique.precision.device
        self._microbatch = microbatch
        self._seconds = 0.0

    def taken(self) -> float:
        """Return the seconds since the last call."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    @override
    def rows(self, microbatch: int) -> int:
        return self._microbatch.rows

    @override
    def batch(self, microbatch: int) -> Any:
        return to_device(self._microbatch.batch, self._device, copy=True)

    @override
    def loss(self, microbatch: int, model: nn.Module, batch: Any) -> Any:
        return self._loss(model, batch, self._microbatch.rows)

    @contextmanager
    @override
    def computing(self, kind: Kind, chunk: int, microbatch: int, weight: Weight | None = None) -> Iterator[None]:
        set_random_key(random_key(self._seed, "measure", chunk))
        self._wait()
        start = time.perf_counter()
        with self._precision.autocast() if kind == "F" else nullcontext():
            yield
        self._wait()
        self._seconds += time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
