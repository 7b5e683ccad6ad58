"""Which GPUs machines have, by the clouds' names of machine types and by labels."""

from __future__ import annotations

import doctest

import pytest

from raytrain_plus.checks import gpu_types
from raytrain_plus.checks.gpu_types import TYPES, declared, of_gpu, of_machine, of_node_config, of_node_selector


def test_the_names_are_those_of_ray() -> None:
    accelerators = pytest.importorskip("ray.util.accelerators.accelerators")
    rays = {value for name, value in vars(accelerators).items() if name.startswith("NVIDIA_")}
    # Ray gives no node these two by itself.
    assert set(TYPES) == rays - {accelerators.NVIDIA_A100_40G, accelerators.NVIDIA_A100_80G}
    assert {gpu for _, gpu in gpu_types._FAMILIES} <= set(TYPES)


def test_the_examples_hold() -> None:
    assert doctest.testmod(gpu_types).failed == 0


@pytest.mark.parametrize(
    ("gpu", "machines"),
    {
        "H100": "p5.48xlarge p5.4xlarge ml.p5.48xlarge a3-highgpu-8g a3-megagpu-8g Standard_ND96isr_H100_v5 "
        "Standard_NC40ads_H100_v5 Standard_NCC40ads_H100_v5 zones/us-west1-a/machineTypes/a3-highgpu-1g",
        "H200": "p5e.48xlarge p5en.48xlarge a3-ultragpu-8g Standard_ND96isr_H200_v5",
        "A100": "p4d.24xlarge p4de.24xlarge a2-highgpu-1g a2-ultragpu-8g a2-megagpu-16g Standard_ND96asr_v4 "
        "Standard_ND96amsr_A100_v4 Standard_NC24ads_A100_v4",
        "B200": "p6-b200.48xlarge a4-highgpu-8g",
        "L4": "g6.xlarge g6.48xlarge gr6.4xlarge g2-standard-96",
        "L40S": "g6e.48xlarge",
        "A10G": "g5.12xlarge",
        "T4": "g4dn.metal Standard_NC64as_T4_v3",
        "V100": "p3.2xlarge p3dn.24xlarge Standard_NC6s_v3 Standard_ND40rs_v2",
        # Other processors, GPUs that Ray has no name for, and names that only look alike.
        "": "m7i.xlarge g5g.xlarge p50.large trn1.2xlarge n2-standard-4 a3x-highgpu-8g Standard_D4s_v5 "
        "Standard_NV36ads_A10_v5 Standard_ND96isr_MI300X_v5 CHANGE",
    }.items(),
)
def test_machine_types(gpu: str, machines: str) -> None:
    assert {machine: of_machine(machine) for machine in machines.split()} == dict.fromkeys(machines.split(), gpu)


@pytest.mark.parametrize(
    ("gpu", "names"),
    {
        "H100": "nvidia-h100-80gb nvidia-h100-mega-80gb NVIDIA-H100-80GB-HBM3 h100",
        "H200": "nvidia-h200-141gb NVIDIA-H200",
        "H20": "NVIDIA-H20",
        "A100": "nvidia-tesla-a100 nvidia-a100-80gb NVIDIA-A100-SXM4-40GB "
        "projects/p/zones/z/acceleratorTypes/nvidia-tesla-a100",
        "L4": "nvidia-l4 nvidia-l4-vws NVIDIA-L4",
        "L40S": "NVIDIA-L40S l40s",
        "T4": "nvidia-tesla-t4 Tesla-T4",
        "RTX-PRO-6000": "nvidia-rtx-pro-6000 NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
        "": "nvidia-a10 NVIDIA-GeForce-RTX-4090 t4g amd-mi300x nvidia- tpu-v5e",
    }.items(),
)
def test_names_of_gpus(gpu: str, names: str) -> None:
    assert {name: of_gpu(name) for name in names.split()} == dict.fromkeys(names.split(), gpu)


def test_where_files_say_it() -> None:
    assert of_node_config({"InstanceType": "g6.xlarge"}) == "L4"
    assert of_node_config({"azure_arm_parameters": {"vmSize": "Standard_NC4as_T4_v3"}}) == "T4"
    # A machine of GCP for many GPUs: the one attached to it counts.
    attached = {"machineType": "n1-standard-8", "guestAccelerators": [{"acceleratorType": "nvidia-tesla-v100"}]}
    assert of_node_config(attached) == "V100"
    assert of_node_config({"machineType": "n1-standard-8", "azure_arm_parameters": None}) == ""
    assert of_node_selector({"cloud.google.com/gke-accelerator": "nvidia-l4", "a": "b"}) == "L4"
    assert of_node_selector({"node.kubernetes.io/instance-type": "p5.48xlarge"}) == "H100"
    assert of_node_selector({"nvidia.com/gpu.product": "Tesla-T4"}) == "T4"
    assert of_node_selector({"cloud.google.com/gke-spot": "true"}) == ""
    resources = {"CPU": 1, "accelerator_type:A100": 1, "accelerator_type:A100-80G": 1}
    assert declared(resources, {"ray.io/accelerator-type": "A100"}) == (("A100", "A100-80G"), ("A100",))
    assert gpu_types.resource_names('"{\\"accelerator_type:H100\\": 1, \\"x\\": 2}"') == ["accelerator_type:H100"]
