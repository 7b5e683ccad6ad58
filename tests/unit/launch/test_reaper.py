"""The processes that a driver registered end with it, however it ends."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from raytrain_plus.launch.reaper import LOOK_S
from tests.processes import runs, still_alive

LASTS = "import time; time.sleep(600)"
# The child has a child, as Ray's raylet has agents.
PARENT = f"""
import subprocess, sys
title = "ray::Controller.run" if sys.argv[1] == "saves" else sys.executable
subprocess.run([title, "-c", {LASTS!r}], executable=sys.executable)
"""
DRIVER = f"""
import os, subprocess, sys, time
import psutil
from raytrain_plus.launch.reaper import reaper
quiet = {{"stdout": subprocess.DEVNULL, "start_new_session": True}}
unminded = subprocess.Popen([sys.executable, "-c", {LASTS!r}], **quiet)
# Like a worker that the driver's raylet starts later, and a worker of another raylet.
worker = lambda name: subprocess.Popen([sys.executable, "-c", {LASTS!r}, "--raylet-name=" + name], **quiet)
stranger = worker("/tmp/other/raylet")
child = subprocess.Popen([sys.executable, "-c", {PARENT!r}, sys.argv[1]], **quiet)
while not psutil.Process(child.pid).children():
    time.sleep(0.01)
with reaper() as over_it:
    socket = f"/tmp/{{os.getpid()}}/raylet"
    over_it.mind([psutil.Process(child.pid)], socket)
    late = worker(socket)
    forked = os.fork() if sys.argv[1] == "forks" else 0
    if sys.argv[1] == "forks" and not forked:
        # This child holds the driver's end of the pipe, too.
        os.close(1)
        time.sleep(600)
    family = [child.pid, psutil.Process(child.pid).children()[0].pid]
    print(unminded.pid, stranger.pid, forked, over_it._process.pid, late.pid, *family, flush=True)
    sys.stdin.readline()
"""

STARTING = f"""
import os, subprocess, sys
from raytrain_plus.launch.reaper import reaper
session = "--logs=/tmp/ray/session_2026-01-02_03-04-05_678901_"
raylet = lambda pid: subprocess.Popen([sys.executable, "-c", {LASTS!r}, session + str(pid)], stdout=subprocess.DEVNULL)
with reaper():
    print(raylet(os.getpid()).pid, raylet(str(os.getpid()) + "0").pid, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    drivers: list[subprocess.Popen[str]] = []
    yield drivers
    for driver in drivers:
        driver.kill()
        driver.communicate()


def driver(started: list[subprocess.Popen[str]], how: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A driver, its two children, one that it forked (or none), its reaper, and the three registered processes."""
    command = [sys.executable, "-c", DRIVER, how]
    started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    assert started[-1].stdout is not None
    pids = [int(pid) for pid in started[-1].stdout.readline().split()]
    return started[-1], [psutil.Process(pid) for pid in pids if pid]


def end(*processes: psutil.Process) -> None:
    for process in processes:
        process.kill()
    still_alive(processes, 10)


@pytest.mark.parametrize("how", [pytest.param("plain", marks=pytest.mark.slow), "forks"])
def test_registered_processes_and_no_others_end_with_a_killed_driver(
    started: list[subprocess.Popen[str]], how: str
) -> None:
    process, (*others, reaper, late, child, grandchild) = driver(started, how)
    process.kill()
    alive = still_alive([reaper, late, child, grandchild], 8)
    living = [runs(other) for other in others]
    end(*alive, *others)
    assert not alive
    assert all(living)


def test_registered_processes_end_when_the_driver_lets_go(started: list[subprocess.Popen[str]]) -> None:
    process, (one, other, *minded) = driver(started, "plain")
    process.communicate("\n", timeout=20)
    alive = still_alive(minded, 5)
    living = runs(one) and runs(other)
    end(*alive, one, other)
    assert (process.returncode, alive, living) == (0, [], True)


@pytest.mark.slow
def test_a_controller_that_still_saves_is_waited_for(started: list[subprocess.Popen[str]]) -> None:
    process, (*others, reaper, late, child, controller) = driver(started, "saves")
    process.kill()
    # Longer than without a controller.
    time.sleep(2 * LOOK_S)
    living = [runs(one) for one in (reaper, child, controller)]
    controller.kill()
    alive = still_alive([reaper, late, child, controller], 8)
    end(*alive, *others)
    assert not alive
    assert all(living)


def test_a_ray_that_was_just_starting_ends_with_its_killed_driver(started: list[subprocess.Popen[str]]) -> None:
    command = [sys.executable, "-c", STARTING]
    started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    assert started[-1].stdout is not None
    raylet, other = (psutil.Process(int(pid)) for pid in started[-1].stdout.readline().split())
    started[-1].kill()
    alive, living = still_alive([raylet], 8), runs(other)
    end(*alive, other)
    assert (alive, living) == ([], True)
