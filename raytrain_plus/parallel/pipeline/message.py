"""Messages between pipeline stages: a value as a msgpack header and raw bytes. Nothing is ever pickled.

    8 bytes     length of the header, little-endian
    header      msgpack: [value, blocks]
    blocks      the raw bytes of tensors, NumPy arrays and byte strings, each at a multiple of 64 bytes

`value` is None, a bool, a number or text as msgpack has them (an integer of more than 64 bits and a complex number are
extensions), or a list:

    [number]                    a block; the same object twice has one number
    [name]                      a built-in type, such as the factory of a `defaultdict`
    [class, context, parts]     a container, as torch's pytree takes it apart: a list, dict, named tuple, whatever is
                                registered there; a set, frozenset or `torch.Size`: its items; a dataclass, or a
                                subclass of dict or `UserDict`: its attributes and its items; an object that is bytes
                                to `__getstate__`, such as a tokenizer's `Encoding`: these

Each of `blocks` gives its length and its content: ["tensor", dtype, shape, strides, requires_grad], ["array", dtype as
in NumPy's .npy format, shape, order, scalar], ["bytes"] or ["bytearray"]. Strides are kept, because results can depend
on them in the last bit. Each tensor gets its own memory.

Reading imports nothing, and calls nothing that the message names but classes that the reader knows: those of a fixed
list, and those of the first microbatch, which every worker has collated with its own task (`classes_of`).
"""

from __future__ import annotations

import ast
import dataclasses
import math
import struct
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from types import MappingProxyType, MemberDescriptorType
from typing import Any

import msgpack
import numpy as np
import torch

from raytrain_plus.errors import RunError, TaskError
from raytrain_plus.torch_compat import pytree

Place = str | tuple[Any, Any, int | None]
"""The path of a part of a value: a name, or (the container's path, the container, the part's number; None: context)."""
Classes = Mapping[str, type]
"""By module and name: the classes whose objects may be in a message."""

ALIGNMENT = 64
DEPTH = 100
"""The deepest nesting of containers."""

_LENGTH = 8
_PLAIN = frozenset((bool, complex, float, int, str, type(None)))
_RAW = (torch.Tensor, np.ndarray, bytes, bytearray)
_GROUPS = (set, frozenset, torch.Size)
"""What torch's pytree does not take apart, or not into the same class."""
_INTEGER, _COMPLEX = 0, 1
"""The extensions of msgpack."""
_REMEDY = "return only these from Task.collate, or do not use parallel.pipeline"


def class_name(cls: type) -> str:
    """Return the name of a class in messages."""
    return f"{cls.__module__}.{cls.__qualname__}"


KNOWN: Classes = MappingProxyType(
    {
        class_name(one): one
        for one in (bool, bytes, float, int, str, list, tuple, dict, OrderedDict, defaultdict, deque, *_GROUPS)
    }
)
"""The classes that every reader knows: containers, and the other built-in types that a `defaultdict` may call."""


def classes_of(batch: Any) -> Classes:
    """Return the classes of the objects in a batch.

    Raises `TaskError` if it contains values that no message can carry.
    """
    writer = _Writer(None)
    writer.node(batch, "batch", 0)
    return MappingProxyType({**KNOWN, **writer.met})


def to_bytes(value: Any, classes: Classes = KNOWN, name: str = "message") -> bytearray:
    """Return `value`, called `name` in errors, as a message.

    Raises `TaskError` if it contains an object that no message can carry, or whose class is not in `classes`.
    """
    writer = _Writer(classes)
    node = writer.node(value, name, 0)
    described = [[len(data), *content] for _, content, data in writer.blocks]
    header = msgpack.packb([node, described], default=_extension, unicode_errors="surrogatepass")
    at, spans = _LENGTH + len(header), []
    for _, _, data in writer.blocks:
        at = _aligned(at)
        spans.append(slice(at, at := at + len(data)))
    message = bytearray(at)
    message[: _LENGTH + len(header)] = len(header).to_bytes(_LENGTH, "little") + header
    whole = memoryview(message)
    for span, (_, _, data) in zip(spans, writer.blocks, strict=True):
        whole[span] = data
    return message


