"""Shared by tests that start processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

TASKS = Path(__file__).parent


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Check that every process that a test started is gone when the test ends."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    if ray.is_initialized():
        return
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    _, alive = psutil.wait_procs(left, timeout=10)
    names = [" ".join(process.cmdline())[:120] for process in alive if process.is_running()]
    for process in alive:
        process.kill()
    assert not names


def background() -> list[psutil.Process]:
    """Return the processes of detached runs, and all processes that these started."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "raytrain_plus.launch.background" in (process.info["cmdline"] or ()):
            found += [process, *process.children(recursive=True)]
    return found


@pytest.fixture
def nothing_goes_on() -> Iterator[None]:
    """End detached runs that a test left running, and fail the test."""
    assert not background()
    yield
    left = background()
    for process in left:
        process.kill()
    assert not left


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Start a Ray of four logical CPUs, shared by the tests of a module."""
    ray.init(address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()
