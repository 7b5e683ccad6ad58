"""The weights that the optimizer changes, where the model's own are copies: `precision: bf16-params`, and `offload`.

The masters are the committed state; the copies can be made from them at any time, and are after every change. Frozen
parameters have none, because a copy would only take memory.

With bfloat16 copies, masters are float32, and gradients are summed in float32 from the first microbatch on:
Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1. With `offload: optimizer`, masters are in the
host's memory, and so is what the optimizer keeps beside them: Ren et al., "ZeRO-Offload", ATC 2021.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from raytrain_plus.device_copies import host_copy

Named = Sequence[tuple[str, nn.Parameter]]


def to_bfloat16(named: Named) -> dict[str, nn.Parameter]:
    """Round the trained float32 parameters to bfloat16, in place, and return their masters by name.

    Only those of two or more dimensions, which matrix products use: biases and the weights of normalizations are small,
    and are used with statistics in float32.
    """
    masters = {}
    for name, value in named:
        if _is_rounded(value):
            masters[name] = nn.Parameter(value.detach().clone())
            value.data = value.detach().to(torch.bfloat16)
            value.grad_dtype = torch.float32
    return masters


def copy_bytes(value: nn.Parameter) -> int:
    """Return the bytes of a parameter, given as the task builds it, once `to_bfloat16` has rounded it or left it."""
    return value.numel() * torch.bfloat16.itemsize if _is_rounded(value) else value.nbytes


def _is_rounded(value: nn.Parameter) -> bool:
    return value.requires_grad and value.dtype == torch.float32 and value.dim() > 1


def to_host(named: Named, masters: Mapping[str, nn.Parameter], device: torch.device) -> dict[str, nn.Parameter]:
    """Return the masters in the host's memory of all trained parameters on `device`, which have `masters` or none."""
    return {
        name: nn.Parameter(host_copy(masters.get(name, value), device)) for name, value in named if value.requires_grad
    }
