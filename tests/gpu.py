"""What tests that need a GPU share: without one they are skipped, and say so. `make test-gpu` runs them."""

from __future__ import annotations

import pytest
import torch

DEVICE = torch.device("cuda", 0)
NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
    # torch's threads warn when they use CUDA's libraries for the first time.
    pytest.mark.filterwarnings("default"),
]
