"""The generators of random numbers that a process has: those of Python, NumPy and torch."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


def set_random_key(key: int) -> None:
    """Seed torch (every device in use), NumPy's legacy generator (the low 32 bits) and Python's from one key."""
    torch.default_generator.manual_seed(key)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    random.seed(key)


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Let them give the numbers of a key inside, the same in every process, and then continue as before.

    No other thread may draw from them meanwhile.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        set_random_key(key)
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        if on_gpus is not None:
            torch.cuda.set_rng_state_all(on_gpus)


def draws(call: Callable[[], object]) -> bool:
    """Return whether a call draws from them, also if it raises."""
    before = _states()
    try:
        call()
    except Exception:
        return _states() != before
    return _states() != before


def _states() -> bytes:
    return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().numpy().tobytes()))
