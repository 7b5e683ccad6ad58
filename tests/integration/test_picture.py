"""The picture of the first page is made from a real run by the command that the page states."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_is_killed_and_drawn(tmp_path: Path, nothing_goes_on: None) -> None:
    file = tmp_path / "picture.svg"
    done = subprocess.run(
        [sys.executable, "-m", "examples.lost_worker", "--to", str(file)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    document = file.read_text()
    assert len(document) < 20_000
    assert "worker-1 is killed: " in document
    assert ", 0 steps lost" in document
    assert "its replacement joins" in document
