"""A process of our own beside the controller: it is fed with lines of JSON, and answers in lines of JSON.

Writing never waits for the process. What it answers is read on a thread of the caller's choice.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any


class SideProcess:
    """A Python process that runs one of our modules. It exits when its input ends."""

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], where: str) -> None:
        """Start it with this whole environment, in the folder `where` if it exists here. Raises `OSError`."""
        # Another thread may call `kill`.
        self._writing = threading.RLock()
        self._owed = bytearray()
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=where if Path(where).is_dir() else None,
            env=dict(environment),
            # Ctrl-C must not end it: it exits when this process does.
            start_new_session=True,
        )
        self._pipe: IO[bytes] | None = self._process.stdin
        assert self._pipe is not None
        os.set_blocking(self._pipe.fileno(), False)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.returncode

    @property
    def owed(self) -> int:
        """Bytes of input that the pipe has not accepted yet."""
        return len(self._owed)

    def say(self, what: Any) -> None:
        """Send a value as a line of JSON; nothing if its input has ended."""
        with self._writing:
            if self._pipe is not None:
                self._owed += json.dumps(what).encode() + b"\n"
                self.write()

    def write(self) -> None:
        """Write what the pipe accepts without waiting."""
        with self._writing:
            try:
                while self._pipe is not None and self._owed:
                    del self._owed[: os.write(self._pipe.fileno(), self._owed)]
            except BlockingIOError:
                return
            except BrokenPipeError:
                # Whoever listens hears that the process has exited.
                self._shut()

    def end_input(self) -> None:
        """End its input, if everything is written."""
        with self._writing:
            if not self._owed:
                self._shut()

    def listen(self, hear: Callable[[dict[str, Any]], None]) -> int:
        """Call `hear` with each object that it answers, until it exits; return its exit code."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                hear(json.loads(line))
        return self._process.wait()

    def close(self, write_s: float, exit_s: float) -> bool:
        """Write the rest of its input for `write_s` seconds, then wait for its exit; return whether it has exited."""
        deadline = time.monotonic() + write_s
        while (pipe := self._pipe) is not None and (left := deadline - time.monotonic()) > 0:
            room = select.poll()
            room.register(pipe, select.POLLOUT)
            room.poll(1000 * left)
            self.write()
            self.end_input()
        try:
            self._process.wait(exit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """Kill it at once."""
        # Before its input ends: it would treat that as the end of the controller.
        self._process.kill()
        self._process.wait()
        self._shut()

    def _shut(self) -> None:
        with self._writing:
            if self._pipe is not None:
                self._pipe.close()
            self._pipe = None
            self._owed.clear()


def environment_with(variables: Mapping[str, str], roots: Sequence[str] = ()) -> dict[str, str]:
    """Return this process's environment with more `variables`, and its search path after these `roots`."""
    search = os.pathsep.join(dict.fromkeys(filter(None, [*roots, *sys.path])))
    return {**os.environ, **variables, "PYTHONPATH": search}
