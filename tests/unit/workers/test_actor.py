"""A worker's actor, in its own process without Ray."""

from __future__ import annotations

import signal
import subprocess
import sys

STARTING = """
import signal, sys, time

def handler(number, frame):
    raise SystemExit("as Ray's handler does")

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "raytrain_plus.workers.worker":
            print("loading", flush=True)
            time.sleep(60)

from raytrain_plus.workers.actor import WorkerActor
signal.signal(signal.SIGTERM, handler)
sys.meta_path.insert(0, Slow())
WorkerActor("w1")
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
from raytrain_plus.workers.actor import WorkerActor
actor, found = WorkerActor(), []
caller = threading.Thread(target=lambda: found.append(actor.call("clock")))
caller.start()
caller.join(0.2)
assert not found, "it is no worker yet"
actor.become("w1")
caller.join(30)
assert abs(found[0] - time.time()) < 60
"""


def test_calls_wait_until_a_standby_has_become_a_worker() -> None:
    told = subprocess.run([sys.executable, "-c", BECOMING], capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stderr


FAILING = """
import sys
from raytrain_plus.workers.actor import WorkerActor
sys.modules["raytrain_plus.workers.worker"] = None
WorkerActor().become("w1")
"""


def test_a_standby_that_cannot_become_a_worker_ends_so_that_it_counts_as_lost() -> None:
    told = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, timeout=60)
    assert told.returncode == 1
    assert "raytrain_plus.workers.worker" in told.stderr
