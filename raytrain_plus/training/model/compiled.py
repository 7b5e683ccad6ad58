"""Layers whose forward pass torch compiles (`compile: true`), each by itself; alike layers share their code.

The random keys, the buffers and the sums stay outside of the compiled code, so a layer need not be compiled again when
the group changes. Each shape of a batch has code of its own, whichever came first: code for any shape, which torch
would make after the second one, computes other bits, and a worker that joins later would not have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from raytrain_plus.job.setting_types import Recompute
from raytrain_plus.torch_compat import set_up_compiler
from raytrain_plus.training.model.recompute import again_inside, is_again_inside, names_of

SHAPES = 16
"""The most shapes of its input for which a layer is compiled: of training, short and held-out microbatches."""


def compile_layers(layers: Mapping[str, nn.Module], recompute: Recompute, *, varying: bool) -> None:
    """Have the forward pass of each layer compiled when it is first called; those that are recomputed selectively, so.

    `varying`: the code is made for shapes that vary.
    """
    set_up_compiler(SHAPES * len(layers))
    again = names_of(recompute, layers)
    for name, layer in layers.items():
        forward: Any = layer.forward
        if name in again and is_again_inside(recompute, layer):
            forward = again_inside(forward)
        layer.forward = torch.compile(forward, dynamic=varying)
