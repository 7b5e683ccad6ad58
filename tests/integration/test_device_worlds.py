"""Worlds for tensors of a device, in real processes with stand-ins for it: mixed operations, and what they leave.

`test_gpu_worlds` does the same with a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu import sharing
from tests.support.worlds import SLACK, grown, mixed, too_much

pytestmark = pytest.mark.timeout(120)


KINDS = ["staged horovod", "staged torch", "nccl"]


@pytest.mark.parametrize("kind", KINDS)
def test_operations_of_the_device_and_of_the_host_run_at_once(kind: str) -> None:
    mixed(3, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_ten_formings_leave_nothing(kind: str) -> None:
    assert grown(kind, 2, 10) == [{}, {}]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_formings_leave_nothing(kind: str) -> None:
    assert grown(kind, 2, 100) == [{}, {}]


def test_ranks_share_a_gpu_by_what_their_nccl_allows() -> None:
    ours, theirs = (sharing(rank, (2, 29, 7)) for rank in range(2))
    assert ours["NCCL_HOSTID"] != theirs["NCCL_HOSTID"]
    assert ours["NCCL_SOCKET_IFNAME"] == "lo"
    assert sharing(0, (2, 30, 7)) == sharing(1, (2, 31, 0)) == sharing(None, (2, 30))
    assert sharing(0, (2, 30, 7))["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"


def test_growth_beyond_what_allocators_keep_is_seen() -> None:
    before: dict[str, Any] = dict.fromkeys(SLACK, 10)
    assert too_much(before, {**before, "threads": 9, "host_bytes": 10 + SLACK["host_bytes"]}) == {}
    assert too_much(before, {**before, "descriptors": 12}) == {"descriptors": 2}
