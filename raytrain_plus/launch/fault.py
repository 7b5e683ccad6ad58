"""A fault on purpose: what verification does to a run that is to survive it."""

from __future__ import annotations

import contextlib
import os
import signal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

END_S = 30.0
"""Limit of reaching a process's node."""


def kill_process(node: str, pid: int) -> None:
    """Kills a process on the node with that Ray node id, without a word to it; one that is gone is gone."""
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    ray.get(ray.remote(_kill).options(num_cpus=0, scheduling_strategy=there).remote(pid), timeout=END_S)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
