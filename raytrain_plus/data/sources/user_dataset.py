"""Call the function that `data.dataset` names, and say which kind of dataset it returns."""

from __future__ import annotations

import functools
import hashlib
import inspect
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import DataLoader, IterableDataset

from raytrain_plus.errors import DataError, TaskError
from raytrain_plus.generators import seeded
from raytrain_plus.job.task_loader import load_function, reporting, trim_traceback

Kind = Literal["indexed", "iterated", "ray"]
"""Read by index; read once from begin to end; a `ray.data.Dataset`."""
_OPEN = 17
"""Datasets that a process keeps open: the sources of the largest mix, and the held-out rows."""
_SEED = 0


@dataclass(frozen=True, slots=True)
class UserDataset:
    """What the function returned."""

    spec: str
    """`module:function`."""
    roots: tuple[str, ...]
    """Folders from which it is imported."""
    value: Any
    kind: Kind
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the dataset is read: it may have been written for one thread, as torch's DataLoader uses it."""

    def items(self, indices: Sequence[int]) -> list[Any]:
        """Return the items at these indices; for an indexed dataset. Raises `TaskError` with the user's own frames."""
        many = getattr(self.value, "__getitems__", None)
        found: list[Any] = []
        with self.lock:
            if many is not None:
                with reporting(lambda error: self.failed(error, f"an item of {_listed(indices)}")):
                    found = list(many(list(indices)))
            else:
                for index in indices:
                    with reporting(lambda error: self.failed(error, f"item {index}")):  # noqa: B023
                        found.append(self.value[index])
        if len(found) != len(indices):
            raise DataError(
                f"__getitems__ returned {len(found)} items for {len(indices)} indices", f"dataset {self.spec}"
            )
        return found

    def failed(self, error: BaseException, what: str) -> TaskError:
        """Return what to raise for an error of the dataset's code, which was asked for `what`."""
        return TaskError(
            f"{what} raised {type(error).__name__}: {error}",
            where=f"dataset {self.spec}",
            user_traceback=trim_traceback(error),
        )


@functools.lru_cache(_OPEN)
def open_dataset(spec: str, roots: tuple[str, ...], run: str) -> UserDataset:
    """Return what `module:function` returns; a process calls it once for each `run`, which may be any text.

    A process that outlives a run, such as a notebook's or one that Ray uses again, calls it again for the next one,
    because the data may have changed. Raises `TaskError` if it cannot be imported or raises, and `DataError` if it
    returns no dataset that can be read.
    """
    value = call_function(spec, roots)
    return UserDataset(spec, roots, value, _kind_of(spec, value))


def call_function(spec: str, roots: Sequence[str]) -> Any:
    """Return what `module:function` returns, the same in every process if it draws random numbers.

    So two functions that split a dataset at random return two parts of one split. Raises `TaskError` if it cannot be
    imported or raises.
    """
    function = load_function(spec, [Path(root) for root in roots])

    def report(error: BaseException) -> TaskError:
        what = f"the function raised {type(error).__name__}: {error}"
        return TaskError(what, where=f"dataset {spec}", user_traceback=trim_traceback(error))

    with reporting(report), seeded(_SEED):
        return function()


def source_digest(spec: str, roots: Sequence[str]) -> str:
    """Return the SHA-256 of the function's source, or of its name if it has none that can be read."""
    function = load_function(spec, [Path(root) for root in roots])
    try:
        text = inspect.getsource(function)
    except (OSError, TypeError):
        # Such as a class of a compiled module, or a partial function.
        text = spec
    return hashlib.sha256(text.encode()).hexdigest()


def _kind_of(spec: str, value: Any) -> Kind:
    where = f"dataset {spec}"
    if type(value).__module__.startswith("ray.data.") and hasattr(value, "input_files"):
        return "ray"
    if isinstance(value, DataLoader):
        raise DataError(
            "the function returned a DataLoader, which makes batches",
            where,
            expected="a dataset: the run makes the batches",
            remedy="return its `dataset`",
        )
    if isinstance(value, Mapping):
        names = ", ".join(map(str, list(value)[:5]))
        raise DataError(
            f"the function returned a {type(value).__name__} with the keys {names}",
            where,
            expected="one dataset",
            remedy="return one of its values",
        )
    if isinstance(value, IterableDataset) or (isinstance(value, Iterable) and not hasattr(value, "__getitem__")):
        return "iterated"
    if not hasattr(value, "__getitem__"):
        raise DataError(
            f"the function returned a {type(value).__name__}",
            where,
            expected="a torch.utils.data.Dataset, a datasets.Dataset, an IterableDataset or a ray.data.Dataset",
        )
    if not hasattr(value, "__len__"):
        raise DataError(
            f"{type(value).__name__} has no length",
            where,
            remedy="define __len__, or derive it from torch.utils.data.IterableDataset",
        )
    return "indexed"


def _listed(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
