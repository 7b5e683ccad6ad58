"""The types of settings: which there are, whether a value fits one, and how they are spelled. Pure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Format = Literal["parquet", "jsonl", "csv", "arrow", "text", "huggingface", "images", "webdataset", "lance"]
"""The formats of data."""

Precision = Literal["fp32", "tf32", "bf16", "fp16", "bf16-params"]
"""The formats of the numbers in forward and backward passes."""

Sharded = Literal["none", "optimizer", "full"]
"""What of the training state each worker holds in part."""

Offload = Literal["none", "optimizer"]
"""What of the training state is in the host's memory, not in the GPU's."""

Recompute = Literal["none", "selective", "full"] | Sequence[str]
"""Which layers are computed again in backward passes: all, or those of these names."""


@functools.cache
def fields_of(cls: type) -> Mapping[str, tuple[Any, bool]]:
    """Return the settings of one level: name -> (type, whether it is required)."""
    hints = get_type_hints(cls)
    return {
        entry.name: (hints[entry.name], entry.default is MISSING and entry.default_factory is MISSING)
        for entry in dataclasses.fields(cls)
    }


def nested(hint: Any) -> type | None:
    """Return the dataclass in a setting's type, or None."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return next((option for option in options if dataclasses.is_dataclass(option)), None)  # type: ignore[return-value]


def flatten(settings: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every setting as (dotted key, value); groups that are not given are left out."""
    for entry in dataclasses.fields(settings):
        value = getattr(settings, entry.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from flatten(value, f"{prefix}{entry.name}.")
        else:
            yield f"{prefix}{entry.name}", value


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of a setting's type."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return any(fits(value, option) for option in get_args(hint))
    if origin is Literal:
        return value in get_args(hint)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    if origin is Sequence:
        return isinstance(value, (list, tuple)) and all(fits(entry, get_args(hint)[0]) for entry in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def spell_type(hint: Any) -> str:
    """Return a setting's type in words."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return " or ".join(spell_type(option) for option in get_args(hint))
    if origin is Literal:
        return "one of " + ", ".join(str(option) for option in get_args(hint))
    if origin is Mapping:
        return "a mapping with strings as keys"
    if origin is Sequence:
        (entry,) = get_args(hint)
        return {int: "a list of integers", str: "a list of strings"}.get(entry, "a list of mappings")
    words = {float: "a number", int: "an integer", bool: "true or false", str: "a string"}
    return {**words, type(None): "null", type: "a class"}[hint]


def plain(value: Any) -> Any:
    """Return settings as mappings and lists, for YAML."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value
