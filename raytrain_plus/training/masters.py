"""The float32 weights that the optimizer changes, where the model's own are bfloat16 copies: `precision: bf16-params`.

The masters are the committed state; the copies can be made from them at any time, and are after every change. Gradients
are summed in float32 from the first microbatch on. Frozen parameters stay as they are, because a copy would only take
memory. See Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from raytrain_plus.torch_compat import copy_each

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


class Masters:
    """The weights that an optimizer changes: for each trained parameter its master, or itself if it has none."""

    def __init__(self, named: Named, masters: Mapping[str, nn.Parameter]) -> None:
        """Take the trained parameters, and the masters of those that `to_bfloat16` has rounded."""
        self.named = [(name, masters.get(name, value)) for name, value in named]
        self._copies = [value for name, value in named if name in masters]
        self._masters = [masters[name] for name, _ in named if name in masters]

    def share_gradients(self) -> None:
        """Let each master have the gradient of its copy."""
        for master, copy in zip(self._masters, self._copies, strict=True):
            master.grad = copy.grad

    def copy_to_model(self) -> None:
        """Write the weights into the model, rounded."""
        if self._copies:
            with torch.no_grad():
                copy_each([copy.data for copy in self._copies], [value.data for value in self._masters])
