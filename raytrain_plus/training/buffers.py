"""Buffers (BatchNorm's running figures and their like) over shards.

Every shard of a step starts from the committed ones. Afterwards a floating buffer is the mean over shards, weighted by
rows, and an integer one the maximum, unless the task says otherwise: so the result does not depend on who hosted what.
"""

from __future__ import annotations

import torch
from torch import nn

from raytrain_plus.errors import TaskError, TrainingError
from raytrain_plus.task import BufferRule, Task


class Buffers:
    """The committed buffers of a model, and the sums that become the next ones."""

    def __init__(self, module: nn.Module, task: Task) -> None:
        self._named = dict(module.named_buffers())
        self._rules = {name: _rule(task, name, buffer) for name, buffer in self._named.items()}
        self.committed = {name: buffer.detach().clone() for name, buffer in self._named.items()}
        rows = {"mean": torch.float64, "first": torch.float64, "max": torch.int64}
        self._sums = {
            name: torch.zeros(buffer.numel(), dtype=rows[rule], device=buffer.device)
            for name, buffer in self._named.items()
            if (rule := self._rules[name]) in rows
        }
        self._lowest = torch.iinfo(torch.int64).min

    def __len__(self) -> int:
        return len(self._sums)

    def begin_step(self) -> None:
        """Forgets the last step's sums."""
        for name, total in self._sums.items():
            total.fill_(self._lowest if self._rules[name] == "max" else 0)

    def restore(self) -> None:
        """Puts the committed values into the model."""
        with torch.no_grad():
            for name, buffer in self._named.items():
                buffer.copy_(self.committed[name])

    def end_shard(self, shard: int, rows: int) -> None:
        """Adds what the shard's forward passes left in the buffers."""
        with torch.no_grad():
            for name, buffer in self._named.items():
                rule = self._rules[name]
                if rule == "mean":
                    self._sums[name].add_(buffer.reshape(-1).to(torch.float64), alpha=rows)
                elif rule == "first" and shard == 0:
                    self._sums[name].add_(buffer.reshape(-1).to(torch.float64))
                elif rule == "max":
                    torch.maximum(self._sums[name], buffer.reshape(-1).to(torch.int64), out=self._sums[name])
                elif rule == "refuse" and not torch.equal(buffer, self.committed[name]):
                    raise TrainingError(
                        f"the buffer '{name}' changed in a forward pass, which its rule 'refuse' forbids"
                    )

    def to_reduce(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(float64 vector to be summed, int64 vector whose maximum is wanted) over workers; None where empty."""
        return self._flat(torch.float64), self._flat(torch.int64)

    def _flat(self, dtype: torch.dtype) -> torch.Tensor | None:
        parts = [total for total in self._sums.values() if total.dtype == dtype]
        return torch.cat(parts) if parts else None

    def commit(self, sums: torch.Tensor | None, maxima: torch.Tensor | None, rows: int) -> None:
        """Makes the reduced values the committed ones, and the model's."""
        at = {torch.float64: 0, torch.int64: 0}
        with torch.no_grad():
            for name, buffer in self._named.items():
                if name in self._sums:
                    dtype = self._sums[name].dtype
                    source = sums if dtype == torch.float64 else maxima
                    assert source is not None
                    value = source[at[dtype] : at[dtype] + buffer.numel()]
                    at[dtype] += buffer.numel()
                    if self._rules[name] == "mean":
                        value = value / rows
                    self.committed[name].copy_(value.reshape(buffer.shape))
                buffer.copy_(self.committed[name])


def _rule(task: Task, name: str, buffer: torch.Tensor) -> BufferRule:
    default: BufferRule = "mean" if buffer.is_floating_point() else "max"
    rule = task.buffer_rule(name) or default
    if rule == "max" and buffer.is_floating_point():
        raise TaskError(
            f"buffer_rule('{name}') says 'max' for a floating buffer", expected="'mean', 'first' or 'refuse'"
        )
    if rule == "mean" and not buffer.is_floating_point():
        raise TaskError(f"buffer_rule('{name}') says 'mean' for {buffer.dtype}", expected="'max', 'first' or 'refuse'")
    return rule
