"""What a cluster file says of room for workers: one for `ray up`, or KubeRay's. Pure but for the reading."""

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
    """Machines that are alike."""

    name: str
    fewest: int
    most: int
    """How many of them there can be."""
    resources: Mapping[str, float]
    """What Ray takes one to have: CPU, GPU."""
    head: bool = False


@dataclass(frozen=True, slots=True)
class Fit:
    """How a job fits a cluster."""

    file: str
    need: str
    """Of one worker."""
    first: int
    """Workers for which there is room before the autoscaler adds machines."""
    most: int
    wanted: int
    """The job's most workers, and its spares."""
    roomy: tuple[str, ...]
    """The node types on which workers fit, with how many on one."""

    def to_json(self) -> dict[str, Any]:
        """Plain values only."""
        return asdict(self)

    def lines(self) -> list[str]:
        """For a person."""
        said = f"  {self.file}: room for {self.first} to {self.most} workers of {self.need}"
        lines = [said + f" ({'; '.join(self.roomy)})"]
        if self.most < self.wanted:
            lines.append(f"  warning: workers.max and workers.spares make {self.wanted}, more than the {self.most}")
        return lines


def fit(job: Job, file: str | Path) -> Fit:
    """Whether the cluster in this file can have the workers that the job asks for.

    Raises `InputError` where it is no cluster file, does not say what its machines have, or can never have enough.
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
            remedy="raise the most machines of a type, choose larger ones, or lower what the job asks for",
        )
    roomy = tuple(
        f"{one.name}: up to {plural(one.most, 'machine')}, {each[one.name]} on each" for one in types if each[one.name]
    )
    wanted = max(job.workers.max or 0, job.workers.min) + job.workers.spares
    return Fit(Path(file).name, spelled, first, most, wanted, roomy)


Types = tuple[tuple[NodeType, ...], int]


def node_types(file: str | Path) -> Types:
    """The node types that a cluster file names, its head among them, and how many machines there can be beside the
    head. Raises `InputError` where it is none."""
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
        what = f"is no cluster file: {type(error).__name__}: {error}"
        raise InputError(what, where=str(file), expected=_EXPECTED) from None
    if known:
        raise InputError(
            "does not say what its machines have",
            where=str(file),
            expected="available_node_types, with resources",
            remedy="run the job: it says at once what the cluster lacks",
        )
    raise InputError("is no cluster file", where=str(file), expected=_EXPECTED)


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
    """What Ray takes a pod to have: its first container's limits, unless it is told otherwise."""
    resources = group["template"]["spec"]["containers"][0].get("resources", {})
    asked = {**resources.get("requests", {}), **resources.get("limits", {})}
    told = group.get("rayStartParams") or {}
    # Ray counts whole processors.
    cpus = float(-(-_number(asked.get("cpu", 0)) // 1)) if "num-cpus" not in told else float(told["num-cpus"])
    gpus = float(told.get("num-gpus", asked.get("nvidia.com/gpu", 0)))
    return {"CPU": cpus, "GPU": gpus}


def _number(quantity: object) -> float:
    text = str(quantity)
    unit = text.lstrip("0123456789.")
    return float(text.removesuffix(unit)) * _UNITS[unit]


def _spelled(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items() if amount) or "nothing to work on"
