"""The versions of the cluster files agree with the table in clusters/README.md, and with each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from raytrain_plus.install.gpus import driver_floor

REPOSITORY = Path(__file__).parents[3]
CLUSTERS = REPOSITORY / "clusters"
FILES = [CLUSTERS / "Dockerfile", *sorted(CLUSTERS.rglob("*.yaml"))]
VERSIONS = dict(
    re.findall(
        r"(?m)^\| ([^|]+) \| ([^|]+) \|",
        (CLUSTERS / "README.md").read_text().partition("## Versions\n")[2].partition("\n## ")[0],
    )[1:]
)
DRIVER = int(VERSIONS["NVIDIA driver"])


def found(pattern: str, file: Path) -> set[str]:
    return set(re.findall(pattern, file.read_text()))


def test_the_table_agrees_with_itself() -> None:
    assert list(VERSIONS) == ["Ray", "image", "Python", "torch", "CUDA", "NCCL", "EFA installer", "NVIDIA driver"]
    assert driver_floor(VERSIONS["CUDA"]) == DRIVER
    python = VERSIONS["Python"].replace(".", "")
    assert VERSIONS["image"] == f"rayproject/ray:{VERSIONS['Ray']}-py{python}-gpu"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(CLUSTERS).as_posix())
def test_a_file_has_the_versions_of_the_table(file: Path) -> None:
    assert found(r"rayproject/ray:\S+", file) <= {VERSIONS["image"]}
    assert found(r'rayVersion: "(.+)"', file) | found(r"/raytrain:(\S+)", file) <= {VERSIONS["Ray"]}
    assert found(r"torch==([^\"\s]+)", file) <= {VERSIONS["torch"]}
    assert found(r"aws-efa-installer-([\d.]+\d)", file) <= {VERSIONS["EFA installer"]}
    drivers = found(r"nvidia-(\d{3})\b", file) | found(r"driver (\d{3})\b", file)
    assert all(int(driver) >= DRIVER for driver in drivers)


@pytest.mark.parametrize("file", sorted(CLUSTERS.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_file_whose_machines_have_gpus_names_the_driver_and_checks_it(file: Path) -> None:
    text = file.read_text()
    if "GPU: " not in text:
        return
    assert re.search(rf"nvidia-{DRIVER}\b|driver {DRIVER} or newer", text)
    # The last command: a machine on which it fails is not used.
    assert re.search(r"setup_commands:\n(    - .+\n)*    - raytrain doctor\n", text)


def test_the_tests_run_with_the_same_versions() -> None:
    assert f"\nray=={VERSIONS['Ray']}\n" in (REPOSITORY / "constraints.txt").read_text()
    assert f" torch=={VERSIONS['torch']} " in (REPOSITORY / "Makefile").read_text()


def test_a_torch_for_cuda_of_this_version_is_what_the_table_says() -> None:
    release, _, build = torch.__version__.partition("+")
    if release != VERSIONS["torch"] or torch.version.cuda is None or build not in ("", "cu130"):
        pytest.skip("this torch is another build")
    assert torch.version.cuda == VERSIONS["CUDA"]
    assert ".".join(map(str, torch.cuda.nccl.version())) == VERSIONS["NCCL"]
