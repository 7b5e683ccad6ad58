"""The types of settings: which there are, whether a value fits one, and how they are spelled. Pure."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

Numbers = Literal["uint8", "uint16", "uint32", "int16", "int32", "int64"]
"""The types of the token numbers in a file that holds nothing else."""

Format = Literal["parquet", "jsonl", "csv", "arrow", "text", "huggingface", "images", "webdataset", "lance", Numbers]
"""The formats of data."""

Precision = Literal["fp32", "tf32", "bf16", "fp16", "bf16-params"]
"""The formats of the numbers in forward and backward passes."""

Sharded = Literal["none", "optimizer", "full"]
"""What of the training state each worker holds in part."""

Offload = Literal["none", "optimizer"]
"""What of the training state is in the host's memory, not in the GPU's."""

Recompute = Literal["none", "selective", "full"] | Sequence[str]
"""Which layers are computed again in backward passes: all, or those of these names."""


Problem = tuple[str, str, str] | None
"""What is wrong with the values of settings: what, expected, remedy; None if nothing is."""

Bound = Callable[[Any], Problem]
"""Returns what is wrong with the value of a setting, whose type is right."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a field says of its setting: `name: Annotated[type, *marks] = default`."""

    hint: Any
    """The type, without marks."""
    marks: tuple[Any, ...]
    """Its bounds (`job.bounds`), and whether a run keeps it (`job.sameness`)."""
    entry: dataclasses.Field[Any]

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.entry.default is MISSING and self.entry.default_factory is MISSING

    @property
    def default(self) -> Any:
        """The value of a setting that is not given; only if it is not required."""
        return self.entry.default if self.entry.default_factory is MISSING else self.entry.default_factory()

    @property
    def group(self) -> type | None:
        """The class of the settings below this one, if it is a group."""
        return nested(self.hint)

    def problem(self, value: Any) -> Problem:
        """Return what is wrong with a value whose type is right."""
        found = (mark(value) for mark in self.marks if callable(mark))
        return next((problem for problem in found if problem is not None), None)


@functools.cache
def settings_of(cls: type) -> Mapping[str, Setting]:
    """Return the settings of one level, by name."""
    hints, marked = get_type_hints(cls), get_type_hints(cls, include_extras=True)

    def marks(name: str) -> tuple[Any, ...]:
        return get_args(marked[name])[1:] if get_origin(marked[name]) is Annotated else ()

    return {one.name: Setting(hints[one.name], marks(one.name), one) for one in dataclasses.fields(cls)}


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
