"""What a user writes: the model, the optimizer, the loss. No Ray, no Horovod, no rank.

class Digits(Task):
    def model(self):
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["pixels"]), batch["label"])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import pyarrow as pa
import torch
from torch import nn

BufferRule = Literal["mean", "first", "max", "refuse"]


class Task:
    """One training task. `args` of the job become the constructor's keyword arguments.

    Only `loss`, and one of `model` and `layers`, must be written; everything else has a default.
    """

    def layers(self) -> Mapping[str, Callable[[], nn.Module]] | None:
        """The model as consecutive layers, name -> builder, each taking what the one before it returns.

        A model that says its layers gets its random numbers keyed per layer (initial values and dropout alike) and can
        be cut between any two of them. Return None (the default) to write `model` instead.
        """
        return None

    def model(self) -> nn.Module:
        """The whole model, freshly initialised on the CPU."""
        raise NotImplementedError(f"{type(self).__name__} must define model() or layers()")

    def tied(self) -> Mapping[str, str]:
        """Parameters that are one and the same, in different `layers`: {"head.out.weight": "embed.tokens.weight"}.

        Each layer keeps a copy of its own, so that the model can be cut between them. The first-named starts with the
        other's values, and both take the sum of their gradients; `optimizer` must give them the same settings. What an
        nn.Sequential shares between its modules is found by itself, and what a layer shares inside needs no word.
        """
        return {}

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """The optimizer over (name, parameter) pairs. Default: AdamW with a learning rate of 1e-3."""
        return torch.optim.AdamW([parameter for _, parameter in parameters], lr=1e-3)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        """A learning-rate scheduler, stepped once after every optimizer step, or None."""
        return None

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor | tuple[torch.Tensor, float]:
        """The mean loss of `batch`, a scalar; or (mean, weight) where rows do not count alike (weight: tokens, say).

        Without a weight, a batch weighs as many rows as it has.
        """
        raise NotImplementedError(f"{type(self).__name__} must define loss(model, batch)")

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, torch.Tensor | float]:
        """Held-out figures of `batch`, each a mean over its rows. Default: the loss, as `loss`.

        Called without gradients and with the model in evaluation mode. The run's figure is the mean over all rows.
        """
        result = self.loss(model, batch)
        return {"loss": result[0] if isinstance(result, tuple) else result}

    def collate(self, table: pa.Table) -> Any:
        """A batch from its rows. Default: a dict of tensors, one per column.

        Numeric and boolean columns become (rows,) tensors, fixed-size and equally long lists (rows, length, ...).
        Override it for strings, ragged lists, or anything that needs the whole batch. It is called on a thread that
        runs ahead of the steps, and during an evaluation on the training thread as well: it must bear both at once, and
        draw no random numbers (`data.transform` has a generator for them).
        """
        return {name: column_tensor(table, name) for name in table.column_names}

    def buffer_rule(self, name: str) -> BufferRule | None:
        """What becomes of the buffer `name` when the shards of a step each leave their own value in it.

        `mean` over shards weighted by rows (the default for floating buffers), `max` (the default for integers),
        `first`: shard 0's value, `refuse`: changing it is an error. None takes the default.
        """
        return None

    def show(self, model: nn.Module) -> str | None:
        """A few lines to print when training is done (a sample that the model wrote, say), or None."""
        return None


def column_tensor(table: pa.Table, name: str) -> torch.Tensor:
    """One column as a tensor: (rows,) for numbers, (rows, length, ...) for lists of equal length. Raises TypeError."""
    column = table.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    shape = [len(column)]
    while (
        pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type)
    ):
        values = column.flatten()
        if len(column) and len(values) % len(column):
            raise TypeError(f"column '{name}' holds lists of different lengths: override Task.collate to pad them")
        shape.append(len(values) // len(column) if len(column) else 0)
        column = values
    if column.null_count:
        raise TypeError(f"column '{name}' holds {column.null_count} nulls: fill them in data.prepare or Task.collate")
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)):
        raise TypeError(f"column '{name}' has type {column.type}, which is no number: override Task.collate")
    array = column.to_numpy(zero_copy_only=False)
    return torch.tensor(array).reshape(shape)
