"""Which errors mean that a device has failed, and what becomes of the process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.exceptions import RayTaskError

from raytrain_plus.errors import DeviceBroken, Interrupted, TrainingError
from raytrain_plus.workers.epochs import Epochs
from raytrain_plus.workers.machine.device_fault import Brokenness, device_fault
from tests.unit.workers.members import member, worker_of

ILLEGAL = "CUDA error: an illegal memory access was encountered"


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as found:
        return found


def handled(error: BaseException, before: BaseException) -> BaseException:
    """The error of a task that has handled another one."""
    try:
        try:
            raise before
        except BaseException:
            raise error from None
    except BaseException as found:
        return found


def of_another(error: Exception) -> BaseException:
    """What Ray raises if another worker's call has raised this."""
    return RayTaskError("tensors", "Traceback", error).as_instanceof_cause()


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (torch.AcceleratorError(f"{ILLEGAL}\nCompile with `TORCH_USE_CUDA_DSA`"), ILLEGAL),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        (raised(ValueError("a reader"), torch.AcceleratorError(ILLEGAL)), ILLEGAL),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), ""),
        (raised(torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")), ""),
        (torch.AcceleratorError("CUDA error: out of memory"), ""),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), ""),
        (torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"), ""),
        (handled(ValueError("this task needs two GPUs"), torch.AcceleratorError(ILLEGAL)), ""),
        (raised(Interrupted("worker-1 gave nothing"), torch.AcceleratorError(ILLEGAL)), ""),
        (of_another(torch.AcceleratorError(ILLEGAL)), ""),
        (RuntimeError("shapes cannot be multiplied"), ""),
        (ValueError("CUDA error: says a task"), ""),
    ],
)
def test_what_a_device_says_as_it_fails(error: BaseException, fault: str) -> None:
    assert device_fault(error, torch.device("cpu")) == fault


def test_who_waits_hears_of_it_and_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raytrain_plus.workers.machine.device_fault.GRACE_S", 0.05)
    epochs, ended = Epochs(), threading.Event()
    broken = Brokenness(epochs.fail, ended.set)
    with ThreadPoolExecutor() as pool:
        waiting: Any = pool.submit(epochs.wait, 0)
        with pytest.raises(DeviceBroken):
            broken.tell(DeviceBroken("a GPU", ILLEGAL))
        assert ended.is_set()
        with pytest.raises(DeviceBroken, match="its GPU failed: CUDA error: an illegal memory access"):
            waiting.result()


def test_a_worker_whose_device_fails_answers_no_call(tmp_path: Path) -> None:
    told: list[DeviceBroken] = []

    class Tells(Brokenness):
        def tell(self, error: DeviceBroken) -> Any:
            told.append(error)
            raise SystemExit

    worker = worker_of(prepared := member(tmp_path), broken=Tells())

    def fails(error: BaseException) -> Any:
        raise error

    prepared.task.show = lambda model: fails(torch.AcceleratorError(ILLEGAL))  # type: ignore[method-assign]
    with pytest.raises(BaseException) as caught:
        worker._do(lambda: prepared.task.show(torch.nn.Linear(1, 1)))
    assert not isinstance(caught.value, torch.AcceleratorError)
    assert [str(one) for one in told] == [f"its device failed: {ILLEGAL}"]
    with pytest.raises(TrainingError, match="the task raised ValueError: no"):
        worker._do(lambda: fails(ValueError("no")))
    assert len(told) == 1
