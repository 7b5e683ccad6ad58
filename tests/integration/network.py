"""A machine with its own network, which can be disconnected. Needs Linux, root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil

HERE = "10.213.77.1"
"""This side's address on the cable."""
THERE = "10.213.77.2"
POSSIBLE = os.geteuid() == 0 and shutil.which("ip") is not None


class Cable:
    """The connection between this machine and the other one."""

    def __init__(self, name: str, space: str) -> None:
        self.name = name
        self.there = ("ip", "netns", "exec", space)
        """The prefix of commands that run on the other machine."""

    def pull(self) -> None:
        """Disconnect: from now on no packet passes, and neither side is notified."""
        _ip("link", "set", self.name, "down")


@contextmanager
def cable() -> Iterator[Cable]:
    """Create a network namespace at the other end of a pair of virtual devices; kill its processes on exit."""
    space = f"raytrain-{os.getpid()}"
    near, far = f"rt{os.getpid()}a", f"rt{os.getpid()}b"
    _ip("netns", "add", space)
    try:
        _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", space)
        _ip("address", "add", f"{HERE}/30", "dev", near)
        _ip("link", "set", near, "up")
        for device in ("lo", far):
            _ip("-n", space, "link", "set", device, "up")
        _ip("-n", space, "address", "add", f"{THERE}/30", "dev", far)
        yield Cable(near, space)
    finally:
        _ip("netns", "delete", space)


def raylet_behind(cable: Cable, address: str) -> AbstractContextManager[object]:
    """Start a Ray node of one CPU on the other machine; it joins the cluster at `address`."""
    return raylet(cable.there, address, "--node-ip-address", THERE)


@contextmanager
def raylet(apart: Sequence[str | Path], address: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a Ray node of one CPU in the cluster at `address`; yield its `ray start`, with which it ends.

    A command that begins with `apart` runs in its own namespaces.
    """
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    process = subprocess.Popen(
        [*apart, *start, "--address", address, *words, "--num-cpus", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        there = []
        if process.poll() is None:
            there = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for one in there:
            one.kill()
        process.wait(10)
        psutil.wait_procs(there, timeout=10)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=10)
