"""Read a cluster file, for `ray up` or KubeRay, and compute how many workers fit. Pure except for reading the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from raytrain_plus.errors import InputError
from raytrain_plus.job.settings import Job
from raytrain_plus.membership.sizes import room_for
from raytrain_plus.observe.run_progress import plural

_EXPECTED = "a file for `ray up`, or a RayCluster or RayJob of KubeRay"
_UNITS = {"m": 1e-3, "": 1.0}


@dataclass(frozen=True, slots=True)
class NodeType:
    """A group of identical machines."""

    name: str
    fewest: int
    most: int
    """Minimum and maximum number of machines."""
    resources: Mapping[str, float]
    """Resources of one machine as Ray counts them: CPU, GPU."""
    head: bool = False


@dataclass(frozen=True, slots=True)
class Fit:
    """How a job's workers fit on a cluster."""

    file: str
    need: str
    """Resources of one worker, in words."""
    first: int
    """Workers that fit before the autoscaler adds machines."""
    most: int
    """Workers that fit on the largest cluster."""
    wanted: int
    """The job's maximum number of workers plus its spares."""
    roomy: tuple[str, ...]
    """The node types on which workers fit, with the number per machine."""

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return lines of text for a person."""
        said = f"  {self.file}: room for {self.first} to {self.most} workers of {self.need}"
        lines = [said + f" ({'; '.join(self.roomy)})"]
        if self.most < self.wanted:
            lines.append(
                f"  warning: workers.max + workers.spares = {self.wanted}, but at most {self.most} workers fit"
            )
        return lines


def fit(job: Job, file: str | Path) -> Fit:
    """Return how many workers of the job the cluster in this file has room for.

    Raises `InputError` if it is not a cluster file, does not give its machines' resources, or can never have enough.
    """
    types, together = node_types(file)
    need = {"CPU": job.workers.cpus, "GPU": job.workers.gpus}
    spelled = ", ".join(f"{amount:g} {name}" for name, amount in need.items() if amount) or "nothing"
    each = {one.name: room_for([one.resources], need) for one in types}
    first = sum(each[one.name] * one.fewest for one in types)
    most, left = 0, together
    for one in sorted(types, key=lambda one: -each[one.name]):
        count = one.most if one.head else min(one.most, left)
        most += each[one.name] * count
        left -= 0 if one.head else count
    fewest = job.workers.min + job.workers.spares
    if most < fewest:
        has = "; ".join(f"{one.name}, up to {one.most}: {_spelled(one.resources)}" for one in types)
        raise InputError(
            f"the cluster has room for {plural(most, 'worker')} of {spelled} each, at most",
            where=str(file),
            expected=f"room for workers.min + workers.spares = {fewest}; its node types: {has}",
            remedy="raise the maximum number of machines of a type, use larger machines, or lower the job's needs",
        )
    roomy = tuple(
        f"{one.name}: up to {plural(one.most, 'machine')}, {each[one.name]} on each" for one in types if each[one.name]
    )
    wanted = max(job.workers.max or 0, job.workers.min) + job.workers.spares
    return Fit(Path(file).name, spelled, first, most, wanted, roomy)


Types = tuple[tuple[NodeType, ...], int]


def node_types(file: str | Path) -> Types:
    """Return the node types of a cluster file, with the head, and the maximum number of machines besides the head.

    Raises `InputError` if it is not a cluster file.
    """
    try:
        found = yaml.safe_load(Path(file).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"cannot be read: {error}", where=str(file), expected=_EXPECTED) from None
    try:
        if found.get("kind") in ("RayCluster", "RayJob"):
            return _kuberay(found["spec"] if found["kind"] == "RayCluster" else found["spec"]["rayClusterSpec"])
        if all("resources" in one for one in found.get("available_node_types", {"": {}}).values()):
            return _launcher(found)
        known = "cluster_name" in found
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        what = f"not a valid cluster file: {type(error).__name__}: {error}"
        raise InputError(what, where=str(file), expected=_EXPECTED) from None
    if known:
        raise InputError(
            "the file does not give the resources of its machines",
            where=str(file),
            expected="available_node_types, with resources",
            remedy="run the job without this check: it reports at once what the cluster lacks",
        )
    raise InputError("not a cluster file", where=str(file), expected=_EXPECTED)


def _launcher(found: Mapping[str, Any]) -> Types:
    together = found.get("max_workers", 2)
    types = []
    for name, one in found["available_node_types"].items():
        head, resources = name == found.get("head_node_type"), dict(one["resources"])
        fewest, most = one.get("min_workers", 0), one.get("max_workers", together)
        types.append(NodeType(name, 1, 1, resources, True) if head else NodeType(name, fewest, most, resources))
    return tuple(types), together


def _kuberay(spec: Mapping[str, Any]) -> Types:
    head = spec["headGroupSpec"]
    types = [NodeType("head", 1, 1, _of_pod(head), True)]
    for group in spec.get("workerGroupSpecs", ()):
        fewest = group.get("minReplicas", group.get("replicas", 0))
        types.append(NodeType(group["groupName"], fewest, group.get("maxReplicas", fewest), _of_pod(group)))
    return tuple(types), sum(one.most for one in types)


def _of_pod(group: Mapping[str, Any]) -> dict[str, float]:
    """Return a pod's resources as Ray counts them: its first container's limits, unless `rayStartParams` sets them."""
    resources = group["template"]["spec"]["containers"][0].get("resources", {})
    asked = {**resources.get("requests", {}), **resources.get("limits", {})}
    params = group.get("rayStartParams") or {}
    # Ray rounds CPUs up to whole numbers.
    cpus = float(-(-_number(asked.get("cpu", 0)) // 1)) if "num-cpus" not in params else float(params["num-cpus"])
    gpus = float(params.get("num-gpus", asked.get("nvidia.com/gpu", 0)))
    return {"CPU": cpus, "GPU": gpus}


def _number(quantity: object) -> float:
    text = str(quantity)
    unit = text.lstrip("0123456789.")
    return float(text.removesuffix(unit)) * _UNITS[unit]


def _spelled(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if amount) or "no CPU or GPU"
