"""What is no tensor - settings, counters, a scheduler's state - as JSON, with the tensors in it taken out by name.

JSON has no word for a tuple, an infinity, a key that is no text, or a tensor: these become {"~": kind, ...}. What has
no such word either is refused by name: nothing is ever pickled.
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
    """`value` as JSON. Its tensors go into `tensors`, under `name` and where they are in it.

    Raises `TaskError` for what cannot be written down.
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
        f"the training state holds a {type(value).__name__} in '{name}', which cannot be written down",
        expected="tensors, numbers, text, None, and lists, tuples, sets and dicts of these",
        remedy="keep it out of the optimizer's state and of the scheduler's state_dict(), or make it one of these",
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
    """What `to_json` made JSON of; `tensor(name, on_cpu)` gives the tensors back."""
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
