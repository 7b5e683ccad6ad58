"""Find tensors of a training state that hold NaN or infinity."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from raytrain_plus.errors import TrainingError
from raytrain_plus.state.transfer import Array
from raytrain_plus.state.weight_rows import Tensors, name_of

Named = Iterable[tuple[str, torch.Tensor]]


def not_finite(tensors: Named, allowed: Collection[str] = ()) -> list[str]:
    """Return the names of the floating or complex tensors that hold NaN or infinity, in order.

    Skips the `allowed` names and an optimizer's scalars: some keep infinity as the best value so far.
    """
    found = [
        name
        for name, value in tensors
        if name not in allowed and not (name.startswith("optim/") and value.dim() == 0) and not _finite(value)
    ]
    return list(dict.fromkeys(found))


def check_finite(tensors: Named, allowed: Collection[str], step: int) -> None:
    """Raise `TrainingError` if a tensor of the state after `step` holds NaN or infinity."""
    found = not_finite(tensors, allowed)
    if found:
        raise TrainingError(not_finite_message(step, found))


def not_finite_message(step: int, names: Collection[str]) -> str:
    """Return the error message for these non-finite tensors of the state after `step`."""
    first, *others = names
    more = f" and {len(others)} more tensors hold" if len(others) > 1 else " and one more tensor hold" * len(others)
    return (
        f"the state after step {step} is not finite: '{first}'{more or ' holds'} NaN or infinity, though all gradients "
        "were finite; usual causes: overflow due to the learning rate or the optimizer, BatchNorm over one value"
    )


def as_tensors(packed: Tensors) -> Named:
    """Return tensors that share the memory of packed ones; it must be writable."""
    return ((name_of(key), tensor_of(dtype, data).reshape(shape)) for key, (dtype, shape, data) in packed.items())


def tensor_of(dtype: str, data: Array) -> torch.Tensor:
    """Return a flat tensor that shares these bytes."""
    kind = getattr(torch, dtype)
    # numpy gives an empty slice a stride of 0, with which torch views no other dtype.
    return torch.from_numpy(data).view(kind) if data.size else torch.empty(0, dtype=kind)


def _finite(value: torch.Tensor) -> bool:
    if not (value.is_floating_point() or value.is_complex()):
        return True
    value = value.detach()
    # 8-bit floating dtypes do not support `isfinite`.
    return bool((value.float() if value.element_size() == 1 else value).isfinite().all())
