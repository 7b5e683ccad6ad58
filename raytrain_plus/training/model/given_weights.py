"""Give a model the initial values that a task has in files: which weight reads which tensor, and what does not fit."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from raytrain_plus.errors import TaskError, listed
from raytrain_plus.task import Task, WeightFiles
from raytrain_plus.training.model.opened_weights import WHERE, OpenedWeights, open_weights

NONE_TIED: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class WantedTensor:
    """A parameter of the model, or a persistent buffer."""

    names: tuple[str, ...]
    """All its names in the model: several if it is shared or tied."""
    needed: bool = True
    """Whether the files must have it, unless it is new; buffers may keep their values."""


def text_of_stars(pattern: str, name: str) -> tuple[str, ...] | None:
    """Return the text of each * in a pattern that fits a name, as little as possible; None if it does not fit.

    >>> text_of_stars("block*.*", "block0.qkv.weight"), text_of_stars("head.*", "norm.weight")
    (('0', 'qkv.weight'), None)
    """
    found = re.fullmatch("(.*?)".join(map(re.escape, pattern.split("*"))), name)
    return None if found is None else found.groups()


def fits(name: str, patterns: Collection[str]) -> bool:
    """Return whether one of these patterns fits a name."""
    # There can be hundreds of both where most patterns are names.
    return name in patterns or any("*" in one and text_of_stars(one, name) is not None for one in patterns)


def name_in_files(name: str, names: Mapping[str, str]) -> str:
    """Return the name in the files of a weight of the model.

    >>> name_in_files("block0.qkv.weight", {"block*.*": "h.*.attn.*"}), name_in_files("norm.weight", {})
    ('h.0.attn.qkv.weight', 'norm.weight')
    """
    for pattern, to in names.items():
        texts = text_of_stars(pattern, name)
        if texts is not None:
            first, *rest = to.split("*")
            return first + "".join(text + part for text, part in zip(texts, rest, strict=True))
    return name


def tensors_read(
    wanted: Iterable[WantedTensor], files: WeightFiles, there: Collection[str]
) -> tuple[dict[str, str], list[str]]:
    """Return which tensor each weight reads, by its first name, and the weights that lack one and are not new.

    `there`: the names of all tensors in the files.
    """
    reads, lacking = dict[str, str](), list[str]()
    for one in wanted:
        own = [name for name in one.names if not fits(name, files.new)]
        found = next((to for name in own if (to := name_in_files(name, files.names)) in there), None)
        if found is not None:
            reads[one.names[0]] = found
        elif own and one.needed:
            lacking.append(one.names[0])
    return reads, lacking


def check_patterns(files: WeightFiles, names: Collection[str]) -> None:
    """Raise `TaskError` for a pattern that fits none of the model's `names`."""
    for what, patterns in (("names", files.names), ("new", files.new)):
        for pattern in patterns:
            if all(text_of_stars(pattern, name) is None for name in names):
                raise TaskError(
                    f"no weight of the model fits '{pattern}'",
                    where=f"{WHERE}: {what}",
                    expected=f"names such as {listed(names)}, in which * stands for any text",
                    remedy="correct the pattern, or remove it",
                )


def given_weights(task: Task) -> GivenWeights | None:
    """Open the files of a task's initial values; None if it has none.

    Raises `TaskError` if there are no such files, or if they are described wrongly.
    """
    if not callable(task.weights):
        raise TaskError(
            "the attribute 'weights' hides the method weights() that a run calls",
            where=f"the task {type(task).__name__}",
            remedy="give the attribute another name",
        )
    files = task.weights()
    if files is None:
        return None
    if not isinstance(files, WeightFiles):
        raise TaskError(
            f"weights() returned {type(files).__name__}", where=WHERE, expected="raytrain_plus.WeightFiles, or None"
        )
    if isinstance(files.new, str):
        raise TaskError(f"`new` is the text '{files.new}'", where=WHERE, expected=f"a list: ['{files.new}']")
    for pattern, to in files.names.items():
        if pattern.count("*") != to.count("*"):
            raise TaskError(
                f"`names` maps '{pattern}' to '{to}', which has another number of *",
                where=WHERE,
                expected="a * in the name in the files for each one in the name in the model",
            )
    return GivenWeights(files, open_weights(Path(files.path)))


