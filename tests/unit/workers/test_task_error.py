"""What the user's code raised is reported in words that say what to do."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from raytrain_plus.controller.ending import in_step
from raytrain_plus.workers.preparation.task_error import as_training_error


@pytest.mark.parametrize(
    ("committed", "expected"), [(6, "was not applied"), (7, "counts, because other workers have applied it")]
)
def test_an_error_says_whether_its_step_counts(committed: int, expected: str) -> None:
    error = in_step(as_training_error(ValueError("no such column")), 7, committed)
    assert str(error).endswith(f"the task raised ValueError: no such column (step 7 {expected})")


def test_torchs_message_for_too_little_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert "out of memory (RuntimeError): " in str(as_training_error(caught.value))


def test_memory_that_runs_out_is_that_of_a_layer() -> None:
    class Large(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.empty(2**60, dtype=torch.uint8)

    model = nn.Sequential(OrderedDict(first=nn.Linear(2, 2), second=nn.Sequential(Large())))
    modules = {id(one): name for name, one in model.named_modules()}
    with pytest.raises(RuntimeError) as caught:
        model(torch.zeros(1, 2))
    assert "out of memory in 'second.0' (RuntimeError): " in str(as_training_error(caught.value, modules=modules))


def test_the_rows_are_named() -> None:
    error = as_training_error(ValueError("bad"), "of shard 2 in step 7, row 3 of a.parquet, row group 0")
    assert str(error).endswith(
        "the task raised ValueError: bad; the rows: of shard 2 in step 7, row 3 of a.parquet, row group 0"
    )
