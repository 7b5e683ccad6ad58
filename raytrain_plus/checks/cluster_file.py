"""Read a cluster file, for `ray up` or KubeRay, and compute how many workers fit. Pure except for reading the file.

All workers of a run have GPUs of one model (`workers.accelerator`), so the GPUs of the machines count, where known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from raytrain_plus.checks import gpu_types
from raytrain_plus.errors import InputError
from raytrain_plus.job.settings import Job
from raytrain_plus.membership.sizes import room_for
from raytrain_plus.observe.run_progress import plural

_EXPECTED = "a file for `ray up`, or a RayCluster or RayJob of KubeRay"
_UNITS = {
    "m": 1e-3,
    "": 1.0,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}
"""Kubernetes' suffixes of quantities."""


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
    gpus: tuple[str, ...] = ()
    """Ray's names of the type of its GPUs, usually one; empty if the file does not tell."""
    offered: tuple[str, ...] | None = ()
    """Accelerator types that Ray's autoscaler expects of a new machine; None if it asks the cloud itself."""

    def may_have(self, accelerator: str | None) -> bool:
        """Return whether its GPUs can be of this type, as far as the file tells; None stands for any."""
        unknown = not self.gpus and self.resources.get("GPU", 0) > 0
        return accelerator is None or unknown or accelerator in self.gpus

    def may_be_like(self, other: NodeType) -> bool:
        """Return whether the GPUs of both can be of one type."""
        return not (self.gpus and other.gpus) or bool(set(self.gpus) & set(other.gpus))

    def __str__(self) -> str:
        """Return its resources in words."""
        return _spelled(self.resources, self.gpus[0] if self.gpus else "GPU") or "no CPU or GPU"


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
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """Remarks on parts of the run that are slow on these machines."""

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
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return [*lines, *(f"  note: {note}" for note in self.notes)]


