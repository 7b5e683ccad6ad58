"""What a run takes from a DataLoader: dataset, batch size, shuffling and collate function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from raytrain_plus.errors import InputError


@dataclass(frozen=True, slots=True)
class LoadedData:
    """A dataset, and how its loader makes batches of it."""

    dataset: Any
    batch_size: int
    shuffled: bool
    collate: Any
    drops_last: bool

    @property
    def rows(self) -> int | None:
        """The rows of an epoch; None for a dataset without a length."""
        try:
            return len(self.dataset)
        except TypeError:
            return None


def read_loader(loader: Any, where: str) -> LoadedData:
    """Return what a loader has. `where`: what made it. Raises `InputError` for what a run would not do as it does."""
    if isinstance(loader, (list, tuple)) and len(loader) == 1:
        [loader] = loader
    if not isinstance(loader, DataLoader):
        many = isinstance(loader, (list, tuple, dict))
        raise InputError(
            f"the rows come from a {type(loader).__name__}{' of loaders' if many else ''}",
            where=where,
            expected="one torch.utils.data.DataLoader",
            remedy="join the datasets with torch.utils.data.ConcatDataset, or mix them in a job file with data.mix",
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        kind = type(loader.batch_sampler).__name__
        raise InputError(
            "the loader makes no batches of its own" if loader.batch_sampler is None else f"a {kind} makes the batches",
            where=where,
            expected="a DataLoader with a batch_size",
            remedy="leave out batch_sampler: a run divides the rows over its workers itself",
        )
    dataset: Any = loader.dataset
    sampler: Any = loader.sampler
    plain = isinstance(dataset, IterableDataset) or type(sampler) in (SequentialSampler, RandomSampler)
    if type(sampler) is SubsetRandomSampler:
        dataset, plain = Subset(dataset, list(sampler.indices)), True
    if not plain or (type(sampler) is RandomSampler and (sampler.replacement or len(sampler) != len(dataset))):
        raise InputError(
            f"the sampler {type(sampler).__name__} is not offered",
            where=where,
            expected="shuffle=True or False, or a SubsetRandomSampler",
            remedy="weigh the loss in training_step, or repeat rows in the dataset",
        )
    shuffled = type(sampler) in (RandomSampler, SubsetRandomSampler)
    return LoadedData(dataset, loader.batch_size, shuffled, loader.collate_fn, bool(loader.drop_last))
