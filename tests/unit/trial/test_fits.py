"""A job that does not fit into memory is refused with a setting that makes it fit."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from raytrain_plus import Data, Job, Parallel, Task, Workers
from raytrain_plus.errors import InputError
from raytrain_plus.parallel.pipeline.partition import Layer
from raytrain_plus.parallel.state_bytes import StateSize
from raytrain_plus.trial.fits import check_layers_fit, check_state_fits

GB = 10**9
ADAM = StateSize(weights=4 * GB, frozen=0, changed=4 * GB, masters=0, gradients=4 * GB, kept=8 * GB, saved=0,
                 largest=GB // 2, layered=True)  # fmt: skip
CPU = torch.device("cpu")


def job(gpus: int = 0, **parallel: Any) -> Job:
    data = Data(path="data", batch_size=96, shards=8)
    workers = Workers(min=1, max=8, gpus=gpus)
    return Job(name="x", task=Task, data=data, steps=2, workers=workers, parallel=Parallel(**parallel))


@pytest.mark.parametrize(
    ("room", "parallel", "remedy"),
    [
        (15, {}, "set parallel.sharded to optimizer: then it takes about 10.0 GB"),
        (9.5, {}, "set parallel.sharded to full: then it takes about 5.0 GB"),
        (4, {}, "set parallel.sharded to full and parallel.holders to 1: then it takes about 3.0 GB"),
        (4, {"sharded": "full"}, "set parallel.holders to 1: then it takes about 3.0 GB"),
        (2, {}, "use more workers with parallel.sharded: full, workers with more memory, or a smaller model"),
    ],
)
def test_the_cheapest_setting_that_fits_is_named(room: float, parallel: dict[str, Any], remedy: str) -> None:
    with pytest.raises(InputError) as caught:
        check_state_fits(job(**parallel), ADAM, 8, held=GB, room=int(room * GB) + GB, apart=False)
    assert caught.value.where == "parallel.sharded"
    assert remedy in str(caught.value)


def test_what_does_not_help_is_not_named() -> None:
    with pytest.raises(InputError, match=r"fix: use more workers with parallel\.sharded: full"):
        check_state_fits(job(), ADAM, 1, held=0, room=10 * GB, apart=False)
    with pytest.raises(
        InputError, match=r"fix: declare the model's layers \(Task\.layers\) for parallel.sharded: full"
    ):
        check_state_fits(job(), replace(ADAM, layered=False), 8, held=0, room=9 * GB - 1, apart=False)


def test_a_gpu_may_leave_its_optimizer_to_the_host() -> None:
    with pytest.raises(InputError, match=r"fix: set offload to optimizer: then it takes about 8\.0 GB"):
        check_state_fits(job(1), ADAM, 1, held=0, room=10 * GB, apart=True)
    # The memory of this machine says nothing about that of a GPU.
    with pytest.raises(InputError, match="leave that to the workers with --no-run"):
        check_state_fits(job(1), ADAM, 1, held=0, room=10 * GB, apart=False)


def test_a_state_that_fits_is_left_alone() -> None:
    check_state_fits(job(), ADAM, 8, held=GB, room=17 * GB, apart=False)
    check_state_fits(job(), ADAM, 8, held=GB, room=0, apart=False)


def test_a_copy_for_checkpoints_counts_where_it_is_in_the_same_memory() -> None:
    saved = replace(ADAM, saved=12 * GB)
    assert saved.of(job(), 8) == ADAM.of(job(), 8) + 12 * GB // 8
    assert saved.of(job(), 8, apart=True) == ADAM.of(job(), 8, apart=True)


def test_layers_keep_what_all_microbatches_need() -> None:
    layers = [Layer("a", 1.0, 0, 0, GB // 4), Layer("b", 1.0, 0, 0, GB // 4)]
    wished = job(sharded="full", microbatches=2)
    assert check_layers_fit(wished, layers, GB, ADAM, CPU, 8 * GB) == GB + 5 * GB + 2 * GB // 2
    with pytest.raises(InputError, match=r"the 2 microbatches of a worker keep 500\.0 MB each") as caught:
        check_layers_fit(wished, layers, GB, ADAM, CPU, 7 * GB - 1)
    assert caught.value.where == "recompute"


LIMITED = """
import resource
from raytrain_plus.trial.memory_limits import total_memory
before = total_memory()
resource.setrlimit(resource.{kind}, (6 << 30, 6 << 30))
print(before, total_memory())
"""


@pytest.mark.parametrize("kind", ["RLIMIT_DATA", pytest.param("RLIMIT_AS", marks=pytest.mark.slow)])
def test_a_limit_of_the_process_is_respected(kind: str) -> None:
    code = LIMITED.format(kind=kind)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    before, after = map(int, found.stdout.split())
    assert after < min(before, 7 << 30)
    assert after > 1 << 30
