"""Messages between pipeline stages: a value as a JSON header and raw bytes. Nothing is ever pickled.

    8 bytes     length of the header, little-endian
    header      JSON: [value, blocks]
    blocks      the raw bytes of tensors, NumPy arrays and byte strings, each at a multiple of 64 bytes

`value` is plain JSON for None, bool, int, finite float, str, list, and dict with text keys. Everything else is
{"~": kind, ...}:

    float       infinities and NaN, as text               tuple, set, frozenset    their `items`
    dict        keys that are not text: pairs in `items`  complex                  `real` and `imag`, as text
    block       a tensor, an array or bytes: its number; the same object twice has one number
    type        a built-in type (list, dict, ...), by name from a fixed list
    object      of a class of the batch: its `class`, and its parts (`arguments`, `state`, `items`, `pairs`)

Each of `blocks` gives its offset, its length and its content: ["tensor", dtype, shape, strides, requires_grad, class,
attributes] (a subclass of `torch.Tensor` has a class), ["array", scalar] (in NumPy's own .npy format) or ["bytes",
mutable]. Strides are kept, because results can depend on them in the last bit. Each tensor gets its own memory.

Reading imports nothing and calls nothing that the message names. A class is looked up by name among those that the
reader knows: a fixed list, and the classes of the first microbatch, which every worker has collated with its own task
(`classes_of`).
"""

from __future__ import annotations

import copyreg
import datetime
import decimal
import io
import json
import math
import tokenize
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from raytrain_plus.errors import RunError, TaskError

ValueName = str | tuple[Any, str, Any]
"""The path of a part of a value: a name, or (the container's path, a format of path and key, the key)."""
Classes = Mapping[str, type]
"""By module and name: the classes whose objects may be in a message."""

ALIGNMENT = 64
DEPTH = 100
"""The deepest nesting of lists, dicts and objects."""

_KIND = "~"
_PLAIN = frozenset((bool, int, str, type(None)))
_LENGTH = 8
_KNOWN = (
    OrderedDict,
    Counter,
    defaultdict,
    deque,
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    torch.Size,
)
_TYPES: Classes = MappingProxyType(
    {one.__name__: one for one in (bool, bytes, dict, float, frozenset, int, list, set, str, tuple)}
)
_REMEDY = "return only these from Task.collate, or do not use parallel.pipeline"
_EXPECTED = "tensors, NumPy arrays, numbers, text, bytes, None, and lists, tuples, sets, dicts and objects of these"


def class_name(cls: type) -> str:
    """Return the name of a class in messages."""
    return f"{cls.__module__}.{cls.__qualname__}"


KNOWN: Classes = MappingProxyType({class_name(one): one for one in _KNOWN})
"""The classes that every reader knows."""


def classes_of(batch: Any) -> Classes:
    """Return the classes of the objects in a batch.

    Raises `TaskError` if it contains values that no message can carry.
    """
    writer = _Writer(None)
    writer.value(batch, "batch", 0)
    return MappingProxyType({**KNOWN, **writer.met})


def to_bytes(value: Any, classes: Classes = KNOWN, name: str = "message") -> bytearray:
    """Return `value`, called `name` in errors, as a message.

    Raises `TaskError` if it contains an object that no message can carry, or whose class is not in `classes`.
    """
    writer = _Writer(classes)
    value = writer.value(value, name, 0)
    end, blocks = 0, []
    for described, data in writer.blocks:
        blocks.append([_aligned(end), data.nbytes, *described])
        end = _aligned(end) + data.nbytes
    header = json.dumps([value, blocks], separators=(",", ":")).encode()
    start = _aligned(_LENGTH + len(header))
    message = bytearray(start + end)
    message[:_LENGTH] = len(header).to_bytes(_LENGTH, "little")
    message[_LENGTH : _LENGTH + len(header)] = header
    whole = memoryview(message)
    for (at, length, *_), (_, data) in zip(blocks, writer.blocks, strict=True):
        whole[start + at : start + at + length] = data
    return message


def from_bytes(message: bytearray | memoryview, classes: Classes = KNOWN) -> Any:
    """Return the value of a message. Raises `RunError` if the message is invalid or has objects of other classes."""
    try:
        whole = memoryview(message)
        length = int.from_bytes(whole[:_LENGTH], "little")
        value, blocks = json.loads(bytes(whole[_LENGTH : _LENGTH + length]))
        reader = _MessageReader(classes, blocks, whole[_aligned(_LENGTH + length) :])
        return reader.value(value, 0)
    except _DAMAGED as error:
        raise RunError(f"a message from another stage cannot be read: {type(error).__name__}: {error}") from error


_DAMAGED = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
"""Errors raised by the parts of a damaged message; `RuntimeError` includes `RecursionError`."""


def _written(place: ValueName) -> str:
    if isinstance(place, str):
        return place
    around, how, key = place
    return how.format(_written(around), key)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


