"""What shows that a training function has changed its model: writes to its values, and the modes of its modules."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from raytrain_plus.torch_compat import write_count


class ValueMark(NamedTuple):
    """A parameter or buffer of a model."""

    value: torch.Tensor
    writes: int
    trained: bool


def marks_of(module: nn.Module) -> dict[str, ValueMark]:
    """Return the parameters and buffers of a model by name."""
    values = itertools.chain(module.named_parameters(), module.named_buffers())
    return {name: ValueMark(value, write_count(value), value.requires_grad) for name, value in values}


def same(before: ValueMark | None, now: ValueMark | None, again: bool) -> bool:
    """Return whether a value is the same and not written, and `again` trained as before.

    Moved to another device, a buffer is another object.
    """
    if before is None or now is None or (again and before.trained != now.trained):
        return False
    moved = before.value.device != now.value.device
    return moved or (before.value is now.value and before.writes == now.writes)


def modes_of(module: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Return each module with whether it is set to training."""
    return [(one, one.training) for one in module.modules()]


def put_back(modes: Sequence[tuple[nn.Module, bool]]) -> bool:
    """Set the modules as `modes_of` has found them; return whether any was set otherwise."""
    changed = [(one, training) for one, training in modes if one.training != training]
    for one, training in changed:
        one.training = training
    return bool(changed)
