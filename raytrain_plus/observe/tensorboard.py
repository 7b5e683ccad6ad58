"""TensorBoard scalars, made from events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raytrain_plus.observe.events import Event


class Scalars:
    """Writes loss, samples/s, workers and evaluation figures as the events tell them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._step = 0

    def add(self, event: Event) -> None:
        """Takes one event; those without figures are passed over."""
        if event["kind"] == "step_committed":
            self._step = event["step"]
            self._scalar("train/loss", event["loss"], event)
            if event["seconds"] > 0:
                self._scalar("train/samples_per_second", event["samples"] / event["seconds"], event)
        elif event["kind"] == "view_formed":
            self._scalar("run/workers", len(event["members"]), event)
        elif event["kind"] == "evaluated":
            self._step = event["step"] + 1
            for name, value in event["metrics"].items():
                self._scalar(f"evaluation/{name}", value, event)

    def _scalar(self, name: str, value: float, event: Event) -> None:
        if self._writer is None:
            # Loaded with the first figure: it brings torch along, and the workers are not to wait for that.
            from tensorboardX import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), flush_secs=5)
        self._writer.add_scalar(name, value, self._step, walltime=event["time"])

    def close(self) -> None:
        """Writes what is left."""
        if self._writer is not None:
            self._writer.close()
