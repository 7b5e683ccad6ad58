"""The first minutes: a written task trains, and its own test passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import REPOSITORY, raytrain


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_written_task_trains_and_its_test_passes(tmp_path: Path, nothing_goes_on: None) -> None:
    code, out, err = raytrain("init", "first", cwd=tmp_path)
    assert code == 0, err
    assert "raytrain run digits.yaml" in out
    first = tmp_path / "first"
    code, out, err = raytrain("run", "digits.yaml", "--set", "epochs=2", "--set", "collective=torch", cwd=first)
    assert code == 0, err
    result = json.loads((first / "runs" / "digits" / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("finished", 30)
    # Below a project whose pytest is set up otherwise, such as a checkout of this one.
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\nfilterwarnings = error\n")
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        cwd=first,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert tested.returncode == 0, tested.stdout
    assert "1 passed" in tested.stdout
