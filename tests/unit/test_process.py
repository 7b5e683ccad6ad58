"""Whether a process of this machine has ended: said of none that may live."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from raytrain_plus.process import has_ended, this_process

pytestmark = pytest.mark.skipif(not this_process(), reason="needs /proc")

WHO = """
import json
from raytrain_plus.process import this_process
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
    assert not has_ended(other.pid, **who)
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(other.pid, **who), "a zombie"
    other.wait()
    assert has_ended(other.pid, **who)


def test_another_process_with_its_id_is_not_it() -> None:
    me = this_process()
    assert not has_ended(os.getpid(), **me)
    assert has_ended(os.getpid(), me["machine"], str(int(me["born"]) + 1))


def test_nothing_is_said_of_other_machines(other: subprocess.Popen[str]) -> None:
    other.kill()
    other.wait()
    for elsewhere in ("", f"{this_process()['machine']}1"):
        assert not has_ended(other.pid, elsewhere, "5")
