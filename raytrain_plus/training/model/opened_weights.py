"""Open the files of a task's weights: names and shapes at once, values when they are asked for."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from typing_extensions import override

from raytrain_plus.errors import TaskError, first_line

WHERE = "Task.weights"
"""Place of an error in the files."""
MODEL, INDEX = "model.safetensors", "model.safetensors.index.json"
"""What a folder has: one file, or an index of several."""


class OpenedWeights(Protocol):
    """Named tensors in files."""

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""

    def shapes(self, names: Iterable[str]) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each of these tensors; no values are read."""

    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each of these tensors with its name; nothing else is read. Copy the values: they belong to the file."""


def open_weights(path: Path) -> OpenedWeights:
    """Open a safetensors file, a folder of such files, or a torch file of plain tensors.

    Raises `TaskError` if there is none, or if it cannot be read.
    """
    if path.is_dir():
        if (path / MODEL).is_file():
            return _one_file(path / MODEL)
        if (path / INDEX).is_file():
            return _parts(path / INDEX)
        raise TaskError(
            f"the folder {path} has no {MODEL}",
            where=WHERE,
            expected=f"{MODEL}, or {INDEX} and its parts",
            remedy="name the file itself if it has another name",
        )
    if not path.is_file():
        raise TaskError(
            f"there is no file or folder {path}",
            where=WHERE,
            expected="a path that every worker can read",
            remedy="" if path.is_absolute() else f"give an absolute path; this one is relative to {Path.cwd()}",
        )
    return _one_file(path) if path.suffix == ".safetensors" else TorchWeights(path)


class SafetensorsWeights(OpenedWeights):
    """Tensors in safetensors files."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """Take the file of each tensor, by the tensor's name."""
        self._files = files

    @property
    @override
    def names(self) -> Collection[str]:
        return self._files.keys()

    @override
    def shapes(self, names: Iterable[str]) -> Mapping[str, tuple[int, ...]]:
        found = dict[str, tuple[int, ...]]()
        for file, own in self._by_file(names).items():
            with _opened(file) as opened:
                found |= {name: tuple(opened.get_slice(name).get_shape()) for name in own}
        return found

    @override
    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for file, own in self._by_file(names).items():
            with _opened(file) as opened:
                for name in own:
                    yield name, opened.get_tensor(name)

    def _by_file(self, names: Iterable[str]) -> Mapping[Path, list[str]]:
        found = defaultdict[Path, list[str]](list)
        for name in names:
            found[self._files[name]].append(name)
        return found


class TorchWeights(OpenedWeights):
    """A dict of tensors that `torch.save` wrote, mapped into memory, so that only used values are read."""

    def __init__(self, file: Path) -> None:
        """Open the file. Raises `TaskError` if it holds anything but plain tensors."""
        try:
            held = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise _not_plain(file) from error
        if not isinstance(held, Mapping) or not all(
            isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in held.items()
        ):
            raise _not_plain(file)
        self._held: Mapping[str, torch.Tensor] = held

    @property
    @override
    def names(self) -> Collection[str]:
        return self._held.keys()

    @override
    def shapes(self, names: Iterable[str]) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(self._held[name].shape) for name in names}

    @override
    def tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self._held[name].detach()) for name in names)


def _one_file(file: Path) -> SafetensorsWeights:
    with _opened(file) as opened:
        return SafetensorsWeights(dict.fromkeys(opened.keys(), file))


def _parts(index: Path) -> SafetensorsWeights:
    """Open the files that an index names, as `save_pretrained` writes them."""
    try:
        named = json.loads(index.read_text())["weight_map"]
        files = {str(name): index.parent / part for name, part in named.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TaskError(
            f"{index} is not an index of safetensors files: {first_line(error)}",
            where=WHERE,
            expected='{"weight_map": {name of a tensor: name of its file}}',
            remedy="copy the folder again",
        ) from None
    missing = next((file for file in files.values() if not file.is_file()), None)
    if missing is not None:
        raise TaskError(
            f"there is no file {missing}, which {index.name} names", where=WHERE, remedy="copy the whole folder"
        )
    return SafetensorsWeights(files)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open one safetensors file. Raises `TaskError` if it cannot be read, also in the context."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise TaskError(
            f"{file} cannot be read: {first_line(error)}",
            where=WHERE,
            expected="a file that safetensors.torch.save_file wrote",
            remedy="copy it again",
        ) from None


def _not_plain(file: Path) -> TaskError:
    return TaskError(
        f"{file} is not a torch file that holds tensors by name and nothing else",
        where=WHERE,
        expected="a safetensors file, or what torch.save(model.state_dict(), ...) writes",
        remedy="open it where it is trusted, and save model.state_dict() with safetensors.torch.save_file",
    )
