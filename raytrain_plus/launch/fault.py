"""Inject faults into a run: verification kills worker processes that the run must survive."""

from __future__ import annotations

import contextlib
import os
import signal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

END_S = 30.0
"""Maximum seconds to reach the node of a process."""


def kill_process(node: str, pid: int) -> None:
    """Send SIGKILL to a process on the node with this Ray node id; do nothing if the process is gone."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    ray.get(ray.remote(_kill).options(num_cpus=0, scheduling_strategy=there).remote(pid), timeout=END_S)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
