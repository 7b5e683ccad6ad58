"""What the user's code raised is reported in words that say what to do."""

from __future__ import annotations

import pytest
import torch

from raytrain_plus.workers.task_error import as_training_error


def test_torchs_message_for_too_little_memory_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert "out of memory (RuntimeError): " in str(as_training_error(caught.value))
