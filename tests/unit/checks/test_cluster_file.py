"""The cluster files: valid by the schemas of Ray and KubeRay, and the workers that fit on them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from raytrain_plus import Data, InputError, Job, Parallel, Workers
from raytrain_plus.checks.cluster_file import NodeType, fit, node_types

CLUSTERS = Path(__file__).parents[3] / "clusters"
LAUNCHED = sorted(file for file in CLUSTERS.glob("*.yaml") if file.stem != "runtime_env")
KUBERAY = sorted((CLUSTERS / "kuberay").glob("*.yaml"))


def loaded(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(file.read_text())
    return found


@pytest.mark.parametrize(
    "file", [file for file in LAUNCHED if file.name != "runtime_env.yaml"], ids=lambda file: file.stem
)
def test_ray_accepts_it_unchanged(file: Path) -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    config = util.prepare_config(copy.deepcopy(loaded(file)))
    util.validate_config(config)
    assert config["available_node_types"]


CLOUDS = [file for file in LAUNCHED if file.stem != "local"]


@pytest.mark.parametrize("file", CLOUDS, ids=lambda file: file.stem)
def test_nothing_trains_on_the_head_and_workers_are_on_spot(file: Path) -> None:
    name, types = loaded(file)["provider"]["type"], loaded(file)["available_node_types"]
    assert types["head"]["resources"] == {"CPU": 0}
    spots = {
        "aws": lambda node: node["InstanceMarketOptions"]["MarketType"] == "spot",
        "gcp": lambda node: {"preemptible": True} in node["scheduling"],
        "azure": lambda node: node["azure_arm_parameters"]["priority"] == "Spot",
    }
    assert spots[name](types["gpu_spot"]["node_config"])
    for other in types.keys() - {"gpu_spot"}:
        with pytest.raises((KeyError, AssertionError)):
            assert spots[name](types[other]["node_config"]), "on demand"


def test_the_interfaces_of_efa_are_those_that_aws_and_ray_ask_for() -> None:
    config = loaded(CLUSTERS / "aws-8gpu-efa.yaml")
    head, worker = (config["available_node_types"][name]["node_config"] for name in ("head", "gpu_spot"))
    first, *others = worker["NetworkInterfaces"]
    # An interface without an address cannot be the first one; each card has one interface.
    assert (first["InterfaceType"], first["DeviceIndex"]) == ("efa", 0)
    assert {(one["InterfaceType"], one["DeviceIndex"]) for one in others} == {("efa-only", 1)}
    assert [one["NetworkCardIndex"] for one in (first, *others)] == list(range(32))
    assert len({one["SubnetId"] for one in (first, *others)}) == 1
    assert all(one["Groups"] == head["SecurityGroupIds"] for one in (first, *others))
    # Several interfaces exclude a public address, by which Ray would reach a worker.
    assert config["provider"]["use_internal_ips"]
    aws = pytest.importorskip("ray.autoscaler._private.aws.config")
    placed = aws._configure_subnets_and_groups_from_network_interfaces(worker)
    assert len(placed["SubnetIds"]) == 32


def test_rays_launcher_on_azure_cannot_connect_machines_by_infiniband() -> None:
    private = Path(pytest.importorskip("ray").__file__).parent / "autoscaler" / "_private"
    template = (private / "_azure" / "azure-vm-template.json").read_text().lower()
    assert "availabilityset" not in template
    assert "scaleset" not in template
    (_, start) = loaded(CLUSTERS / "azure-8gpu.yaml")["worker_start_ray_commands"]
    assert " NCCL_SOCKET_IFNAME=eth0;" in start


RIGHTS: dict[str, Callable[[dict[str, Any], dict[str, Any]], bool]] = {
    "aws": lambda provider, node: bool(node.get("IamInstanceProfile")),
    "gcp": lambda provider, node: any(
        account["email"] and account["scopes"] == ["https://www.googleapis.com/auth/cloud-platform"]
        for account in node.get("serviceAccounts", [])
    ),
    # Unless both are set, Ray gives all machines its own identity, which cannot access the storage.
    "azure": lambda provider, node: bool(provider.get("msi_name") and provider.get("msi_resource_group")),
}
"""Return whether machines of a type can access the storage of runs."""


@pytest.mark.parametrize("file", CLOUDS, ids=lambda file: file.stem)
def test_every_worker_reaches_the_storage(file: Path) -> None:
    config = loaded(file)
    reaches = RIGHTS[config["provider"]["type"]]
    workers = {
        name: found for name, found in config["available_node_types"].items() if name != config["head_node_type"]
    }
    assert [name for name, found in workers.items() if not reaches(config["provider"], found["node_config"])] == []


@pytest.mark.parametrize("file", CLOUDS, ids=lambda file: file.stem)
def test_the_head_keeps_the_account_with_which_ray_starts_machines(file: Path) -> None:
    config = loaded(file)
    head = config["available_node_types"][config["head_node_type"]]["node_config"]
    assert not {"IamInstanceProfile", "serviceAccounts"} & head.keys()


@pytest.mark.parametrize("name", ["aws-minimal.yaml", "aws.yaml", "Dockerfile"])
def test_clusters_that_store_on_s3_install_its_package(name: str) -> None:
    # Quoted, and through echo: a shell reads [s3] after a * as a one-letter pattern.
    assert '"$(echo /home/ray/wheels/raytrain_plus-*.whl)[s3]"' in (CLUSTERS / name).read_text()


def test_own_machines_keep_their_python() -> None:
    config = loaded(CLUSTERS / "local.yaml")
    made, *installed = config["setup_commands"]
    assert made.startswith("python3 -m venv ~/raytrain-venv && ")
    commands = [*installed, *config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    assert [one for one in commands if ". ~/raytrain-venv/bin/activate && " not in one] == []
    # Ray runs this command unchanged when the cluster ends.
    assert made.endswith("ln -sf ~/raytrain-venv/bin/ray ~/.local/bin/ray")


def test_the_image_build_gets_only_what_it_copies() -> None:
    lines = (CLUSTERS / "Dockerfile").read_text().splitlines()
    sources = [line.split()[1] for line in lines if line.startswith("COPY")]
    rules = [line for line in (CLUSTERS.parent / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert rules == ["*", *(f"!{source}" for source in sources)]


@pytest.mark.parametrize("file", LAUNCHED, ids=lambda file: file.stem)
def test_nothing_listens_on_public_addresses(file: Path) -> None:
    text = file.read_text()
    assert "0.0.0.0" not in text
    starts = [line for line in text.splitlines() if "ray start" in line]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in line for line in starts)


@pytest.mark.parametrize("file", KUBERAY, ids=lambda file: file.stem)
def test_kuberay_accepts_it_unchanged(file: Path) -> None:
    schema = json.loads((CLUSTERS / "kuberay" / "schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(loaded(file), schema)
    for wrong in ({"spek": {}}, {"apiVersion": "ray.io/v2"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**loaded(file), **wrong}, schema)


@pytest.mark.parametrize("file", KUBERAY, ids=lambda file: file.stem)
def test_pods_require_a_token(file: Path) -> None:
    spec = loaded(file)["spec"]
    assert spec.get("rayClusterSpec", spec)["authOptions"] == {"mode": "token"}


def test_a_lost_head_does_not_end_the_job() -> None:
    spec = loaded(CLUSTERS / "kuberay" / "rayjob.yaml")["spec"]
    assert spec["backoffLimit"] > 0
    # KubeRay does not accept backoffLimit in this mode.
    assert spec["submissionMode"] != "InteractiveMode"


@pytest.mark.parametrize("file", KUBERAY, ids=lambda file: file.stem)
def test_a_pod_announces_its_end(file: Path) -> None:
    spec = loaded(file)["spec"]
    for group in spec.get("rayClusterSpec", spec)["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        told = {one["name"]: one["value"] for one in pod["containers"][0]["env"]}
        assert 0 < int(told["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"]) < pod["terminationGracePeriodSeconds"]


def job(**workers: Any) -> Job:
    return Job(name="x", task="a:B", data=Data(path="d", batch_size=64, shards=64), steps=1, workers=Workers(**workers))


@pytest.mark.parametrize(("name", "gpu"), [("aws.yaml", "A10G"), ("gcp.yaml", "L4"), ("azure.yaml", "T4")])
def test_workers_that_fit(name: str, gpu: str) -> None:
    found = fit(job(min=2, max=32, spares=2, gpus=1), CLUSTERS / name)
    assert (found.first, found.most, found.wanted) == (0, 34, 34)
    assert found.lines() == [
        f"  {name}: room for 0 to 34 workers of 1 CPU, 1 GPU (gpu_ondemand: up to 2 machines with 1 {gpu}, 1 on each; "
        f"gpu_spot: up to 32 machines with 1 {gpu}, 1 on each)"
    ]
    found = fit(job(min=2, max=40, gpus=1), CLUSTERS / name)
    assert found.lines()[1] == "  warning: workers.max + workers.spares = 40, but at most 34 workers fit"
    # With CPUs only, more workers fit on a machine.
    assert fit(job(min=2, cpus=2), CLUSTERS / name).most == 4 * 34


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(InputError, match="the cluster has room for 8 workers of 4 CPU, 1 GPU each, at most") as caught:
        fit(job(min=8, spares=1, cpus=4, gpus=1), CLUSTERS / "aws-minimal.yaml")
    assert "workers.min + workers.spares = 9" in caught.value.expected
    assert "gpu_spot, up to 8: 4 CPU, 1 A10G" in caught.value.expected
    with pytest.raises(InputError, match="room for 0 workers of 5 CPU each"):
        fit(job(min=1, cpus=5), CLUSTERS / "kuberay" / "rayjob.yaml")


@pytest.mark.parametrize("file", KUBERAY, ids=lambda file: file.stem)
def test_resources_of_pods(file: Path) -> None:
    eight = file.stem.endswith("-8gpu")
    large, small = {"CPU": 88.0, "GPU": 8.0, "memory": 800.0 * 2**30}, {"CPU": 4.0, "GPU": 1.0, "memory": 16.0 * 2**30}
    assert node_types(file)[0] == (
        NodeType("head", 1, 1, {"CPU": 0.0, "GPU": 0.0, "memory": 8.0 * 2**30}, True),
        NodeType("gpu-spot", 0, *((4, large) if eight else (8, small))),
    )


@pytest.mark.parametrize(
    "name", ["aws-8gpu.yaml", "aws-8gpu-efa.yaml", "gcp-8gpu.yaml", "azure-8gpu.yaml", "kuberay/raycluster-8gpu.yaml"]
)
def test_machines_with_eight_gpus(name: str) -> None:
    found = fit(job(min=8, max=32, gpus=1), CLUSTERS / name)
    assert (found.first, found.most, found.wanted) == (0, 32, 32)
    machines = "4 machines" if "kuberay" in name else "4 machines with 8 H100"
    assert [one.partition(": ")[2] for one in found.roomy] == [f"up to {machines}, 8 on each"]


EIGHT = "aws-8gpu.yaml"


@pytest.mark.parametrize("file", CLOUDS, ids=lambda file: file.stem)
def test_the_gpus_of_a_cloud_are_known_and_ray_starts_machines_for_them(file: Path) -> None:
    workers = [one for one in node_types(file)[0] if not one.head]
    gpus = {gpu for one in workers for gpu in one.gpus}
    (gpu,) = gpus
    found = fit(job(min=2, max=8, gpus=1, accelerator=gpu), file)
    assert (found.need, found.warnings, found.most >= 8) == (f"1 CPU, 1 {gpu}", (), True)


@pytest.mark.parametrize("name", ["aws.yaml", "gcp.yaml", "azure.yaml"])
def test_a_job_for_other_gpus_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="the cluster has room for 0 workers of 1 CPU, 1 H100 each, at most") as caught:
        fit(job(min=2, gpus=1, accelerator="H100"), CLUSTERS / name)
    has = {"aws.yaml": "A10G", "gcp.yaml": "L4", "azure.yaml": "T4"}[name]
    assert f"gpu_spot, up to 32: 8 CPU, 1 {has}" in caught.value.expected
    assert caught.value.remedy.startswith(f"use machines with H100, or set workers.accelerator to {has}; else ")
    # So are workers that only want to be on such machines.
    with pytest.raises(InputError, match="room for 0 workers of 1 CPU on a machine with H100 each"):
        fit(job(min=2, accelerator="H100"), CLUSTERS / name)


def mixed(tmp_path: Path, **types: Any) -> Path:
    """Write a cluster file with these changes of the node types of `aws.yaml`."""
    found = loaded(CLUSTERS / "aws.yaml")
    for name, changes in types.items():
        one = found["available_node_types"][name]
        one.update({key: value for key, value in changes.items() if key != "node_config"})
        one["node_config"].update(changes.get("node_config", {}))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(found))
    return tmp_path / "c.yaml"


def gpus_of(file: Path, name: str) -> tuple[str, ...]:
    return {one.name: one.gpus for one in node_types(file)[0]}[name]


def test_gpus_of_two_types_count_apart(tmp_path: Path) -> None:
    file = mixed(tmp_path, gpu_ondemand={"node_config": {"InstanceType": "g6.2xlarge"}, "max_workers": 4})
    found = fit(job(min=2, max=32, gpus=1), file)
    # Of 36 machines, 4 have the other type.
    assert (found.first, found.most) == (0, 32)
    (warning,) = found.warnings
    assert warning.startswith("the machines have GPUs of several types (L4 and A10G), and a run uses one")
    assert f"  warning: {warning}" in found.lines()
    # With one named, there is nothing to warn about; nor for workers without GPUs.
    for gpu, most in (("L4", 4), ("A10G", 32)):
        found = fit(job(min=2, max=32, gpus=1, accelerator=gpu), file)
        assert (found.most, found.warnings) == (most, ())
    assert fit(job(min=2, max=32), file).warnings == ()
    # Too few of either type.
    file = mixed(
        tmp_path,
        gpu_ondemand={"node_config": {"InstanceType": "g6.2xlarge"}, "max_workers": 4},
        gpu_spot={"max_workers": 3},
    )
    with pytest.raises(InputError, match="room for 4 workers of 1 CPU, 1 GPU each, at most, with GPUs of one type"):
        fit(job(min=5, max=7, gpus=1), file)


def test_unknown_gpus_may_be_of_any_type(tmp_path: Path) -> None:
    file = mixed(tmp_path, gpu_ondemand={"node_config": {"InstanceType": "new.large"}})
    found = fit(job(min=2, max=34, gpus=1), file)
    assert (found.most, found.warnings) == (34, ())
    assert found.roomy[0] == "gpu_ondemand: up to 2 machines, 1 on each"
    assert fit(job(min=2, gpus=1, accelerator="H100"), file).most == 2
    # A file can tell by itself: in resources, or by Ray's label.
    for told in (
        {"resources": {"CPU": 8, "GPU": 1, "accelerator_type:L4": 1}},
        {"labels": {"ray.io/accelerator-type": "L4"}},
    ):
        file = mixed(tmp_path, gpu_ondemand={"node_config": {"InstanceType": "new.large"}, **told})
        assert gpus_of(file, "gpu_ondemand") == ("L4",)


def test_a_node_type_that_declares_other_gpus_than_its_machines_have_is_refused(tmp_path: Path) -> None:
    def declares(gpu: str) -> Path:
        return mixed(tmp_path, gpu_spot={"resources": {"CPU": 8, "GPU": 1, f"accelerator_type:{gpu}": 1}})

    with pytest.raises(InputError, match="the node type gpu_spot has GPUs of two types: A10G and H100"):
        node_types(declares("H100"))
    assert gpus_of(declares("A10G-24G"), "gpu_spot") == ("A10G", "A10G-24G")


def test_ray_must_know_the_gpus_of_machines_that_it_starts(tmp_path: Path) -> None:
    found = loaded(CLUSTERS / "gcp-minimal.yaml")
    spot = found["available_node_types"]["gpu_spot"]
    del spot["resources"]["accelerator_type:L4"]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(found))
    (warning,) = fit(job(min=1, gpus=1, accelerator="L4"), tmp_path / "c.yaml").warnings
    assert warning.endswith("add accelerator_type:L4: 1 to its resources")
    # Machines that are there anyway need not be started for it.
    spot.update(min_workers=8, max_workers=8)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(found))
    assert fit(job(min=1, gpus=1, accelerator="L4"), tmp_path / "c.yaml").warnings == ()


def test_the_gpus_of_pods(tmp_path: Path) -> None:
    found = loaded(CLUSTERS / "kuberay" / "raycluster-8gpu.yaml")
    group = found["spec"]["workerGroupSpecs"][0]

    def written() -> Path:
        (tmp_path / "c.yaml").write_text(yaml.safe_dump(found))
        return tmp_path / "c.yaml"

    assert node_types(written())[0][1].gpus == ()
    group["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-accelerator"] = "nvidia-h100-80gb"
    assert node_types(written())[0][1].gpus == ("H100",)
    with pytest.raises(InputError, match="room for 0 workers of 1 CPU, 1 L4 each"):
        fit(job(min=8, gpus=1, accelerator="L4"), written())
    h100 = job(min=8, gpus=1, accelerator="H100")
    assert "Ray starts no machine of gpu-spot" in fit(h100, written()).warnings[0]
    group["rayStartParams"]["resources"] = '"{\\"accelerator_type:H100\\": 1}"'
    assert fit(h100, written()).warnings == ()
    group["rayStartParams"] = {}
    group["resources"] = {"accelerator_type:H100": "1"}
    assert fit(h100, written()).warnings == ()


@pytest.mark.parametrize(
    ("pipeline", "tensor", "said"),
    [
        (8, 1, ""),
        (4, 2, ""),
        (8, 2, "a replica takes 16 workers, but a machine has room for 8: its activations cross between machines"),
        (1, 16, "between machines, and so do the sums of each layer's slices"),
    ],
)
def test_a_replica_that_no_machine_has_room_for_is_noted(pipeline: int, tensor: int, said: str) -> None:
    workers = Workers(min=pipeline * tensor, cpus=24, gpus=1)
    asked = replace(job(), workers=workers, parallel=Parallel(pipeline=pipeline, tensor=tensor))
    assert ("; ".join(fit(asked, CLUSTERS / EIGHT).notes)).endswith(said)
    assert bool(fit(asked, CLUSTERS / EIGHT).notes) == bool(said)
    # Without GPUs, nothing is said of where a replica lies.
    assert fit(replace(asked, workers=replace(workers, gpus=0)), CLUSTERS / EIGHT).notes == ()


def test_the_limit_on_all_machines_together_applies(tmp_path: Path) -> None:
    found = loaded(CLUSTERS / "aws.yaml")
    found["available_node_types"]["gpu_ondemand"]["resources"] = {"CPU": 32, "GPU": 4}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({**found, "max_workers": 5}))
    assert fit(job(min=1, gpus=1), tmp_path / "c.yaml").most == 2 * 4 + 3


def test_fractions_of_a_cpu_are_rounded_up_as_in_ray(tmp_path: Path) -> None:
    found = loaded(CLUSTERS / "kuberay" / "raycluster.yaml")
    container = found["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    container["resources"] = {"requests": {"cpu": "1500m"}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(found))
    assert node_types(tmp_path / "c.yaml")[0][1].resources == {"CPU": 2.0, "GPU": 0.0}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("[1, 2]", "not a valid cluster file: AttributeError"),
        ("a: 1", "not a cluster file"),
        ("kind: RayJob\nspec: {}", "not a valid cluster file: KeyError"),
        ("cluster_name: x\nprovider: {type: local}", "does not give the resources of its machines"),
        (
            "cluster_name: x\navailable_node_types: {a: {node_config: {}}}",
            "does not give the resources of its machines",
        ),
        ("a: [", "cannot be read"),
    ],
)
def test_invalid_cluster_files_are_reported(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(InputError, match=what):
        node_types(tmp_path / "c.yaml")
    with pytest.raises(InputError, match="cannot be read"):
        node_types(tmp_path / "nowhere.yaml")
