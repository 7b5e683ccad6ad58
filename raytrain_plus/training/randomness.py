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
from collections.abc import Iterator
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
        keyed = Keyed()
        handles = [
            self._model.get_submodule(name).register_forward_pre_hook(_Hook(prefix, name, keyed))
            for name in self._layers
        ]
        try:
            yield keyed
        finally:
            for handle in handles:
                handle.remove()

    def apply(self, step: int) -> None:
        """Keys what an optimizer draws in that step: (seed, step, 'apply')."""
        set_random_key(random_key(self._seed, step, "apply"))


class Keyed:
    """One microbatch while it is keyed."""

    def __init__(self) -> None:
        self.again = False

    def backward(self) -> None:
        """The backward pass begins: a layer that is called from now on is computed again (activation checkpointing),
        with the numbers that it drew the first time.

        For a layer that is used several times, each of its uses is to be checkpointed by itself.
        """
        self.again = True


class _Hook:
    """A forward hook that counts the uses of its layer within one microbatch."""

    def __init__(self, prefix: tuple[int | str, ...], name: str, keyed: Keyed) -> None:
        self._prefix = prefix
        self._name = name
        self._keyed = keyed
        self._use = 0

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        # A backward pass goes through the uses from the last to the first.
        self._use -= self._keyed.again
        set_random_key(random_key(*self._prefix, self._name, self._use))
        self._use += not self._keyed.again
