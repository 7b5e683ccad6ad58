"""Objects of torchmetrics on a module: taken out of its state, and their states of many batches merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from raytrain_plus.errors import TaskError

Taken = Mapping[str, nn.Module]
"""Name in the module -> the metric, or the collection of metrics."""
States = Mapping[str, Any]
"""Of a metric, by name: a tensor, or a list of tensors."""


def take_out(module: nn.Module, place: str = "") -> dict[str, nn.Module]:
    """Turn the metrics among a module's children into plain attributes of it, and return them by name.

    What they count belongs to a step or an evaluation, so it is no part of the training state. Raises `TaskError` for
    a container that holds other modules, too.
    """
    found: dict[str, nn.Module] = {}
    for name, child in list(module.named_children()):
        path = f"{place}{name}"
        if not _only_metrics(child):
            found |= take_out(child, f"{path}.")
            continue
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            raise TaskError(
                f"'{place.rstrip('.')}' holds both metrics and other modules",
                where="LightningModule",
                remedy="keep the metrics in a torchmetrics.MetricCollection, or in attributes of their own",
            )
        del module._modules[name]
        vars(module)[name] = child
        found[path] = child
    for one in metrics_in(found).values():
        one.persistent(False)  # type: ignore[operator]
    for collection in (one for top in found.values() for one in top.modules() if is_metric(one, "MetricCollection")):
        # Its metrics would share states, which are merged one by one.
        vars(collection).update(_enable_compute_groups=False, _groups_checked=False, _groups={})
    return found


def is_metric(value: object, name: str = "Metric") -> bool:
    """Return whether an object is of that class of torchmetrics, without importing it."""
    return any(one.__name__ == name and one.__module__.startswith("torchmetrics.") for one in type(value).__mro__)


def _only_metrics(module: nn.Module) -> bool:
    if is_metric(module) or is_metric(module, "MetricCollection"):
        return True
    within = list(module.children())
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and bool(within) and all(map(_only_metrics, within))


def metrics_in(taken: Taken) -> dict[str, nn.Module]:
    """Return the single metrics, by name, also those inside collections and inside other metrics."""
    return {
        f"{place}.{name}" if name else place: one
        for place, top in taken.items()
        for name, one in top.named_modules()
        if is_metric(one)
    }


def begin(metrics: Taken, device: torch.device) -> None:
    """Let the metrics count from nothing, on a device."""
    for one in metrics.values():
        one.reset()  # type: ignore[operator]
        one.to(device)


def counted(metrics: Taken) -> dict[str, States]:
    """Return the states of the metrics that were updated."""
    return {name: dict(_states(one)) for name, one in metrics.items() if one._update_count}


def _states(metric: Any) -> Iterator[tuple[str, Any]]:
    for name in metric._defaults:
        yield name, getattr(metric, name)


def put_counted(metrics: Taken, batches: Sequence[Mapping[str, States]]) -> None:
    """Give the metrics what they counted in all of these batches, in their order."""
    for place, metric in metrics.items():
        found: list[States] = [batch[place] for batch in batches if place in batch]
        if not found:
            continue
        one: Any = metric
        for name in one._defaults:
            setattr(one, name, _merged([states[name] for states in found], one._reductions[name]))
        one._update_count, one._computed = len(found), None


def _merged(values: Sequence[Any], reduction: Any) -> Any:
    """Return the states of several batches as one, as torchmetrics does for several processes."""
    if isinstance(values[0], list):
        return [tensor for value in values for tensor in value]
    if getattr(reduction, "__name__", "") == "dim_zero_cat":
        return torch.cat(list(values))
    stacked = torch.stack(list(values))
    return stacked if reduction is None else reduction(stacked)


def value_of_step(metric: Any) -> Any:
    """Return what a metric, or a collection, says of the batch that it has just counted."""
    if is_metric(metric, "MetricCollection"):
        return {name: value_of_step(one) for name, one in metric.items(copy_state=False)}
    return metric.compute() if metric._forward_cache is None else metric._forward_cache
