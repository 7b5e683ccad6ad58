"""Define what the listeners of a run are to do, wherever they run. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raytrain_plus.storage.folders.claimed import Claim

TENSORBOARD = "TensorBoard"
CALLBACKS = "the task's callbacks"


@dataclass(frozen=True, kw_only=True, slots=True)
class CalledTask:
    """The task whose methods are called, and the run that they hear of."""

    task: str
    """`module:Class`."""
    pickled_task: bytes | None
    """The class by value, if it cannot be imported."""
    roots: tuple[str, ...]
    """Folders from which the task is imported."""
    args: Mapping[str, Any]
    total_steps: int
    batch_size: int
    rows: int
    checkpoints: str
    """The folder of the run's checkpoints, as `open_folder` takes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Listened:
    """What the listeners of a run are to do."""

    folder: str
    """The run's folder, as `open_folder` takes it."""
    claim: Claim | None
    """That of the controller, without which nothing is written there."""
    job_yaml: str
    """The resolved job."""
    trackers: Sequence[str]
    """The packages of the trackers that the job names."""
    task: CalledTask | None
    """None if the task has no callbacks."""
    roots: Sequence[str]
    """Folders from which the task is imported; a process of the listeners runs in the first one."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment variables of the trackers: see `settings_for`."""

    @property
    def names(self) -> Sequence[str]:
        """What reports call the listeners."""
        return [TENSORBOARD, *self.trackers, *([CALLBACKS] if self.task else [])]
