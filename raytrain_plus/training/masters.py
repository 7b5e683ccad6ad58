"""The float32 weights that the optimizer changes, where the model's own are bfloat16 copies: `precision: bf16-params`.

The masters are the committed state; the copies can be made from them at any time, and are after every change. Gradients
are summed in float32 from the first microbatch on. Frozen parameters stay as they are, because a copy would only take
memory. See Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

Named = Sequence[tuple[str, nn.Parameter]]


def to_bfloat16(named: Named) -> dict[str, nn.Parameter]:
    """Round the trained float32 parameters to bfloat16, in place, and return their masters by name.

    Only those of two or more dimensions, which matrix products use: biases and the weights of normalizations are small,
    and are used with statistics in float32.
    """
    masters = {}
    for name, value in named:
        if value.requires_grad and value.dtype == torch.float32 and value.dim() > 1:
            masters[name] = nn.Parameter(value.detach().clone())
            value.data = value.detach().to(torch.bfloat16)
            value.grad_dtype = torch.float32
    return masters
