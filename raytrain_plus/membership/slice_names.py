"""Name the parts of a layer that is cut into slices. Pure.

Each slice of a layer has a name of its own, as a layer has: `block0@2` is slice 2 of `block0`. What is not
cut, a norm say, keeps the layer's name, and every worker of the layer's stage has it.
"""

from __future__ import annotations

MARK = "@"
"""Stands between a layer's name and the number of a slice; no layer has it in its name."""


def slice_name(layer: str, number: int) -> str:
    """Return the name of a slice of a layer.

    >>> unit_of("block0", 2), layer_of_unit("block0@2"), layer_of_unit("block0")
    ('block0@2', 'block0', 'block0')
    """
    return f"{layer}{MARK}{number}"


def layer_of(name: str) -> str:
    """Return the layer to which a slice belongs; a layer's name stands for what is not cut of it."""
    return name.partition(MARK)[0]


def slice_number(name: str) -> int:
    """Return the number of a slice.

    >>> number_of_unit("block0@2")
    2
    """
    return int(name.partition(MARK)[2])


def whole_weight(name: str) -> str:
    """Return the name of a weight in the model that is not cut, given that of one of its slices, or its own.

    >>> whole_weight("block0@2.qkv.weight"), whole_weight("head.bias"), whole_weight("weight")
    ('block0.qkv.weight', 'head.bias', 'weight')
    """
    layer, dot, rest = name.partition(".")
    return f"{layer_of(layer)}{dot}{rest}"


def slice_of_weight(name: str, number: int) -> str:
    """Return the name of a slice of a weight: the inverse of `whole_weight`.

    >>> slice_of_weight("block0.qkv.weight", 2)
    'block0@2.qkv.weight'
    """
    layer, dot, rest = name.partition(".")
    return f"{slice_name(layer, number)}{dot}{rest}"


def is_slice(name: str) -> bool:
    """Return whether the name is that of a slice."""
    return MARK in name
