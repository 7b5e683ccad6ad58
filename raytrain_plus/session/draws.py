"""Random numbers that a training function draws before its loop: the same ones each time that it begins."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def drawing_from(key: int) -> Iterator[None]:
    """Draw from this key in the context, and outside it as if nothing had been drawn."""
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    draw_from(key)
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])
        random.setstate(kept[2])
        if on_gpus is not None:
            torch.cuda.set_rng_state_all(on_gpus)


def draw_from(key: int) -> None:
    """Set the generators of torch, NumPy and Python from a key of 64 bits, as `training.model.randomness` does."""
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(key)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


def after_model(key: int) -> int:
    """Return the key of what is drawn after `session.model`, which builds a model the first time only."""
    return (key + 1) % 2**64
