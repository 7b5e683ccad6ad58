"""Name the tensors of the training state, and hash them.

Names: `param/<name>`, `buffer/<name>` (persistent buffers), `optim/<parameter>/<key>`. Tied parameters appear once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from raytrain_plus.state.entry import REBUILT, StateTensor


def named_state(
    module: nn.Module, optimizer: torch.optim.Optimizer, parameters: Sequence[tuple[str, nn.Parameter]]
) -> dict[str, torch.Tensor]:
    """Return every tensor of the state by name, on its own device; Python numbers become float64 scalars."""
    return {**dict(_module_state(module)), **optimizer_state(optimizer, parameters)}


def optimizer_state(
    optimizer: torch.optim.Optimizer | None, parameters: Sequence[tuple[str, nn.Parameter]]
) -> dict[str, torch.Tensor]:
    """Return the optimizer's tensors by name; empty if there is no optimizer."""
    if optimizer is None:
        return {}
    state: dict[str, torch.Tensor] = {}
    names = {id(parameter): name for name, parameter in parameters}
    for parameter, values in optimizer.state.items():
        state |= optimizer_values(names[id(parameter)], values)
    return state


def optimizer_values(parameter: str, values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors and numbers of an optimizer's state for one parameter, as named tensors."""
    state = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor):
            state[f"optim/{parameter}/{key}"] = value.detach()
        elif isinstance(value, (int, float)):
            state[f"optim/{parameter}/{key}"] = torch.tensor(float(value), dtype=torch.float64)
    return state


def _module_state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in module.named_parameters():
        yield f"param/{name}", parameter.detach()
    persistent = module.state_dict().keys()
    for name, buffer in module.named_buffers():
        if name in persistent:
            yield f"buffer/{name}", buffer.detach()


def state_sha256(state: dict[str, torch.Tensor]) -> str:
    """Return SHA-256 over the sorted names: name NUL dtype NUL shape NUL little-endian bytes; scalars as float64."""
    digest = hashlib.sha256()
    for name in sorted(state):
        entry = entry_of(name, state[name])
        digest.update(entry.head)
        digest.update(entry.scalar or bytes_of(state[name].cpu()).numpy().data)
    return digest.hexdigest()


def entry_of(name: str, tensor: torch.Tensor) -> StateTensor:
    """Return the entry of a tensor of the state."""
    scalar = b"" if tensor.dim() else bytes_of(tensor.cpu().to(torch.float64)).numpy().tobytes()
    if name.startswith(REBUILT):
        scalar = bytes_of(tensor).numpy().tobytes()
    size = tensor.numel() * tensor.element_size()
    return StateTensor(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), size=size, scalar=scalar)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, in one dimension; they share its memory if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, for example `float32`."""
    return str(dtype).removeprefix("torch.")
