"""Put the slices of a tensor together, as the file of the model has it. Pure.

`parallel.tensor` cuts them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from raytrain_plus.membership.slice_names import slice_number, whole_weight
from raytrain_plus.state.entry import Cut, StateTensor
from raytrain_plus.state.weight_rows import Packed


def name_of_whole(name: str) -> str:
    """Return the name of the tensor that a tensor of the state is a slice of; its own name if it is no slice.

    >>> name_of_whole("param/block0@2.qkv.weight"), name_of_whole("param/head.bias")
    ('param/block0.qkv.weight', 'param/head.bias')
    """
    kind, slash, rest = name.partition("/")
    return f"{kind}{slash}{whole_weight(rest)}"


def module_of(name: str) -> str:
    """Return the name of the module, in the model that is not cut, to which a tensor of the state belongs.

    >>> module_of("param/block0@2.qkv.weight"), module_of("ema/head.bias")
    ('block0.qkv', 'head')
    """
    return name_of_whole(name).partition("/")[2].rpartition(".")[0]


def shape_of_whole(shape: Sequence[int], cut: Cut, slices: int) -> tuple[int, ...]:
    """Return the shape of a tensor that is cut into slices of this shape."""
    kind, _ = cut
    return (shape[0], shape[1] * slices) if kind == "row" else (shape[0] * slices, *shape[1:])


def join(parts: Sequence[Any], rows: int, cut: Cut) -> npt.NDArray[np.uint8]:
    """Return the bytes of a tensor, given those of its slices, which have `rows` rows each.

    >>> join([b"abcd", b"efgh"], 2, ("row", 1)).tobytes(), join([b"abcd", b"efgh"], 2, ("column", 2)).tobytes()
    (b'abefcdgh', b'abefcdgh')
    >>> join([b"abcd", b"efgh"], 2, ("column", 1)).tobytes()
    b'abcdefgh'
    """
    kind, fused = cut
    count = rows if kind == "row" else fused
    return np.concatenate([np.frombuffer(part, dtype=np.uint8).reshape(count, -1) for part in parts], 1).reshape(-1)


def joined(tensors: Mapping[str, Packed], cuts: Mapping[str, Cut]) -> dict[str, Packed]:
    """Return the tensors of a model whole, given all slices of those that are cut.

    `cuts`: how the modules are cut, by name: see `state.holding.Holding`.
    """
    found: dict[str, Packed] = {}
    slices: dict[str, dict[int, Packed]] = {}
    for name, packed in tensors.items():
        if (whole := name_of_whole(name)) == name:
            found[name] = packed
        else:
            slices.setdefault(whole, {})[_number(name)] = packed
    for name, parts in slices.items():
        dtype, shape, _ = parts[0]
        cut = cuts[module_of(name)]
        data = join([parts[number][2] for number in sorted(parts)], shape[0], cut)
        found[name] = dtype, shape_of_whole(shape, cut, len(parts)), data
    return found


class Joining:
    """Yields whole tensors of a model from a state that has some in slices: each once its last slice has come."""

    def __init__(self, entries: Mapping[str, StateTensor], exported: Collection[str]) -> None:
        """Join those of these entries that are `exported`; they come in the order of `entries`."""
        self._exported = exported
        self._wholes: dict[str, list[StateTensor]] = {}
        """The slices of each tensor that has any, in order."""
        for name, entry in entries.items():
            if name in exported and entry.cut is not None:
                self._wholes.setdefault(name_of_whole(name), []).append(entry)
        for slices in self._wholes.values():
            slices.sort(key=lambda entry: _number(entry.name))
        self._come: dict[str, dict[str, bytearray]] = {}
        self._entries = entries

    def model(self) -> list[StateTensor]:
        """Return what the file holds, in the order in which `add` yields it."""
        found = []
        for name in self._entries:
            if name not in self._exported:
                continue
            slices = self._wholes.get(name_of_whole(name), ())
            if not slices:
                found.append(self._entries[name])
            elif name == max(entry.name for entry in slices):
                found.append(_whole(name_of_whole(name), slices))
        return found

    def add(self, entry: StateTensor, data: Any) -> Iterator[Any]:
        """Yield what can be written once these bytes of a tensor have come, which follow those before."""
        if entry.name not in self._exported:
            return
        if entry.cut is None:
            yield data
            return
        whole = name_of_whole(entry.name)
        come = self._come.setdefault(whole, {})
        come.setdefault(entry.name, bytearray()).extend(memoryview(data).cast("B"))
        slices = self._wholes[whole]
        if all(len(come.get(one.name, b"")) == one.size for one in slices):
            del self._come[whole]
            yield join([come[one.name] for one in slices], slices[0].rows, entry.cut)


def _whole(name: str, slices: Sequence[StateTensor]) -> StateTensor:
    first = slices[0]
    assert first.cut is not None, "it is a slice"
    shape = shape_of_whole(first.shape, first.cut, len(slices))
    return StateTensor(name=name, dtype=first.dtype, shape=shape, size=first.size * len(slices), also=first.also)


def _number(name: str) -> int:
    """Return the number of a slice."""
    return slice_number(name.partition("/")[2].partition(".")[0])
