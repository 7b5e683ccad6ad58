"""End the processes of a local Ray that its driver could not end: Ray's agents outlive a killed driver by a minute.

A worker that is just starting and finds no raylet outlives the driver, too, and its process id is unknown. It is found
by its command, which names the raylet's socket; no other Ray has the same one. While Ray is just starting, its
processes are found by its session's name, which ends with the driver's process id.

A controller ends with its driver by itself, unless its run was stopped before: then it saves the state first. It is
waited for.

Run as a module, this is the reaper process. Its argument is the driver's process id. Its standard input holds lines of
JSON and closes when the driver ends, however it ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

import psutil

MODULE = "raytrain_plus.launch.reaper"
LOOK_S = 1.0
"""Seconds between two checks of the driver: a child that it forked may keep its end of the pipe open."""
PAUSE_S = 0.2
"""Seconds between two looks at a controller."""
LATE_S = 1.0
"""Seconds after which to look again for workers that the raylet was just starting when it was killed."""
SAVING_S = 6 * 3600.0
"""Maximum seconds to wait for a controller. Its own waits have shorter limits, unless its writes advance."""
CONTROLLER = "ray::Controller"
"""How Ray names the process of a controller."""
END_S = 10.0
"""Maximum seconds for the reaper to end."""


class Reaper:
    """The driver's side: name the processes that must end with the driver."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        """Use the reaper process `process`, which has just been started."""
        self._process = process

    def mind(self, processes: Iterable[psutil.Process], socket: str = "") -> None:
        """Register these processes and their current descendants to be killed when the driver ends or lets go.

        `socket`: the raylet's socket, which identifies workers that start later.
        """
        family = {one.pid for process in processes for one in _family(process)}
        watched = {"processes": sorted(family), "socket": socket}
        # A reaper that has ended is no reason to stop a run.
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(watched).encode() + b"\n")
            self._process.stdin.flush()

    def let_go(self) -> None:
        """Have the remaining processes killed, and wait until the reaper has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=END_S)


@contextlib.contextmanager
def reaper() -> Iterator[Reaper]:
    """Start a reaper in its own session, so that signals to the driver's terminal or group do not reach it."""
    made = Reaper(
        subprocess.Popen(
            [sys.executable, "-m", MODULE, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    )
    try:
        yield made
    finally:
        made.let_go()


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _named(pids: Iterable[int]) -> list[psutil.Process]:
    """Return processes by their ids; `psutil` also keeps their start times, so that a reused id is not killed."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found.append(psutil.Process(pid))
    return found


def _workers(sockets: Iterable[str]) -> list[psutil.Process]:
    """Return the workers still looking for a raylet at one of these sockets; a connected one has another command."""
    wanted = {f"--raylet-name={socket}" for socket in sockets}
    found = psutil.process_iter(["cmdline"]) if wanted else ()
    return [process for process in found if wanted & set(process.info["cmdline"] or ())]


def _of_session(driver: int, since: float) -> list[psutil.Process]:
    """Return the processes of the Ray that this driver has started since then, in Unix seconds."""
    name = re.compile(rf"session_[\d_-]+_{driver}\b")
    found = psutil.process_iter(["cmdline", "create_time"])
    return [
        process
        for process in found
        if process.info["create_time"] >= since and any(map(name.search, process.info["cmdline"] or ()))
    ]


def _controllers(minded: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the running controllers among the descendants of these processes; a suspended one saves nothing."""
    found = []
    for process in {one for parent in minded for one in _family(parent)}:
        with contextlib.suppress(psutil.Error):
            ended = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
            if not ended and "".join(process.cmdline()[:1]).startswith(CONTROLLER):
                found.append(process)
    return found


def _await_controllers(minded: Iterable[psutil.Process]) -> None:
    until = time.monotonic() + SAVING_S
    while _controllers(minded) and time.monotonic() < until:
        time.sleep(PAUSE_S)


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def main() -> None:
    """Wait until the driver has ended or let go, then kill what it named."""
    driver, minded, sockets, since = (
        int(sys.argv[1]),
        list[psutil.Process](),
        set[str](),
        psutil.Process().create_time(),
    )
    alive = True
    # Unbuffered: `select` does not see what a buffer holds.
    with open(sys.stdin.fileno(), "rb", buffering=0) as orders:
        while True:
            if select.select([orders], [], [], LOOK_S)[0]:
                line = orders.readline()
                if not line.strip():
                    alive = bool(line)
                    break
                what = json.loads(line)
                minded += _named(what["processes"])
                sockets |= {what["socket"]} - {""}
            elif os.getppid() != driver:
                # Checked only when nothing is left to read: the driver may end before this process starts to read.
                alive = False
                break
    if not alive:
        _await_controllers(minded)
        minded += _of_session(driver, since)
    _kill(minded)
    _kill(_workers(sockets))
    if not alive:
        # The raylet may have started a worker just before it was killed.
        time.sleep(LATE_S)
        _kill(_workers(sockets))


if __name__ == "__main__":
    main()
