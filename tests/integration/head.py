"""A Ray cluster as users start it: `ray start --head` with its dashboard, on this machine, for one test."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

START_S = 60.0


@dataclass(frozen=True)
class Head:
    """A running head."""

    address: str
    dashboard: str
    process: psutil.Process


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def head(cpus: int = 4, **environment: str) -> Iterator[Head]:
    """Start a head; on exit, end its processes and delete its files.

    No environment variable tells its workers where the package under test is: a job must send what it needs.
    """
    # Short, because socket paths are inside it.
    folder = Path(tempfile.mkdtemp(prefix="rt", dir="/tmp"))
    port, dashboard = free_port(), free_port()
    ray = Path(sys.executable).with_name("ray")
    words = ["start", "--head", "--block", f"--port={port}", f"--num-cpus={cpus}", f"--temp-dir={folder}"]
    words += ["--include-dashboard=true", f"--dashboard-port={dashboard}", "--node-ip-address=127.0.0.1"]
    words += [f"--dashboard-agent-listen-port={free_port()}", "--disable-usage-stats"]
    known = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    path = f"{ray.parent}{os.pathsep}{known.get('PATH', '')}"
    with (folder / "head.txt").open("wb") as output:
        process = subprocess.Popen(
            [ray, *words],
            stdout=output,
            stderr=output,
            start_new_session=True,
            # Otherwise it waits half a minute for processes that still run.
            env={
                **known,
                "PATH": path,
                "OMP_NUM_THREADS": "1",
                "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "1",
                **environment,
            },
        )
    try:
        where = f"http://127.0.0.1:{dashboard}"
        deadline = time.monotonic() + START_S
        while not _answers(where):
            assert process.poll() is None, (folder / "head.txt").read_text()
            assert time.monotonic() < deadline, (folder / "head.txt").read_text()
            time.sleep(0.2)
        yield Head(f"127.0.0.1:{port}", where, psutil.Process(process.pid))
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)
        if process.poll() is None:
            process.kill()
            process.wait(timeout=10)
        deadline = time.monotonic() + 20
        # Including processes that it started in other sessions.
        while left := _of(folder):
            assert time.monotonic() < deadline, left
            psutil.wait_procs(left, timeout=2)
            for one in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
        shutil.rmtree(folder)


def _of(folder: Path) -> list[psutil.Process]:
    """Return the processes that have this folder in their command or environment, or a file in it open.

    Ray's workers write their title over their command and environment; they still write logs.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            opened = [file.path for file in process.open_files()]
            known = [*process.cmdline(), *process.environ().values(), *opened]
            if process.pid != os.getpid() and any(str(folder) in word for word in known):
                found.append(process)
    return found


def _answers(where: str) -> bool:
    try:
        with urllib.request.urlopen(f"{where}/api/version", timeout=2):
            return True
    except urllib.error.HTTPError:
        # It requires a token.
        return True
    except OSError:
        return False
