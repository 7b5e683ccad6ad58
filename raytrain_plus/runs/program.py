"""Make a `torch.export` program of a model, in which as many dimensions as possible may vary, and say what it takes."""

from __future__ import annotations

from collections.abc import Mapping, Set
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import nn

from raytrain_plus.torch_compat import pytree, upper_bound

LETTERS = "nmkpqrstuvw"
"""The names of dimensions that vary; more are numbered."""


class Extent(NamedTuple):
    """A size in the example arguments. Dimensions with the same one vary together, such as those of ids and labels."""

    rows: bool
    """Whether it is that of a first dimension: as many rows as tokens in a row must not tie these to each other."""
    size: int


def exported(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.export.ExportedProgram:
    """Return the program of a module for these example arguments.

    A dimension varies if the program also runs with a smaller one. Raises what torch raises for a module that it cannot
    export even with the sizes of the example.
    """
    free = {extent for value in _tensors((args, kwargs)) for extent in _extents(value) if extent.size > 1}
    program = None
    for wanted in (free, {extent for extent in free if extent.rows}):
        try:
            program = _exported(module, args, kwargs, wanted)
        except Exception:
            # Some models cannot be exported with each dimension free, for example if they loop over positions.
            continue
        # torch may declare a size free that only one value fits, such as an image's before a linear layer.
        varying = {extent for extent in wanted if _varies(program, args, kwargs, extent)}
        if varying == wanted:
            return program
        free = varying
        break
    else:
        free = set()
    return _exported(module, args, kwargs, free)


def taken(program: torch.export.ExportedProgram) -> str:
    """Return what a program takes, in words, such as "ids: int64 (n, m); m at most 128"."""
    inputs = set(program.graph_signature.user_inputs)
    nodes = [node for node in program.graph.nodes if node.op == "placeholder" and node.name in inputs]
    named = [(node.name, node.meta["val"]) for node in nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    fresh = (LETTERS[number] if number < len(LETTERS) else f"d{number}" for number in count())
    names: dict[Extent, str] = {}
    bounds: dict[str, int] = {}
    said = []
    for (name, value), example in zip(named, _tensors(program.example_inputs), strict=True):
        sizes = []
        for size, extent in zip(value.shape, _extents(example), strict=True):
            if isinstance(size, int):
                sizes.append(str(size))
                continue
            if extent not in names:
                names[extent] = next(fresh)
            sizes.append(names[extent])
            most = upper_bound(program, size)
            if most is not None:
                bounds[names[extent]] = min(most, bounds.get(names[extent], most))
        shape = f"({', '.join(sizes)}{',' * (len(sizes) == 1)})"
        said.append(f"{name}: {str(value.dtype).removeprefix('torch.')} {shape}")
    return "; ".join([", ".join(said) or "no tensors", *(f"{name} at most {most:,}" for name, most in bounds.items())])


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(tree) if isinstance(value, torch.Tensor)]


def _extents(value: torch.Tensor) -> list[Extent]:
    return [Extent(number == 0, size) for number, size in enumerate(value.shape)]


def _exported(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], free: Set[Extent]
) -> torch.export.ExportedProgram:
    shapes = torch.export.ShapesCollection()
    for value in _tensors((args, kwargs)):
        auto = {number: torch.export.Dim.AUTO for number, extent in enumerate(_extents(value)) if extent in free}
        if auto:
            shapes[value] = auto
    dynamic = shapes.dynamic_shapes(module, args, kwargs)
    return torch.export.export(module, args, dict(kwargs), dynamic_shapes=dynamic)


def _varies(
    program: torch.export.ExportedProgram, args: tuple[Any, ...], kwargs: Mapping[str, Any], extent: Extent
) -> bool:
    """Return whether a program runs with a smaller size; half of it, too, because some sizes come in multiples."""
    module = program.module()
    for size in {extent.size - 1, extent.size // 2}:
        fewer_args, fewer = pytree.tree_map(lambda value, size=size: _narrowed(value, extent, size), (args, kwargs))
        try:
            with torch.no_grad():
                module(*fewer_args, **fewer)
        except Exception:
            continue
        return True
    return False


def _narrowed(value: Any, extent: Extent, size: int) -> Any:
    """Return a tensor with the first `size` entries of its dimensions with this extent; other values as they are."""
    if isinstance(value, torch.Tensor):
        for number, found in enumerate(_extents(value)):
            if found == extent:
                value = value.narrow(number, 0, size)
    return value
