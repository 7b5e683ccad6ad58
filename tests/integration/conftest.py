"""Shared by tests that start processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from raytrain_plus.workers.run_actors import NAMESPACE, clear

TASKS = Path(__file__).parent
RUN_THREAD = "a run of a test"
"""The name of each thread in which a test runs a job."""


def end_runs() -> list[str]:
    """End the runs that tests of this process left running, and return the controllers that were ended."""
    threads = [thread for thread in threading.enumerate() if thread.name == RUN_THREAD]
    ended = []
    if any(thread.is_alive() for thread in threads) and ray.is_initialized():
        for one in ray.util.list_named_actors(all_namespaces=True):
            if one["namespace"] == NAMESPACE:
                ended.append(one["name"])
                # Not by a signal: Ray would start it again.
                ray.kill(ray.get_actor(one["name"], namespace=NAMESPACE))
                clear(one["name"])
    for thread in threads:
        # The run raises in its thread: a driver notices within ten seconds that its controller is gone.
        thread.join(20)
        assert not thread.is_alive(), "a run did not end with its controller"
    return ended


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Check that every run and process that a test started has ended when the test ends; end those of a failed one."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    runs = end_runs()
    assert not runs
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
    # One that is ending may not have been waited for by its parent yet.
    _, left = psutil.wait_procs(background(), timeout=10)
    for process in left:
        process.kill()
    assert not left
