"""What the user's code raised is reported in words that say what to do."""

from __future__ import annotations

import pytest
import torch

from raytrain_plus.workers.task_error import as_training_error


def test_the_step_of_an_error_is_named() -> None:
    error = as_training_error(ValueError("no such column"), 7)
    assert str(error).endswith("the task raised ValueError: no such column (in step 7, which was not applied)")


def test_torchs_message_for_too_little_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert "out of memory (RuntimeError): " in str(as_training_error(caught.value))


def test_the_rows_are_named() -> None:
    error = as_training_error(ValueError("bad"), 7, "of shard 2 in step 7, row 3 of a.parquet, row group 0")
    assert str(error).endswith(
        "the task raised ValueError: bad (in step 7, which was not applied); "
        "the rows: of shard 2 in step 7, row 3 of a.parquet, row group 0"
    )
