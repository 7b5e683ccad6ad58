"""A model without values, for what only its names, shapes and arguments say."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from raytrain_plus.errors import TaskError


def without_values(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that `build` returns, without values. It leaves the random numbers of others alone."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return build()
        except TaskError:
            raise
        except Exception:
            # It reads values from a file.
            return build().to("meta")
