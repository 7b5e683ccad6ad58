"""What tests that need a GPU share: without one they are skipped, and say so. `make test-gpu` runs them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

DEVICE = torch.device("cuda", 0)
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
    # torch's threads warn when they use CUDA's libraries for the first time.
    pytest.mark.filterwarnings("default"),
]


def needs(module: str, name: str) -> pytest.MarkDecorator:
    """Return the mark that skips a test without this module, which `name` provides."""
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{name} is not installed")


SHARES_A_GPU = (2, 30)
"""The NCCL from which on several ranks may use one GPU, if a variable says so."""
EACH = "each"
"""A host's name that each process replaces by one of its own, before it uses NCCL: `integration.gpu_tasks` does."""


def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL that torch has loaded; (0, 0, 0) if it has none."""
    if not torch.cuda.is_available():
        return (0, 0, 0)
    version: tuple[int, ...] = torch.cuda.nccl.version()
    return version


def sharing(rank: int | None, version: tuple[int, ...] | None = None) -> dict[str, str]:
    """Return the environment variables with which NCCL lets several ranks use one GPU; `version`: of NCCL.

    NCCL before 2.30 refuses two ranks on one GPU of one host. There, each rank is on a host of its own, and the ranks
    talk over loopback, as nodes on Ethernet do. Without a `rank`, each process must name its own host: see `EACH`.
    """
    if (nccl_version() if version is None else version) >= SHARES_A_GPU:
        # NVLink's sums in the switch need a GPU for each rank, and a rank must leave the others room on the GPU.
        return {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}
    return {
        "NCCL_HOSTID": EACH if rank is None else f"rank-{rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "lo",
    }
