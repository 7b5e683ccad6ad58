"""Convert settings, counters and a scheduler's state to JSON and back; their tensors are kept separately by name.

JSON cannot express a tuple, an infinity, a key that is not a string, or a tensor: these become {"~": kind, ...}. Any
other value is refused by name: nothing is ever pickled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from raytrain_plus.errors import TaskError

Json = Any
_KIND = "~"


def to_json(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Json:
    """Return `value` as JSON. Its tensors go into `tensors`, named `name` followed by their path in `value`.

    Raises `TaskError` for a value that cannot be converted.
    """
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return {_KIND: "tensor", "name": name, "cpu": value.device.type == "cpu"}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_KIND: "float", "value": str(value)}
    if isinstance(value, dict):
        return _from_dict(value, name, tensors)
    if isinstance(value, (list, set, frozenset)) or (isinstance(value, tuple) and not hasattr(value, "_fields")):
        items = [to_json(entry, f"{name}/{index}", tensors) for index, entry in enumerate(_in_order(value))]
        return items if isinstance(value, list) else {_KIND: _kind_of(value), "items": items}
    raise TaskError(
        f"the training state holds a {type(value).__name__} in '{name}', which cannot be saved",
        expected="tensors, numbers, strings, None, and lists, tuples, sets and dicts of these",
        remedy="keep it out of the optimizer's state and the scheduler's state_dict(), or convert it to one of these",
    )


def _from_dict(value: dict[Any, Any], name: str, tensors: dict[str, torch.Tensor]) -> Json:
    if all(isinstance(key, str) for key in value) and _KIND not in value and not isinstance(value, Counter):
        return {key: to_json(entry, f"{name}/{key}", tensors) for key, entry in value.items()}
    items = [[to_json(key, name, {}), to_json(entry, f"{name}/{key}", tensors)] for key, entry in value.items()]
    return {_KIND: "counter" if isinstance(value, Counter) else "dict", "items": items}


def _in_order(value: Iterable[Any]) -> Iterable[Any]:
    return sorted(value) if isinstance(value, (set, frozenset)) else value


def _kind_of(value: Any) -> str:
    return "tuple" if isinstance(value, tuple) else "set"


def from_json(value: Json, tensor: Callable[[str, bool], torch.Tensor]) -> Any:
    """Return the value that `to_json` converted; `tensor(name, on_cpu)` returns its tensors."""
    if isinstance(value, list):
        return [from_json(entry, tensor) for entry in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: from_json(entry, tensor) for key, entry in value.items()}
    if kind == "tensor":
        return tensor(value["name"], value["cpu"])
    if kind == "float":
        return float(value["value"])
    items = from_json(value["items"], tensor)
    if kind in ("dict", "counter"):
        return dict(items) if kind == "dict" else Counter(dict(items))
    return (tuple if kind == "tuple" else set)(items)
