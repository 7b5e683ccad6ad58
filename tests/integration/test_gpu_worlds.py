"""Worlds of three processes that share one GPU: the contract, deaths in mid-sum, and what a hundred formings leave.

All ranks use one device, which takes turns between their processes: nothing here tells how fast several GPUs are.
"""

from __future__ import annotations

import pytest

from tests.gpu import NEEDS_GPU, needs
from tests.support import worlds

pytestmark = [*NEEDS_GPU, pytest.mark.timeout(300)]

STAGED_TORCH = "gpu staged torch"
STAGED_HOROVOD = pytest.param("gpu staged horovod", marks=needs("horovod", "Horovod"))
NCCL = pytest.param("gpu nccl", marks=needs("nccl", "nccl4py"))
KINDS = [STAGED_HOROVOD, STAGED_TORCH, NCCL]
RANKS = 3
SUMMED = 16 << 20
"""Elements of a sum of 64 MiB."""
OUT_S = 1.0
"""Limit, in seconds, within which the survivors of a death are out of the world."""


@pytest.mark.parametrize("kind", KINDS)
def test_contract(kind: str) -> None:
    worlds.check_reductions(RANKS, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_contract_for_tensors_of_the_host(kind: str) -> None:
    worlds.check_reductions(RANKS, kind, on_host=True)
    worlds.check_moves(RANKS, kind, on_host=True)


@pytest.mark.parametrize("kind", KINDS)
def test_gather_exchange_and_reduce_scatter(kind: str) -> None:
    worlds.check_moves(RANKS, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_int64_sums_keep_every_bit(kind: str) -> None:
    worlds.check_bits(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_operations_of_the_gpu_and_of_the_host_run_at_once(kind: str) -> None:
    worlds.mixed(RANKS, kind)


@pytest.mark.parametrize("kind", [STAGED_TORCH, pytest.param("gpu nccl peers", marks=needs("nccl", "nccl4py"))])
def test_tensors_pass_from_member_to_member(kind: str) -> None:
    worlds.check_relay(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_two_peers_killed_in_an_all_reduce(kind: str) -> None:
    kill(2, kind)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_peers_killed_in_an_all_reduce(kind: str) -> None:
    kill(20, kind)


def kill(rounds: int, kind: str) -> None:
    """Kill one of three in a sum of 64 MiB, so many times: all survivors are out in time, and form again."""
    found = worlds.kill_in_all_reduce(rounds, kind, "reduce_forever", length=SUMMED, limit_s=OUT_S)
    assert found == {"out": 2 * rounds, "late": 0, "died": 0, "formed again": rounds}


@pytest.mark.parametrize("kind", KINDS)
def test_ten_formings_leave_nothing(kind: str) -> None:
    assert worlds.grown(kind, RANKS, 10) == [{}] * RANKS


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_formings_leave_nothing(kind: str) -> None:
    assert worlds.grown(kind, RANKS, 100) == [{}] * RANKS
