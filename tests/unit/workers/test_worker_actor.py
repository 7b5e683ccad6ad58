"""A worker's actor, in its own process without Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

STARTING = """
import signal, sys, time

def handler(number, frame):
    raise SystemExit("as Ray's handler does")

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "raytrain_plus.workers.worker":
            print("loading", flush=True)
            time.sleep(60)

from raytrain_plus.workers.worker_actor import WorkerActor
signal.signal(signal.SIGTERM, handler)
sys.meta_path.insert(0, Slow())
WorkerActor(None, "w1")
"""


def test_an_actor_ended_while_it_loads_its_code_prints_nothing() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STARTING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGTERM
    assert err == ""


BECOMING = """
import threading, time
from raytrain_plus.workers.worker_actor import WorkerActor
actor, found = WorkerActor(None), []
caller = threading.Thread(target=lambda: found.append(actor.call(0, "clock")))
caller.start()
caller.join(0.2)
assert not found, "it is no worker yet"
actor.become("w1", "p")
caller.join(30)
assert abs(found[0] - time.time()) < 60
"""


def test_calls_wait_until_a_standby_has_become_a_worker() -> None:
    told = subprocess.run([sys.executable, "-c", BECOMING], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr


THREADS = """
import os, sys, threading, types
from raytrain_plus.workers import worker_actor as actor

def variable(*_):
    return os.environ["OMP_NUM_THREADS"]

def waits_for_others():
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    return (own, os.getpriority(os.PRIO_PROCESS, os.getpid()) < 19)

def called(method, *arguments):
    # Ray sets it for each call, unless the process was started with it.
    if not given:
        os.environ["OMP_NUM_THREADS"] = "1"
    return method(*arguments)

class Module:
    @property
    def Worker(self):
        print("worker", variable())
        return lambda name, broken: types.SimpleNamespace(threads=variable)

given = "OMP_NUM_THREADS" in os.environ
actor.import_all = lambda imports: print("load", variable(), waits_for_others())
standby = actor.WorkerActor(None, cpus=float(sys.argv[1]))
sys.modules["raytrain_plus.workers.worker"] = Module()
called(standby.load, None)
called(standby.become, "w1", "p")
print("call", called(standby.call, 0, "threads"))
"""


@pytest.mark.parametrize(
    ("given", "cpus", "threads"),
    [
        ("", 2.5, 2),
        pytest.param("3", 4, 3, marks=pytest.mark.slow),
        pytest.param("", 4, 4, marks=pytest.mark.slow),
        pytest.param("", 0, 1, marks=pytest.mark.slow),
    ],
)
def test_a_standby_has_the_threads_of_a_worker(given: str, cpus: float, threads: int) -> None:
    others = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    told = subprocess.run(
        [sys.executable, "-c", THREADS, str(cpus)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**others, **({"OMP_NUM_THREADS": given} if given else {})},
    )
    expected = f"load {threads} (19, True)\nworker {threads}\ncall {threads}\n"
    assert (told.returncode, told.stdout) == (0, expected), told.stderr


FAILING = """
import sys
from raytrain_plus.workers.worker_actor import WorkerActor
sys.modules["raytrain_plus.workers.worker"] = None
WorkerActor(None).become("w1", "p")
"""


def test_a_standby_that_cannot_become_a_worker_ends_so_that_it_counts_as_lost() -> None:
    told = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, timeout=60)
    assert told.returncode == 1
    assert "raytrain_plus.workers.worker" in told.stderr
