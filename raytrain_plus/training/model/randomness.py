"""Random numbers as a function of the job: every use has a key, on whichever worker it runs.

A key consists of named parts, hashed to 64 bits by BLAKE2b, so that anyone can recompute it:

    random_key(7, "init", "head")         initial values of the layer `head` under seed 7
    random_key(7, 120, 3, 0, "head", 0)   step 120, shard 3, microbatch 0, layer `head`, its first use there
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from raytrain_plus.generators import set_random_key
from raytrain_plus.torch_compat import has_hooks


def random_key(*parts: int | str) -> int:
    """Return the first eight bytes, little-endian, of BLAKE2b over the parts joined by '/': 0 to 2^64 - 1."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def make_deterministic() -> None:
    """Make this process compute reproducible bits; operations that cannot raise an error."""
    # cuBLAS reads it at its first use.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # Uninitialized memory never reaches a result; filling it costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


_DRAW_NOTHING = (
    *(nn.Linear, nn.Bilinear, nn.Embedding, nn.Flatten, nn.Unflatten, nn.Identity, nn.Sequential),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm),
    *(nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Softmax, nn.LogSoftmax),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d),
)


def draws_nothing(layer: nn.Module) -> bool:
    """Return whether a layer certainly draws no random numbers: it consists of torch's own modules that draw none."""
    return all(type(module) in _DRAW_NOTHING and not has_hooks(module) for module in layer.modules())


class LayerKeys:
    """Set a layer's own key before each of its forward passes, so that a partition between layers changes no random
    number.

    Models that do not declare their layers get one key per microbatch, with an empty layer name.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str], seed: int) -> None:
        # The key of a layer that draws nothing is of no effect if another layer, with a key of its own, follows it.
        self._keyed = [name for name in layers if name == layers[-1] or not draws_nothing(model.get_submodule(name))]
        self._seed = seed
        self.current: MicrobatchKeys | None = None
        """The microbatch whose layers are called now, if any."""
        for name in self._keyed:
            model.get_submodule(name).register_forward_pre_hook(self._hook(name))

    def begin(self, step: int | str, shard: int, microbatch: int) -> MicrobatchKeys:
        """Begin a forward pass: key the numbers drawn by (seed, step, shard, microbatch, layer, use).

        Those of the layers only in the context `opened`.
        """
        prefix = (self._seed, step, shard, microbatch)
        set_random_key(random_key(*prefix, "", 0))
        return MicrobatchKeys(self._keyed, prefix)

    def opened(self, keyed: MicrobatchKeys) -> AbstractContextManager[None]:
        """Make each layer called while the context is open draw by its own key of that microbatch."""
        return _Opened(self, keyed)

    def recall(self, layer: str) -> None:
        """Set the key of a layer that is computed again outside of its own call, in the context `opened`."""
        if self.current is not None and layer in self._keyed:
            self.current.set_key(layer)

    def apply(self, step: int) -> None:
        """Key the numbers that an optimizer draws in that step by (seed, step, 'apply')."""
        set_random_key(random_key(self._seed, step, "apply"))

    def _hook(self, name: str) -> Callable[[nn.Module, Any], None]:
        def key(module: nn.Module, inputs: Any) -> None:
            if self.current is not None:
                self.current.set_key(name)

        return key


class _Opened:
    """The context of `LayerKeys.opened`, which opens twice in each microbatch: a generator takes four times as long."""

    __slots__ = ("_before", "_keyed", "_keys")

    def __init__(self, keys: LayerKeys, keyed: MicrobatchKeys) -> None:
        self._keys = keys
        self._keyed = keyed

    def __enter__(self) -> None:
        self._before, self._keys.current = self._keys.current, self._keyed

    def __exit__(self, *error: object) -> None:
        self._keys.current = self._before


class MicrobatchKeys:
    """The keys of one microbatch."""

    def __init__(self, layers: Sequence[str], prefix: tuple[int | str, ...]) -> None:
        self._prefix = prefix
        self._uses = dict.fromkeys(layers, 0)
        self._again = False

    def backward(self) -> None:
        """Begin the backward pass: layers called from now on are recomputed (activation checkpointing).

        They draw the same numbers as the first time. If a layer is used several times, each use must be checkpointed
        separately.
        """
        self._again = True

    def set_key(self, layer: str) -> None:
        """Set the key of the next use of a layer."""
        # A backward pass visits the uses from the last to the first.
        self._uses[layer] -= self._again
        set_random_key(random_key(*self._prefix, layer, self._uses[layer]))
        self._uses[layer] += not self._again