class GivenWeights:
    """Initial values in opened files."""

    def __init__(self, files: WeightFiles, opened: OpenedWeights) -> None:
        self._files = files
        self._opened = opened

    def fill(
        self, module: nn.Module, layer: str = "", tied: Mapping[str, str] = NONE_TIED, only: str | None = None
    ) -> None:
        """Copy the values of a freshly built model, or of one of its layers, from the files.

        `tied`: of the whole model, copy -> owner; a copy is not read, and its owner may have its name in the files.
        `only`: the one parameter to read. Raises `TaskError` for weights that the files lack, and for other shapes.
        """
        found = _tensors_of(module, layer, tied)
        targets = {one.names[0]: value for one, value in found if only is None or only in one.names}
        reads, lacking = tensors_read([one for one, _ in found if one.names[0] in targets], self._files, self._there)
        self._check_complete(lacking)
        readers = defaultdict[str, list[str]](list)
        for name, tensor in reads.items():
            readers[tensor].append(name)
        with torch.no_grad():
            for tensor, value in self._opened.tensors(readers):
                for name in readers[tensor]:
                    self._check_shape(name, targets[name].shape, tensor, value.shape)
                    targets[name].copy_(value)

    def check(self, model: nn.Module, tied: Mapping[str, str]) -> str:
        """Return a remark on the tensors that a whole model, which may have no values, does not take; empty if none.

        No values are read. Raises the errors of `fill`, and `TaskError` for patterns that fit nothing.
        """
        # With its own names, a copy is checked like any other weight.
        check_patterns(self._files, [name for one, _ in _tensors_of(model, "", NONE_TIED) for name in one.names])
        found = _tensors_of(model, "", tied)
        reads, lacking = tensors_read([one for one, _ in found], self._files, self._there)
        self._check_complete(lacking)
        shapes = self._opened.shapes(set(reads.values()))
        for one, value in found:
            if (tensor := reads.get(one.names[0])) is not None:
                self._check_shape(one.names[0], value.shape, tensor, shapes[tensor])
        names = (name for one, _ in found for name in one.names if not fits(name, self._files.new))
        taken = {name_in_files(name, self._files.names) for name in names}
        unused = [name for name in self._there if name not in taken]
        count = f"{len(unused):,} tensor{'s' * (len(unused) > 1)}"
        return f"{self._files.path} holds {count} that the model does not take: {listed(unused)}" if unused else ""

    @property
    def _there(self) -> Collection[str]:
        return self._opened.names

    def _check_complete(self, lacking: Sequence[str]) -> None:
        if lacking:
            raise TaskError(
                f"{self._files.path} has no values for {len(lacking):,} of the model's weights: {listed(lacking)}",
                where=WHERE,
                expected=f"a tensor '{name_in_files(lacking[0], self._files.names)}'; the files have "
                f"{listed(self._there) or 'none'}",
                remedy="map the names in the model to those in the files with `names`, or name the weights that are "
                "to be drawn in `new`",
            )

    def _check_shape(self, name: str, wanted: Sequence[int], tensor: str, there: Sequence[int]) -> None:
        if tuple(wanted) != tuple(there):
            known = "" if tensor == name else f", where it is '{tensor}'"
            raise TaskError(
                f"'{name}' has the shape {list(wanted)} in the model, and {list(there)} in {self._files.path}{known}",
                where=WHERE,
                remedy="build the model with the sizes of the files, or name the weight in `new`",
            )


def _tensors_of(module: nn.Module, layer: str, tied: Mapping[str, str]) -> list[tuple[WantedTensor, torch.Tensor]]:
    """Return the parameters and persistent buffers of a module, but for those that are copies of others."""
    prefix, saved = f"{layer}." if layer else "", module.state_dict().keys()
    copies = defaultdict[str, list[str]](list)
    for copy, owner in tied.items():
        copies[owner].append(copy)
    parameters = module.named_parameters(prefix=layer, remove_duplicate=False)
    buffers = module.named_buffers(prefix=layer, remove_duplicate=False)
    persistent = ((name, value) for name, value in buffers if name.removeprefix(prefix) in saved)
    names, values = defaultdict[int, list[str]](list), dict[int, torch.Tensor]()
    for name, value in (*parameters, *persistent):
        names[id(value)].append(name)
        values[id(value)] = value
    found = []
    for key, own in names.items():
        if not any(name in tied for name in own):
            every = (*own, *(copy for name in own for copy in copies[name]))
            found.append((WantedTensor(every, needed=isinstance(values[key], nn.Parameter)), values[key]))
    return found
