"""Random numbers as a function of the job: every use has a key, whoever computes it.

A key is made of named parts and turned into 64 bits by BLAKE2b, so that anyone can recompute it:

    random_key(7, "init", "head")         initial values of the layer `head` under seed 7
    random_key(7, 120, 3, 0, "head", 0)   step 120, shard 3, microbatch 0, layer `head`, its first use there
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn


def random_key(*parts: int | str) -> int:
    """The first eight bytes, little-endian, of BLAKE2b over the parts joined by '/'. Between 0 and 2^64 - 1."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def set_random_key(key: int) -> None:
    """Seeds torch (every device in use), NumPy's legacy generator (the low 32 bits) and Python's from one key."""
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


def repeatable() -> None:
    """From now on this process computes the same bits from the same numbers, or says which operation cannot."""
    # cuBLAS reads it when it is first used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    # Memory that nobody has written yet is nobody's result; to fill it costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class LayerKeys:
    """Sets a layer's own key before each of its forwards, so that a cut between layers changes no random number.

    Models that do not say their layers get one key a microbatch, with an empty layer name.
    """

    def __init__(self, model: nn.Module, layers: tuple[str, ...], seed: int) -> None:
        self._model = model
        self._layers = layers
        self._seed = seed

    @contextlib.contextmanager
    def microbatch(self, step: int | str, shard: int, microbatch: int) -> Iterator[Keyed]:
        """Keys everything drawn inside: (seed, step, shard, microbatch, layer, use)."""
        prefix = (self._seed, step, shard, microbatch)
        set_random_key(random_key(*prefix, "", 0))
        keyed = Keyed({name: self._model.get_submodule(name) for name in self._layers}, prefix)
        with keyed.open():
            yield keyed

    def apply(self, step: int) -> None:
        """Keys what an optimizer draws in that step: (seed, step, 'apply')."""
        set_random_key(random_key(self._seed, step, "apply"))


class Keyed:
    """One microbatch while it is keyed."""

    def __init__(self, layers: Mapping[str, nn.Module], prefix: tuple[int | str, ...]) -> None:
        self._layers = layers
        self._prefix = prefix
        self._uses = dict.fromkeys(layers, 0)
        self._again = False

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """While it is open, each layer that is called draws by its own key."""
        handles = [layer.register_forward_pre_hook(self._hook(name)) for name, layer in self._layers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def backward(self) -> None:
        """The backward pass begins: a layer that is called from now on is computed again (activation checkpointing),
        with the numbers that it drew the first time.

        For a layer that is used several times, each of its uses is to be checkpointed by itself.
        """
        self._again = True

    def _hook(self, name: str) -> Callable[[nn.Module, Any], None]:
        def key(module: nn.Module, inputs: Any) -> None:
            # A backward pass goes through the uses from the last to the first.
            self._uses[name] -= self._again
            set_random_key(random_key(*self._prefix, name, self._uses[name]))
            self._uses[name] += not self._again

        return key
