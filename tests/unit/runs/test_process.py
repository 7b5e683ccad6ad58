"""Whether a process of this machine is alive; None if that cannot be known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from raytrain_plus.runs.process import lives, this_process

pytestmark = pytest.mark.skipif(not this_process(), reason="needs /proc")

WHO = """
import json
from raytrain_plus.runs.process import this_process
print(json.dumps(this_process()), flush=True)
input()
"""


@pytest.fixture
def other() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", WHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_a_process_that_was_killed_has_ended_at_once(other: subprocess.Popen[str]) -> None:
    assert other.stdout is not None
    who = json.loads(other.stdout.readline())
    assert who["machine"] == this_process()["machine"]
    assert lives(other.pid, **who)
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert lives(other.pid, **who) is False, "a zombie"
    other.wait()
    assert lives(other.pid, **who) is False


def test_another_process_with_the_same_id_is_a_different_one() -> None:
    me = this_process()
    assert lives(os.getpid(), **me)
    assert lives(os.getpid(), me["machine"], str(int(me["born"]) + 1)) is False


def test_processes_of_other_machines_are_unknown(other: subprocess.Popen[str]) -> None:
    other.kill()
    other.wait()
    for elsewhere in ("", f"{this_process()['machine']}1"):
        assert lives(other.pid, elsewhere, "5") is None
