"""Tell from a cluster file which GPUs its machines have, by Ray's names of accelerator types. Pure.

The cloud's name of a machine type, or a label of Kubernetes, says which. The tables list families, not sizes; a machine
that is not in them is unknown, and nothing is concluded about it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_OLD = ("V100", "P100", "T4", "P4", "K80", "A10G", "A100")
_NEW = ("L4", "L40S", "H100", "H200", "H20", "B200", "B300", "GB200", "GB300", "RTX-PRO-6000")
TYPES = (*_OLD, *_NEW)
"""Ray's names of NVIDIA's accelerator types (`ray.util.accelerators`)."""
_FAMILIES = (
    # AWS; SageMaker HyperPod puts `ml.` before them.
    (r"(ml\.)?p3(dn)?\.", "V100"),
    (r"(ml\.)?p4de?\.", "A100"),
    (r"(ml\.)?p5\.", "H100"),
    (r"(ml\.)?p5en?\.", "H200"),
    (r"(ml\.)?p6-b200\.", "B200"),
    (r"(ml\.)?p6-b300\.", "B300"),
    (r"(ml\.)?g4dn\.", "T4"),
    (r"(ml\.)?g5\.", "A10G"),
    (r"(ml\.)?gr?6\.", "L4"),
    (r"(ml\.)?g6e\.", "L40S"),
    # GCP
    (r"a2-(high|mega|ultra)gpu-", "A100"),
    (r"a3-(high|mega|edge)gpu-", "H100"),
    (r"a3-ultragpu-", "H200"),
    (r"a4-highgpu-", "B200"),
    (r"g2-standard-", "L4"),
    # Azure: most names contain the GPU, such as Standard_ND96isr_H100_v5, Standard_NC24ads_A100_v4.
    (r"standard_nc\d+s_v3", "V100"),
    (r"standard_nd40rs_v2", "V100"),
    (r"standard_nd96a(m)?sr_v4", "A100"),
)
_AZURE = re.compile(r"standard_n[cd]\w*?_([a-z]+\d+)_v\d+")
_MACHINE_LABELS = ("node.kubernetes.io/instance-type", "beta.kubernetes.io/instance-type")
_GPU_LABELS = (
    "cloud.google.com/gke-accelerator",
    "nvidia.com/gpu.product",
    "karpenter.k8s.aws/instance-gpu-name",
    "eks.amazonaws.com/instance-gpu-name",
)
_RESOURCE = "accelerator_type:"
_RAY_LABEL = "ray.io/accelerator-type"


def of_machine(name: str) -> str:
    """Return the type of the GPUs of a cloud's machine type; empty if it is not known.

    >>> [of_machine(name) for name in ("p5.48xlarge", "g2-standard-96", "Standard_NC64as_T4_v3", "m7i.large")]
    ['H100', 'L4', 'T4', '']
    """
    # GCP also takes addresses, such as zones/ZONE/machineTypes/NAME.
    plain = name.rpartition("/")[2].lower()
    for pattern, gpu in _FAMILIES:
        if re.match(pattern, plain):
            return gpu
    found = _AZURE.fullmatch(plain)
    return of_gpu(found.group(1)) if found else ""


def of_gpu(name: str) -> str:
    """Return the accelerator type for a GPU's name on a cloud or a label; empty if it is not known.

    >>> of_gpu("nvidia-h100-mega-80gb"), of_gpu("Tesla-T4"), of_gpu("nvidia-tesla-a100"), of_gpu("a10g")
    ('H100', 'T4', 'A100', 'A10G')
    """
    plain = re.sub(r"^(nvidia-)?(tesla-)?", "", name.rpartition("/")[2].lower())
    return next((one for one in TYPES if re.match(re.escape(one.lower()) + r"(-|$)", plain)), "")


def of_node_config(config: Mapping[str, Any]) -> str:
    """Return the type of the GPUs of machines for `ray up`, from a node type's `node_config`; empty if not known."""
    attached = [of_gpu(str(one.get("acceleratorType", ""))) for one in config.get("guestAccelerators") or ()]
    named = (
        config.get("InstanceType"),
        config.get("machineType"),
        (config.get("azure_arm_parameters") or {}).get("vmSize"),
    )
    return _first([*attached, *(of_machine(str(name)) for name in named if name)])


def of_node_selector(selector: Mapping[str, Any]) -> str:
    """Return the type of the GPUs of the nodes that a pod's `nodeSelector` allows; empty if it is not known."""
    gpus = [of_gpu(str(selector[label])) for label in _GPU_LABELS if label in selector]
    return _first([*gpus, *(of_machine(str(selector[label])) for label in _MACHINE_LABELS if label in selector)])


def declared(resources: Iterable[str], labels: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the accelerator types that a file gives a node type itself: those of its resources, and of Ray's label.

    Ray's autoscaler, which starts machines for the resources that workers ask for, goes by the former.
    """
    offered = tuple(name.removeprefix(_RESOURCE) for name in resources if name.startswith(_RESOURCE))
    return offered, (str(labels[_RAY_LABEL]),) if _RAY_LABEL in labels else ()


def resource_names(text: object) -> list[str]:
    """Return the accelerator types' resources in `rayStartParams.resources`, which is JSON in quotes of its own."""
    return re.findall(re.escape(_RESOURCE) + r"[\w.-]+", str(text))


def _first(found: Iterable[str]) -> str:
    return next((one for one in found if one), "")
