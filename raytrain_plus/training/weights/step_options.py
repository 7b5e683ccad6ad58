"""How a job makes its steps: precision, layers compiled or computed again, averages, offload, clipping."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from raytrain_plus.job.setting_types import Recompute
from raytrain_plus.job.settings import Job
from raytrain_plus.training.model.compiled import compile_layers
from raytrain_plus.training.model.model import Built
from raytrain_plus.training.model.precision import FP32, Precision
from raytrain_plus.training.model.recompute import recompute_layers
from raytrain_plus.training.weights.masters import to_bfloat16, to_host


@dataclass(frozen=True, slots=True)
class Technique:
    """See the module docstring; the default is a plain step."""

    precision: Precision = FP32
    recompute: Recompute = "none"
    compiled: bool = False
    varying: bool = False
    """Whether the shapes of batches vary, which compiled layers must know beforehand."""
    decay: float | None = None
    """That of the weights' averages (`averages`), if any are kept."""
    offloads: bool = False
    """Whether the optimizer, with the weights that it changes, is in the host's memory."""
    clip_value: float | None = None
    """The largest magnitude of an element of the gradient; None for any."""
    clip_norm: float | None = None
    """The largest norm of the gradient after that; None for any."""

    def apply(self, built: Built, recall: Callable[[str], None] = lambda layer: None) -> dict[str, nn.Parameter]:
        """Change a model, or layers of it, in place; return the masters of its parameters (`masters`), by name.

        `recall` sets the random key of a layer, by its name, that is about to be computed again. Raises `TaskError` for
        parameters that the precision excludes.
        """
        named = list(built.module.named_parameters())
        self.precision.check_parameters(named)
        masters = to_bfloat16(named) if self.precision.has_masters else {}
        if self.offloads:
            masters = to_host(named, masters, self.precision.device)
        layers = {name: built.module.get_submodule(name) for name in built.layers}
        if self.compiled:
            compile_layers(layers or {"": built.module}, self.recompute, varying=self.varying)
        recompute_layers(layers, self.recompute, recall, compiled=self.compiled)
        return masters


PLAIN = Technique()
"""Float32 passes that keep everything, and an optimizer on the same device."""


def technique_of(job: Job, device: torch.device) -> Technique:
    """Return the technique that a job asks for."""
    return Technique(
        precision=Precision(job.precision, device),
        recompute=job.recompute,
        compiled=job.compile,
        varying=job.data.collate in ("pad", "pack"),
        decay=None if job.ema is None else job.ema.decay,
        offloads=job.offload == "optimizer",
        clip_value=job.clip_value,
        clip_norm=job.clip_norm,
    )
