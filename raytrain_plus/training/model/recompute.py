"""Layers that keep nothing for their backward pass but their input, and are computed again in it: `recompute`.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016. `selective` also keeps what is dear to compute, the
results of matrix products, convolutions and attention: Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", MLSys 2023.

The gradients are the same bits: a layer that is computed again draws the same keyed random numbers, and sees the
buffers and the autocast of its forward pass.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from raytrain_plus.errors import TaskError
from raytrain_plus.job.setting_types import Recompute
from raytrain_plus.torch_compat import DEAR_OPERATIONS, buffer_of, put_buffer

Recall = Callable[[str], None]
"""Sets the random key of a layer, by its name, that is about to be computed again."""


def check_layers(which: Recompute, layers: Sequence[str]) -> None:
    """Raise `TaskError` if a model with these layers cannot compute again those of `which`."""
    if which == "none":
        return
    if not layers:
        raise TaskError(
            "a model that does not declare its layers cannot compute them again",
            where=f"recompute: {which}",
            expected="layers(), or a model() that returns an nn.Sequential with each module in it once",
        )
    for name in () if isinstance(which, str) else which:
        if name not in layers:
            near = difflib.get_close_matches(name, layers, 1)
            raise TaskError(
                f"there is no layer '{name}'",
                where="recompute",
                expected=f"one of {', '.join(layers)}",
                remedy=f"did you mean '{near[0]}'?" if near else "",
            )


def names_of(which: Recompute, layers: Collection[str]) -> Collection[str]:
    """Return those of some layers that are computed again."""
    if isinstance(which, str):
        return () if which == "none" else layers
    return [name for name in which if name in layers]


def recompute_layers(
    layers: Mapping[str, nn.Module],
    which: Recompute,
    recall: Recall = lambda layer: None,
    *,
    compiled: bool = False,
) -> None:
    """Have some of these layers, by name, computed again in backward passes.

    `compiled`: those that `compiled.compile_layers` has taken care of are left alone.
    """
    for name in names_of(which, layers):
        if not (compiled and is_again_inside(which, layers[name])):
            # What is compiled is one operation to whoever would choose among the operations in it.
            _recompute(layers[name], name, which == "selective" and not compiled, recall)


def is_again_inside(which: Recompute, layer: nn.Module) -> bool:
    """Return whether a layer that is compiled is computed again by its own code; it cannot be if it has buffers."""
    return which == "selective" and not list(layer.buffers())


def again_inside(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward pass to compile that is computed again selectively: the compiler plans the second one itself."""

    def kept(*arguments: Any, **named: Any) -> Any:
        return checkpoint(
            forward, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=_SELECTIVE, **named
        )

    return kept


def _recompute(layer: nn.Module, name: str, selective: bool, recall: Recall) -> None:
    forward = layer.forward
    contexts = _SELECTIVE if selective else noop_context_fn
    slots = [
        (layer.get_submodule(at.rpartition(".")[0]), at.rpartition(".")[2])
        for at, _ in layer.named_buffers(remove_duplicate=False)
    ]

    def kept(*arguments: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments, **named)
        before = [None if (value := buffer_of(*slot)) is None else value.detach().clone() for slot in slots]
        again = False

        def run(*arguments: Any, **named: Any) -> Any:
            nonlocal again
            if not again:
                again = True
                return forward(*arguments, **named)
            recall(name)
            with _replaced(slots, before):
                return forward(*arguments, **named)

        return checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **named)

    layer.forward = kept


def _policy(_: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in DEAR_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE


_SELECTIVE = partial(create_selective_checkpoint_contexts, _policy)


@contextmanager
def _replaced(slots: Sequence[tuple[nn.Module, str]], values: Sequence[torch.Tensor | None]) -> Iterator[None]:
    """Put these buffers into a layer while the context is open."""
    present = [buffer_of(*slot) for slot in slots]
    for slot, value in zip(slots, values, strict=True):
        put_buffer(*slot, value)
    try:
        yield
    finally:
        for slot, value in zip(slots, present, strict=True):
            put_buffer(*slot, value)