class _Writer:
    """Encodes one value."""

    def __init__(self, classes: Classes | None) -> None:
        self._classes = classes
        """None: accept and collect all classes."""
        self.met: dict[str, type] = {}
        self.blocks: list[tuple[list[Any], memoryview]] = []
        self._numbers: dict[int, int] = {}
        """By `id`, the block of an object."""
        self._kept: list[Any] = []
        """Keeps objects alive whose `id` is used here, so that no other object gets the same `id`."""

    def value(self, value: Any, name: ValueName, depth: int) -> Any:
        """Return `value`, called `name` in errors, as JSON."""
        if depth > DEPTH:
            raise self._refusal(value, name, f"more than {DEPTH} levels deep")
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is float:
            return value if math.isfinite(value) else {_KIND: "float", "value": str(value)}
        if kind is complex:
            return {_KIND: "complex", "real": repr(value.real), "imag": repr(value.imag)}
        if kind is dict:
            return self._dict(value, name, depth)
        if kind in (list, tuple, set, frozenset):
            items = self._items(value, name, depth)
            return items if kind is list else {_KIND: kind.__name__, "items": items}
        if isinstance(value, (torch.Tensor, bytes, bytearray)) or kind is np.ndarray or isinstance(value, np.generic):
            return {_KIND: "block", "number": self._block(value, name, depth)}
        if isinstance(value, type) and _TYPES.get(value.__name__) is value:
            return {_KIND: "type", "name": value.__name__}
        return self._object(value, name, depth)

    def _items(self, values: Any, name: ValueName, depth: int) -> list[Any]:
        return [
            one if type(one) in _PLAIN else self.value(one, (name, "{}[{!r}]", number), depth + 1)
            for number, one in enumerate(values)
        ]

    def _dict(self, value: dict[Any, Any], name: ValueName, depth: int) -> Any:
        if all(type(key) is str for key in value) and _KIND not in value:
            return {
                key: one if type(one) in _PLAIN else self.value(one, (name, "{}[{!r}]", key), depth + 1)
                for key, one in value.items()
            }
        return {_KIND: "dict", "items": self._pairs(value.items(), name, depth)}

    def _pairs(self, pairs: Any, name: ValueName, depth: int) -> list[Any]:
        return [
            [
                self.value(key, (name, "a key of {}", None), depth + 1),
                self.value(one, (name, "{}[{!r}]", key), depth + 1),
            ]
            for key, one in pairs
        ]

    def _block(self, value: Any, name: ValueName, depth: int) -> int:
        if id(value) not in self._numbers:
            if isinstance(value, torch.Tensor):
                described, data = self._tensor(value, name, depth)
            elif isinstance(value, (np.ndarray, np.generic)):
                described, data = self._array(value, name)
            else:
                described, data = ["bytes", isinstance(value, bytearray)], memoryview(bytes(value))
            self._kept.append(value)
            self._numbers[id(value)] = len(self.blocks)
            self.blocks.append((described, data))
        return self._numbers[id(value)]

    def _tensor(self, value: torch.Tensor, name: ValueName, depth: int) -> tuple[list[Any], memoryview]:
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise self._refusal(value, name, f"a tensor with the layout {value.layout}")
        plain = value.detach().as_subclass(torch.Tensor).cpu().resolve_conj().resolve_neg()
        strides = plain.stride()
        # Send values repeated by a stride of zero only once.
        packed = plain[tuple(slice(None) if stride else slice(1) for stride in strides)].contiguous()
        described: list[Any] = [
            "tensor",
            str(plain.dtype).removeprefix("torch."),
            list(plain.shape),
            list(strides),
            value.requires_grad,
            None,
            {},
        ]
        if type(value) is not torch.Tensor:
            described[5:] = [self._class(value, name), self.value(dict(vars(value)), name, depth + 1)]
        return described, packed.reshape(-1).view(torch.uint8).numpy().data

    def _array(self, value: Any, name: ValueName) -> tuple[list[Any], memoryview]:
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise self._refusal(value, name, "a NumPy array of Python objects")
        file = io.BytesIO()
        np.lib.format.write_array(file, array, allow_pickle=False)
        return ["array", isinstance(value, np.generic)], file.getbuffer()

    def _object(self, value: Any, name: ValueName, depth: int) -> Any:
        found: dict[str, Any] = {_KIND: "object", "class": self._class(value, name)}
        try:
            how, arguments, *rest = value.__reduce_ex__(2)
        except Exception:
            # Whatever it raised, it cannot be pickled either.
            raise self._refusal(value, name) from None
        state, items, pairs = ([*rest, None, None, None])[:3]
        if how is copyreg.__newobj__ and arguments[:1] == (type(value),):  # type: ignore[attr-defined]
            arguments, found["new"] = arguments[1:], True
        elif how is not type(value):
            raise self._refusal(value, name)
        inside = (name, "{} ({})", type(value).__name__)
        found["arguments"] = self._items(arguments, inside, depth + 1)
        found["state"] = self.value(state, inside, depth + 1)
        found["items"] = None if items is None else self._items(items, name, depth + 1)
        found["pairs"] = None if pairs is None else self._pairs(pairs, name, depth + 1)
        return found

    def _class(self, value: Any, name: ValueName) -> str:
        cls = type(value)
        if self._classes is None:
            self.met[class_name(cls)] = cls
        elif self._classes.get(class_name(cls)) is not cls:
            raise TaskError(
                f"{_written(name)} is a {class_name(cls)}, a class that the first microbatch does not contain",
                expected="the same classes in every batch: other stages know only those of the first microbatch",
                remedy=_REMEDY,
            )
        return class_name(cls)

    def _refusal(self, value: Any, name: ValueName, what: str = "") -> TaskError:
        found = what or f"a {class_name(type(value))}"
        return TaskError(
            f"{_written(name)} is {found}, which cannot pass between pipeline stages",
            expected=_EXPECTED,
            remedy=_REMEDY,
        )


