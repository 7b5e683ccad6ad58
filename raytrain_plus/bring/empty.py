"""A model without values, for what only its names, shapes and arguments say."""

from __future__ import annotations

import torch
from torch import nn

from raytrain_plus.task import Task
from raytrain_plus.training.model.model import model_without_values


def without_values(task: Task) -> nn.Module:
    """Return the model of a task without values. It leaves the random numbers of others alone."""
    with torch.random.fork_rng(devices=[]):
        empty = model_without_values(task)
        # One that reads values from a file is built with them.
        return task.model().to("meta") if empty is None else empty