@dataclass(frozen=True, slots=True)
class _Room:
    """The room for a job's workers on the node types of a file."""

    types: Sequence[NodeType]
    together: int
    """The maximum number of machines besides the head."""
    each: Mapping[str, int]
    """How many workers fit on a machine of each type."""
    able: Sequence[NodeType] = field(init=False)
    """The node types on which a worker fits."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "able", [one for one in self.types if self.each[one.name]])

    @property
    def mixed(self) -> tuple[str, ...]:
        """The types of GPUs, if machines on which workers fit have several; else empty."""
        differ = any(not one.may_be_like(other) for one in self.able for other in self.able)
        return tuple(dict.fromkeys(one.gpus[0] for one in self.able if one.gpus)) if differ else ()

    def workers(self) -> tuple[int, int]:
        """Return how many workers fit at first and at most, with GPUs of one type."""
        groups = [[one for one in self.able if one.may_be_like(first)] for first in self.able if first.gpus]
        counts = map(self._on, groups if self.mixed else [self.able])
        return max(counts, key=lambda count: count[::-1])

    def _on(self, types: Sequence[NodeType]) -> tuple[int, int]:
        first = sum(self.each[one.name] * one.fewest for one in types)
        most, left = 0, self.together
        for one in sorted(types, key=lambda one: -self.each[one.name]):
            count = one.most if one.head else min(one.most, left)
            most += self.each[one.name] * count
            left -= 0 if one.head else count
        return first, most


def fit(job: Job, file: str | Path) -> Fit:
    """Return how many workers of the job the cluster in this file has room for.

    Raises `InputError` if it is not a cluster file, does not give its machines' resources, or can never have enough.
    """
    types, together = node_types(file)
    workers = job.workers
    need, accelerator = {"CPU": workers.cpus, "GPU": workers.gpus}, workers.accelerator
    each = {one.name: room_for([one.resources], need) if one.may_have(accelerator) else 0 for one in types}
    spelled = _spelled(need, accelerator or "GPU") or "nothing"
    if accelerator and not workers.gpus:
        spelled += f" on a machine with {accelerator}"
    # Without GPUs, it does not matter which ones the machines have.
    plain = types if workers.gpus else tuple(replace(one, gpus=()) for one in types)
    room = _Room(plain, together, each)
    first, most = room.workers()
    fewest = workers.min + workers.spares
    if most < fewest:
        one_type = ", with GPUs of one type" if room.mixed else ""
        raise InputError(
            f"the cluster has room for {plural(most, 'worker')} of {spelled} each, at most{one_type}",
            where=str(file),
            expected=f"room for workers.min + workers.spares = {fewest}; its node types: "
            + "; ".join(f"{one.name}, up to {one.most}: {one}" for one in types),
            remedy=_remedy(types, accelerator),
        )
    roomy = tuple(_roomy(one, each[one.name]) for one in room.able)
    wanted = max(workers.max or 0, workers.min) + workers.spares
    warnings = tuple(_warnings(room, accelerator))
    return Fit(Path(file).name, spelled, first, most, wanted, roomy, warnings, tuple(_notes(job, room)))


def _roomy(one: NodeType, each: int) -> str:
    gpus = f" with {one.resources.get('GPU', 0):g} {one.gpus[0]}" if one.gpus else ""
    return f"{one.name}: up to {plural(one.most, 'machine')}{gpus}, {each} on each"


def _remedy(types: Sequence[NodeType], accelerator: str | None) -> str:
    others = sorted({gpu for one in types for gpu in one.gpus} - {accelerator})
    larger = "raise the maximum number of machines of a type, use larger machines, or lower the job's needs"
    if accelerator is None or not others:
        return larger
    return f"use machines with {accelerator}, or set workers.accelerator to {' or '.join(others)}; else {larger}"


def _warnings(room: _Room, accelerator: str | None) -> Iterator[str]:
    if room.mixed:
        kinds = " and ".join(room.mixed)
        yield (
            f"the machines have GPUs of several types ({kinds}), and a run uses one: a worker with another is refused; "
            "set workers.accelerator to one of them"
        )
    for one in room.able:
        if accelerator and one.most > one.fewest and one.offered is not None and accelerator not in one.offered:
            yield (
                f"Ray starts no machine of {one.name} for workers.accelerator: {accelerator}, since it does not know "
                f"its GPUs: add accelerator_type:{accelerator}: 1 to its resources"
            )


def _notes(job: Job, room: _Room) -> Iterator[str]:
    parallel, on_one = job.parallel, max((room.each[one.name] for one in room.able), default=0)
    if not job.workers.gpus or parallel.width <= on_one:
        return
    crossing = "its activations cross between machines"
    if parallel.slices > on_one:
        crossing += ", and so do the sums of each layer's slices"
    yield f"a replica takes {parallel.width} workers, but a machine has room for {on_one}: {crossing}"


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
            spec = found["spec"] if found["kind"] == "RayCluster" else found["spec"]["rayClusterSpec"]
            return _with_one_gpu_type(_kuberay(spec), file)
        if all("resources" in one for one in found.get("available_node_types", {"": {}}).values()):
            return _with_one_gpu_type(_launcher(found), file)
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


def _with_one_gpu_type(found: Types, file: str | Path) -> Types:
    """Return the node types. Raises `InputError` if one has two types of GPU: Ray would place workers on the wrong."""
    for one in found[0]:
        # Ray's name of an A100 can be made precise: A100-80G.
        if len({gpu.partition("-")[0] for gpu in one.gpus}) > 1:
            raise InputError(
                f"the node type {one.name} has GPUs of two types: {' and '.join(one.gpus)}",
                where=str(file),
                expected="one: accelerator_type in its resources and labels as its machines have it",
            )
    return found


def _launcher(found: Mapping[str, Any]) -> Types:
    together = found.get("max_workers", 2)
    types = []
    for name, one in found["available_node_types"].items():
        head, resources = name == found.get("head_node_type"), dict(one["resources"])
        fewest, most = (1, 1) if head else (one.get("min_workers", 0), one.get("max_workers", together))
        found_gpu = gpu_types.of_node_config(one.get("node_config") or {})
        gpus, offered = _gpus(found_gpu, resources, one.get("labels") or {})
        # On AWS, Ray asks the cloud which GPUs its machines have.
        asks = (found.get("provider") or {}).get("type") == "aws"
        types.append(NodeType(name, fewest, most, resources, head, gpus, None if asks else offered))
    return tuple(types), together


def _kuberay(spec: Mapping[str, Any]) -> Types:
    head = spec["headGroupSpec"]
    types = [NodeType("head", 1, 1, _of_pod(head), True, *_gpus_of_pod(head))]
    for group in spec.get("workerGroupSpecs", ()):
        name, fewest = group["groupName"], group.get("minReplicas", group.get("replicas", 0))
        most = group.get("maxReplicas", fewest)
        types.append(NodeType(name, fewest, most, _of_pod(group), False, *_gpus_of_pod(group)))
    return tuple(types), sum(one.most for one in types)


def _gpus_of_pod(group: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    given = (group.get("rayStartParams") or {}).get("resources", "")
    resources = [*(group.get("resources") or {}), *gpu_types.resource_names(given)]
    found = gpu_types.of_node_selector(group["template"]["spec"].get("nodeSelector") or {})
    return _gpus(found, resources, group.get("labels") or {})


def _gpus(found: str, resources: Iterable[str], labels: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return all names of the type of a machine's GPUs, and those that Ray's autoscaler expects of it.

    `found`: the name by the machine's type; empty if not known.
    """
    offered, labelled = gpu_types.declared(resources, labels)
    return tuple(dict.fromkeys(gpu for gpu in (found, *offered, *labelled) if gpu)), offered


def _of_pod(group: Mapping[str, Any]) -> dict[str, float]:
    """Return a pod's resources as Ray counts them: its first container's limits, unless `rayStartParams` sets them."""
    resources = group["template"]["spec"]["containers"][0].get("resources", {})
    asked = {**resources.get("requests", {}), **resources.get("limits", {})}
    params = group.get("rayStartParams") or {}
    # Ray rounds CPUs up to whole numbers.
    cpus = float(-(-_number(asked.get("cpu", 0)) // 1)) if "num-cpus" not in params else float(params["num-cpus"])
    gpus = float(params.get("num-gpus", asked.get("nvidia.com/gpu", 0)))
    memory = {"memory": _number(asked["memory"])} if "memory" in asked else {}
    return {"CPU": cpus, "GPU": gpus, **memory}


def _number(quantity: object) -> float:
    text = str(quantity)
    unit = text.lstrip("0123456789.")
    return float(text.removesuffix(unit)) * _UNITS[unit]


def _spelled(resources: Mapping[str, float], gpu: str) -> str:
    named = {"CPU": resources.get("CPU", 0), gpu: resources.get("GPU", 0)}
    return ", ".join(f"{amount:g} {name}" for name, amount in named.items() if amount)
