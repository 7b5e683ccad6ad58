"""End the processes of a local Ray that its driver could not end: Ray's agents outlive a killed driver by a minute.

A worker that just starts and finds no raylet outlives it, too, and nobody knows its process id: its command names the
raylet's socket, which no other Ray has.

As a module: the reaper's own process. Its standard input holds lines of JSON, and closes when the driver ends, however
it ends; the argument is the driver's process id.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

import psutil

MODULE = "raytrain_plus.launch.reaper"
LOOK_S = 1.0
"""Seconds between two looks at the driver: a child that it forked may keep its end of the pipe open."""
LATE_S = 1.0
"""Seconds for which workers are looked for that the raylet was just starting when it ended."""
END_S = 10.0
"""Maximum seconds that the reaper takes to end."""


class Reaper:
    """The driver's side: names the processes that are to end with it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        """`process`: the reaper's, which has just been started."""
        self._process = process

    def mind(self, processes: Iterable[psutil.Process], socket: str = "") -> None:
        """Have these processes and all their children of this moment killed when the driver ends or lets go.

        `socket`: the raylet's, by which its workers are known that start later.
        """
        family = {one.pid for process in processes for one in _family(process)}
        told = {"processes": sorted(family), "socket": socket}
        # One that has ended is missed when the driver lets go, and no reason to stop a run.
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(told).encode() + b"\n")
            self._process.stdin.flush()

    def let_go(self) -> None:
        """Have what is left of them killed, and wait until the reaper has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=END_S)


@contextlib.contextmanager
def reaper() -> Iterator[Reaper]:
    """Start a reaper in a session of its own, which no signal to the driver's terminal or group reaches."""
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
    """Return processes by their ids; `psutil` holds their start times, too, so that no other is meant."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            found.append(psutil.Process(pid))
    return found


def _workers(sockets: Iterable[str]) -> list[psutil.Process]:
    """Return the workers that look for a raylet at one of these sockets: one that has found it has another command."""
    wanted = {f"--raylet-name={socket}" for socket in sockets}
    found = psutil.process_iter(["cmdline"]) if wanted else ()
    return [process for process in found if wanted & set(process.info["cmdline"] or ())]


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def main() -> None:
    """Wait until the driver has ended or let go, then kill what it named."""
    driver, minded, sockets = int(sys.argv[1]), list[psutil.Process](), set[str]()
    alive = True
    # Unbuffered: `select` does not see what a buffer holds.
    with open(sys.stdin.fileno(), "rb", buffering=0) as told:
        while True:
            if select.select([told], [], [], LOOK_S)[0]:
                line = told.readline()
                if not line.strip():
                    alive = bool(line)
                    break
                what = json.loads(line)
                minded += _named(what["processes"])
                sockets |= {what["socket"]} - {""}
            elif os.getppid() != driver:
                # Asked only when nothing is left to read: it may have ended before this process listened.
                alive = False
                break
    _kill(minded)
    _kill(_workers(sockets))
    if not alive:
        # The raylet was killed, and may have begun one just then.
        time.sleep(LATE_S)
        _kill(_workers(sockets))


if __name__ == "__main__":
    main()
