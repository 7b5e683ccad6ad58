"""The Ray that all tests of this folder share: to start and end one takes eight seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """Start a Ray of four logical CPUs."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()
