"""Build events as a run writes them."""

from typing import Any

Event = dict[str, Any]


def event(kind: str, **fields: Any) -> Event:
    return {"time": 0.0, "generation": 0, "kind": kind, **fields}


def step(number: int, *, samples: int = 48, seconds: float = 0.5, loss: float | str = 1.25, time: float = 0.0) -> Event:
    return {**event("step_committed", step=number, epoch=0, samples=samples, loss=loss, seconds=seconds), "time": time}


def view(*shards: int, collective: str = "horovod") -> Event:
    """Return a view with one worker per number, which hosts that many shards."""
    members = [
        {
            "worker": f"worker-{i}",
            "pid": i,
            "node": "n",
            "replica": i,
            "stage": 0,
            "params": 1000,
            "shards": [*range(hosted)],
        }
        for i, hosted in enumerate(shards)
    ]
    return event("view_formed", members=members, spares=[], collective=collective)


def evaluated(number: int, **metrics: float) -> Event:
    return event("evaluated", step=number, metrics=metrics)


def experts(number: int, **loads: list[int]) -> Event:
    """Return the use of experts in a step: the load of each, by layer."""
    layers = {
        name: {"load": load, "max_vio": max(load) * len(load) / sum(load) - 1, "dropped": 0.0, "entropy": 1.0}
        for name, load in loads.items()
    }
    return event("experts", step=number, layers=layers)
