"""Extract the metrics of a run's events, for TensorBoard and every other tracker. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raytrain_plus.observe.expert_use import LayerUses
from raytrain_plus.observe.run_events import RunEvent

FEW = 16
"""Maximum experts of a layer whose loads are metrics of their own."""


@dataclass(frozen=True, slots=True)
class MetricValue:
    """One value of a metric."""

    name: str
    value: float
    step: int
    time_s: float
    """Unix seconds."""


class EventMetrics:
    """Extract metrics from a run's events, which must come in order."""

    def __init__(self) -> None:
        self._step = 0

    def of(self, event: RunEvent) -> list[MetricValue]:
        """Return the metrics of the next event; most kinds have none.

        Loss and gradient norm of step s belong to the weights after s steps; metrics evaluated after step s belong to
        the weights after s + 1. Steps recomputed after a total loss appear again; the later values count.
        """
        kind = event["kind"]
        found: dict[str, float] = {}
        if kind == "step_committed":
            self._step = event["step"]
            found = {f"train/{name}": value for name, value in event.get("metrics", {}).items()}
            found["train/loss"] = event["loss"]
            if "grad_norm" in event:
                found["train/grad_norm"] = event["grad_norm"]
            if isinstance(rates := event.get("lr", []), list):
                found |= {f"train/lr/{group}": rate for group, rate in enumerate(rates)}
            else:
                found["train/lr"] = rates
            if event["seconds"] > 0:
                found["train/samples_per_second"] = event["samples"] / event["seconds"]
        elif kind == "experts":
            # Later steps may be committed already.
            metrics = _of_experts(event["layers"])
            return [MetricValue(name, value, event["step"], event["time"]) for name, value in metrics.items()]
        elif kind == "view_formed":
            found["run/workers"] = len(event["members"])
        elif kind == "recovered":
            found["run/stall_s"] = event["stall_s"]
        elif kind == "resumed":
            self._step = max(0, event["step"])
        elif kind == "evaluated":
            self._step = event["step"] + 1
            return evaluation_metrics(event["step"], event["metrics"], event["time"])
        return [MetricValue(name, float(value), self._step, event["time"]) for name, value in found.items()]


def _of_experts(layers: LayerUses) -> dict[str, float]:
    """Return the metrics of layers with experts; the load of each expert, if they are few, over the even load."""
    found: dict[str, float] = {}
    for layer, use in layers.items():
        found |= {f"experts/{layer}/{name}": use[name] for name in ("max_vio", "dropped", "entropy")}
        load = use["load"]
        if len(load) <= FEW:
            found |= {f"experts/{layer}/load/{at}": one * len(load) / sum(load) for at, one in enumerate(load)}
    return found


def evaluation_metrics(step: int, metrics: Mapping[str, float], time_s: float) -> list[MetricValue]:
    """Return the metrics of an evaluation of the state after `step`."""
    return [MetricValue(f"evaluation/{name}", float(value), step + 1, time_s) for name, value in metrics.items()]