class _MessageReader:
    """Decodes one value."""

    def __init__(self, classes: Classes, blocks: list[Any], data: memoryview) -> None:
        self._classes = classes
        self._blocks = blocks
        self._data = data
        self._made: dict[int, Any] = {}

    def value(self, value: Any, depth: int) -> Any:
        if depth > 4 * DEPTH:
            raise ValueError("it is nested too deeply")
        if isinstance(value, list):
            return self._items(value, depth)
        if not isinstance(value, dict):
            return value
        kind = value.get(_KIND)
        if kind is None:
            return {key: self.value(one, depth + 1) if type(one) in (dict, list) else one for key, one in value.items()}
        if kind == "float":
            return float(value["value"])
        if kind == "complex":
            return complex(float(value["real"]), float(value["imag"]))
        if kind == "type":
            return _TYPES[value["name"]]
        if kind == "block":
            return self._block(value["number"], depth)
        if kind == "dict":
            return dict(self._items(value["items"], depth))
        if kind == "object":
            return self._object(value, depth)
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](self._items(value["items"], depth))

    def _items(self, values: list[Any], depth: int) -> list[Any]:
        return [self.value(one, depth + 1) if type(one) in (dict, list) else one for one in values]

    def _block(self, number: int, depth: int) -> Any:
        if number not in self._made:
            offset, length, kind, *described = self._blocks[number]
            if not 0 <= offset <= offset + length <= len(self._data):
                raise ValueError("a block is truncated")
            data = self._data[offset : offset + length]
            if kind == "tensor":
                name, shape, strides, requires_grad, cls, attributes = described
                made = self._tensor(data, dtype_named(name), shape, strides, requires_grad)
                self._made[number] = made if cls is None else self._of_class(made, cls, attributes, depth)
            elif kind == "array":
                array = _read_array(data)
                self._made[number] = array[()] if described[0] else array
            elif kind == "bytes":
                self._made[number] = bytearray(data) if described[0] else bytes(data)
            else:
                raise ValueError(f"unknown kind of block: {kind}")
        return self._made[number]

    def _tensor(
        self,
        data: memoryview,
        dtype: torch.dtype,
        shape: list[int],
        strides: list[int],
        requires_grad: bool,
    ) -> torch.Tensor:
        packed = [size if stride else min(size, 1) for size, stride in zip(shape, strides, strict=True)]
        if math.prod(packed) * dtype.itemsize != len(data):
            raise ValueError("a tensor's shape does not match its number of bytes")
        value = torch.empty_strided(packed, strides, dtype=dtype)
        if len(data):
            value.copy_(torch.frombuffer(data, dtype=dtype).reshape(packed))
        return value.expand(shape).requires_grad_(requires_grad)

    def _of_class(self, value: torch.Tensor, cls: str, attributes: Any, depth: int) -> Any:
        made: Any = value.as_subclass(self._classes[cls])
        vars(made).update(self.value(attributes, depth + 1))
        return made

    def _object(self, value: dict[str, Any], depth: int) -> Any:
        cls = self._classes[value["class"]]
        arguments = self._items(value["arguments"], depth)
        made: Any = cls.__new__(cls, *arguments) if value.get("new") else cls(*arguments)
        state = self.value(value["state"], depth + 1)
        if state is not None and hasattr(made, "__setstate__"):
            made.__setstate__(state)
        elif state is not None:
            _put_state(made, state)
        if value["items"] is not None:
            made.extend(self._items(value["items"], depth))
        for key, one in self._items(value["pairs"] or [], depth):
            made[key] = one
        return made


def dtype_named(name: str) -> torch.dtype:
    """Return torch's dtype of that name. Raises `ValueError` if it does not exist."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name}")
    return found


def _read_array(data: memoryview) -> Any:
    try:
        return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except (tokenize.TokenError, SyntaxError) as error:
        # NumPy lets these errors through for a damaged header.
        raise ValueError(f"a NumPy array is damaged: {error}") from error


def _put_state(made: Any, state: Any) -> None:
    """Set attributes as `pickle` would: those of the dict and those of slots."""
    plain, slots = state if isinstance(state, tuple) else (state, None)
    made.__dict__.update(plain) if plain else None
    for name, one in (slots or {}).items():
        object.__setattr__(made, name, one)
