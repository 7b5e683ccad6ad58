"""Refuse parameters, persistent buffers and plain tensors that a model's forward pass adds to it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from raytrain_plus.errors import TrainingError


class AddedState:
    """Compares once what a module keeps after its first forward pass with what it kept when it was built.

    Buffers that are not persistent are the module's own: nobody synchronises, copies or saves those that appear.
    """

    def __init__(self, module: nn.Module) -> None:
        """Note what a module keeps before any forward pass."""
        self._module = module
        self._known = _kept(module)
        self._checked = False

    def allow(self) -> None:
        """Allow it: a run that an older version began does as it did before."""
        self._checked = True

    def check(self) -> None:
        """Raise `TrainingError` if the first forward pass has added something that a run would have to keep."""
        if self._checked:
            return
        self._checked = True
        added = _kept(self._module)
        for name in sorted(added.keys() - self._known.keys()):
            attribute = name.rpartition(".")[2]
            raise TrainingError(
                f"the forward pass adds the {added[name]} '{name}' to the model, which other workers would not have, "
                "and no checkpoint: make it in the module's constructor, or, if it can be computed again, register it "
                f"with self.register_buffer('{attribute}', ..., persistent=False)"
            )


def _kept(module: nn.Module) -> dict[str, str]:
    """Return what a run must keep of a module, by name: its kind, in words."""
    found = {name: "parameter" for name, _ in module.named_parameters(remove_duplicate=False)}
    saved = module.state_dict(keep_vars=True).keys()
    found |= {name: "buffer" for name, _ in module.named_buffers(remove_duplicate=False) if name in saved}
    return found | dict.fromkeys(plain_tensors(module), "tensor")


def plain_tensors(module: nn.Module) -> Iterator[str]:
    """Yield the names of tensors of a module that are neither parameters nor buffers, so that nobody copies them."""
    for place, part in module.named_modules():
        for attribute, held in vars(part).items():
            # A tensor computed from parameters (as by weight_norm) is not state.
            if isinstance(held, torch.Tensor) and held.grad_fn is None:
                yield f"{place}.{attribute}" if place else attribute