def from_bytes(message: bytearray | memoryview, classes: Classes = KNOWN) -> Any:
    """Return the value of a message. Raises `RunError` if the message is invalid or has objects of other classes."""
    try:
        whole = memoryview(message)
        at = _LENGTH + int.from_bytes(whole[:_LENGTH], "little")
        node, described = msgpack.unpackb(whole[_LENGTH:at], ext_hook=_extended, unicode_errors="surrogatepass")
        blocks = []
        for length, *content in described:
            at = _aligned(at)
            data = whole[at : at + length]
            if len(data) != length:
                raise ValueError("it is truncated")
            blocks.append(_read_block(data, *content))
            at += length
        return _read(node, blocks, classes)
    except Exception as error:
        # What a class makes of damaged parts may raise anything.
        raise RunError(f"a message from another stage cannot be read: {type(error).__name__}: {error}") from error


def dtype_named(name: str) -> torch.dtype:
    """Return torch's dtype of that name. Raises `ValueError` if it does not exist."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name}")
    return found


class _Writer:
    """Encodes one value."""

    def __init__(self, classes: Classes | None) -> None:
        self._classes = classes
        """None: accept and collect all classes."""
        self.met: dict[str, type] = {}
        self.blocks: list[tuple[Any, list[Any], Any]] = []
        """Objects, which must live as long as their `id` is used, and their content as described and as bytes."""
        self._numbers: dict[int, int] = {}
        """By `id`, the block of an object."""

    def node(self, value: Any, place: Place, depth: int) -> Any:
        """Return `value`, whose path is `place`, as the header has it. Raises `TaskError`: see `to_bytes`."""
        cls = type(value)
        if cls in _PLAIN:
            return value
        if depth > DEPTH:
            raise _refusal(value, place, f"more than {DEPTH} levels deep")
        if cls in _RAW or issubclass(cls, np.generic):
            if id(value) not in self._numbers:
                self._numbers[id(value)] = len(self.blocks)
                self.blocks.append((value, *_block(value, place)))
            return [self._numbers[id(value)]]
        if isinstance(value, type) and KNOWN.get(class_name(value)) is value:
            return [class_name(value)]
        context, parts = _opened(value, place)
        name = class_name(cls)
        if self._classes is None:
            self.met[name] = cls
        elif self._classes.get(name) is not cls:
            raise TaskError(
                f"{_written(place)} is a {name}, a class that the first microbatch does not contain",
                expected="the same classes in every batch: other stages know only those of the first microbatch",
                remedy=_REMEDY,
            )
        nodes = [
            one if type(one) in _PLAIN else self.node(one, (place, value, number), depth + 1)
            for number, one in enumerate(parts)
        ]
        return [name, self.node(context, (place, value, None), depth + 1), nodes]


def _block(value: Any, place: Place) -> tuple[list[Any], Any]:
    """Return the content of a block, as described and as bytes."""
    if isinstance(value, (bytes, bytearray)):
        return [type(value).__name__], value
    if not isinstance(value, torch.Tensor):
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise _refusal(value, place, "a NumPy array of Python objects")
        described = np.lib.format.dtype_to_descr(array.dtype)
        if not array.dtype.itemsize or np.lib.format.descr_to_dtype(described) != array.dtype:
            raise _refusal(value, place, f"a NumPy array of the type {array.dtype}")
        order = "F" if array.flags.fnc else "C"
        return ["array", repr(described), array.shape, order, isinstance(value, np.generic)], array.tobytes("A")
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise _refusal(value, place, f"a tensor with the layout {value.layout}")
    plain = value.detach().cpu().resolve_conj().resolve_neg()
    strides = plain.stride()
    # Send values repeated by a stride of zero only once.
    packed = plain[tuple(slice(None) if stride else slice(1) for stride in strides)].contiguous()
    if 0 in packed.stride():
        # Of one value repeated, which counts as contiguous.
        packed = packed.clone(memory_format=torch.contiguous_format)
    dtype = str(plain.dtype).removeprefix("torch.")
    content = ["tensor", dtype, plain.shape, strides, value.requires_grad]
    return content, packed.reshape(-1).view(torch.uint8).numpy().data


def _read_block(data: memoryview, kind: str, *content: Any) -> Any:
    if kind in ("bytes", "bytearray"):
        return bytes(data) if kind == "bytes" else bytearray(data)
    if kind == "array":
        described, shape, order, scalar = content
        dtype = np.lib.format.descr_to_dtype(ast.literal_eval(described))
        # Elements without bytes could be any number.
        if dtype.hasobject or not dtype.itemsize or math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError("an array's shape does not match its number of bytes")
        array = np.ndarray(shape, dtype, data, order=order).copy("A")
        return array[()] if scalar else array
    if kind != "tensor":
        raise ValueError(f"unknown kind of block: {kind}")
    name, shape, strides, requires_grad = content
    packed = [size if stride else min(size, 1) for size, stride in zip(shape, strides, strict=True)]
    torch_dtype = dtype_named(name)
    if math.prod(packed) * torch_dtype.itemsize != len(data):
        raise ValueError("a tensor's shape does not match its number of bytes")
    value = torch.empty_strided(packed, strides, dtype=torch_dtype)
    if len(data):
        value.copy_(torch.frombuffer(data, dtype=torch_dtype).reshape(packed))
    return value.expand(shape).requires_grad_(requires_grad)


def _opened(value: Any, place: Place) -> tuple[Any, list[Any]]:
    """Return the context and the parts of a container. Raises `TaskError` if the value cannot pass."""
    cls = type(value)
    registered = None if cls in _GROUPS else pytree.SUPPORTED_NODES.get(cls)
    if registered is not None:
        parts, context = registered.flatten_fn(value)
        return context, list(parts)
    if cls in _GROUPS or pytree.is_namedtuple_class(cls):
        return None, list(value)
    if _has_attributes(cls):
        slots = [
            name
            for one in cls.__mro__
            for name, slot in vars(one).items()
            if isinstance(slot, MemberDescriptorType) and hasattr(value, name)
        ]
        attributes = {name: getattr(value, name) for name in slots} | getattr(value, "__dict__", {})
        return None, [attributes, dict(value.items())] if isinstance(value, dict) else [attributes]
    state = value.__getstate__() if hasattr(cls, "__getstate__") and hasattr(cls, "__setstate__") else None
    if not isinstance(state, bytes):
        raise _refusal(value, place)
    return None, [state]


def _read(node: Any, blocks: list[Any], classes: Classes) -> Any:
    """Return the value of a node of the header."""
    if type(node) is not list:
        return node
    if len(node) == 1:
        return KNOWN[node[0]] if type(node[0]) is str else blocks[node[0]]
    name, context, nodes = node
    cls: Any = classes[name]
    parts = [_read(one, blocks, classes) if type(one) is list else one for one in nodes]
    if cls in _GROUPS:
        return cls(parts)
    registered = pytree.SUPPORTED_NODES.get(cls)
    if registered is not None:
        return registered.unflatten_fn(parts, _read(context, blocks, classes))
    if pytree.is_namedtuple_class(cls):
        return cls(*parts)
    made = cls.__new__(cls)
    if not _has_attributes(cls):
        made.__setstate__(*parts)
        return made
    attributes, *items = parts
    for key, one in attributes.items():
        # Classes may refuse to be changed in the usual way.
        object.__setattr__(made, key, one)
    for key, one in items[0].items() if items else ():
        made[key] = one
    return made


def _has_attributes(cls: type) -> bool:
    """Return whether an object of the class is made of its attributes, and its items if it is a dict."""
    # A dataclass with another `__new__` also is what that makes: a list or a number, say.
    return issubclass(cls, (dict, UserDict)) or (dataclasses.is_dataclass(cls) and cls.__new__ is object.__new__)


def _extension(value: int | complex) -> msgpack.ExtType:
    if isinstance(value, complex):
        return msgpack.ExtType(_COMPLEX, struct.pack("<2d", value.real, value.imag))
    return msgpack.ExtType(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _extended(code: int, data: bytes) -> int | complex:
    return int.from_bytes(data, "little", signed=True) if code == _INTEGER else complex(*struct.unpack("<2d", data))


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _refusal(value: Any, place: Place, what: str = "") -> TaskError:
    found = what or f"a {class_name(type(value))}"
    return TaskError(
        f"{_written(place)} is {found}, which cannot pass between pipeline stages",
        expected="tensors, NumPy arrays, numbers, text, bytes, None, and lists, tuples, sets, dicts and dataclasses of "
        "these, or containers registered with torch's pytree",
        remedy=_REMEDY,
    )


def _written(place: Place) -> str:
    if isinstance(place, str):
        return place
    around, container, number = place
    cls = type(container)
    known = pytree.SUPPORTED_NODES.get(namedtuple if pytree.is_namedtuple_class(cls) else cls)  # type: ignore[arg-type]
    if number is None:
        return f"{_written(around)} (keys of {cls.__name__})"
    if known is None or known.flatten_with_keys_fn is None:
        return f"{_written(around)} ({cls.__name__})"
    return f"{_written(around)}{known.flatten_with_keys_fn(container)[0][number][0]}"
