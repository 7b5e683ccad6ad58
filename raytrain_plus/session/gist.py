"""What shows that a local variable of a training function has another value than before. Pure."""

from __future__ import annotations

from collections.abc import Set
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from raytrain_plus.torch_compat import write_count

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
_DEPTH = 3
"""How deep lists, mappings and objects are looked into."""
_ITEMS = 50
"""How many items of each are looked at."""
_LARGE = 1 << 20
"""Bytes above which an array is not compared."""


def gist(value: Any, apart: Set[int], module: str, depth: int = _DEPTH) -> Any:
    """Return what differs once the value has changed; None for what is not compared.

    `apart`: the ids of tensors that may change, as those of the model do. `module`: the objects of its classes are
    looked into; those of libraries, such as a progress bar, may count what they like.
    """
    if isinstance(value, _PLAIN):
        # As text, so that NaN is the same as NaN.
        return type(value), repr(value)
    if isinstance(value, torch.Tensor):
        # Those of inference mode do not count.
        return None if id(value) in apart or value.is_inference() else (id(value), write_count(value))
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.nbytes <= _LARGE and value.dtype != object else None
    if isinstance(value, nn.Module):
        return [gist(one, apart, module) for one in (*value.parameters(), *value.buffers())]
    if depth == 0:
        return None
    if isinstance(value, (list, tuple)):
        return len(value), [gist(one, apart, module, depth - 1) for one in value[:_ITEMS]]
    if isinstance(value, dict):
        some = islice(value.items(), _ITEMS)
        return len(value), [(repr(key), gist(one, apart, module, depth - 1)) for key, one in some]
    if isinstance(value, set):
        return len(value)
    if type(value).__module__ == module:
        return gist(getattr(value, "__dict__", None), apart, module, depth)
    return None
