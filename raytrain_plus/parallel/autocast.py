"""Whether `torch.autocast` is on, and that a task leaves it as it is where its loss calls the model."""

from __future__ import annotations

import torch

from raytrain_plus.errors import TrainingError

Modes = tuple[tuple[str, torch.dtype], ...]
"""Kinds of devices for which autocast is on, each with its dtype."""
_KINDS = ("cpu", "cuda")


def open_modes() -> Modes:
    """Return for which kinds of devices autocast is on now, and with which dtype."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in _KINDS if torch.is_autocast_enabled(kind))


def check_modes(own: Modes) -> None:
    """Raise `TrainingError` if the modes that are open now, where the loss calls the model, are not the run's `own`.

    Stages that do not run the loss would not have them.
    """
    found = open_modes()
    if found == own:
        return
    opened = [(kind, dtype) for kind, dtype in found if (kind, dtype) not in own]
    if opened:
        kind, dtype = opened[0]
        said = f"opens torch.autocast for {kind} in {str(dtype).removeprefix('torch.')} around the model"
    else:
        said = "turns torch.autocast off around the model"
    raise TrainingError(
        f"the task {said}: leave that to the setting `precision` (bf16, fp16), which every stage and the evaluation "
        "follow; inside a layer's forward, a task may open or close it"
    )
