"""A gate that lets one contestant step at a time while the others, all started, wait without using a core."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from pathlib import Path

import numpy as np

from raytrain_plus import Task

_TIME = struct.Struct("d")


class Gate:
    """The outer side: closed by an exclusive lock on a file, of which every pass takes a shared one."""

    def __init__(self, folder: Path) -> None:
        """Begin open."""
        folder.mkdir(parents=True)
        self.folder = folder
        self._file = os.open(folder / "gate", os.O_CREAT | os.O_RDWR)

    def close(self) -> None:
        """Let nobody pass from now on."""
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def open(self) -> None:
        """Let everybody pass."""
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def passed(self) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
        """Return when each process has passed, in Unix seconds."""
        return {path.name: np.fromfile(path) for path in self.folder.glob("[0-9]*")}


class _Passer:
    """The inner side, in a process that trains."""

    def __init__(self, folder: str) -> None:
        self._gate = os.open(f"{folder}/gate", os.O_RDONLY)
        self._times = os.open(f"{folder}/{os.getpid()}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def __call__(self) -> None:
        fcntl.flock(self._gate, fcntl.LOCK_SH)
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        os.write(self._times, _TIME.pack(time.time()))


def gated(kind: type[Task]) -> type[Task]:
    """Return a task whose loss passes a gate first, that of the folder in its argument `gate`."""

    class Gated(kind):  # type: ignore[misc,valid-type]
        def __init__(self, gate: str) -> None:
            super().__init__()
            self._folder = gate
            self._passer: _Passer | None = None

        def loss(self, model: object, batch: object) -> object:
            if self._passer is None:
                self._passer = _Passer(self._folder)
            self._passer()
            return super().loss(model, batch)

    Gated.__name__ = Gated.__qualname__ = f"Gated{kind.__name__}"
    return Gated
