"""The error for a required package that is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from raytrain_plus.install.missing_package import missing_package

REPOSITORY = Path(__file__).parents[3]


def test_a_python_without_a_required_package_is_named(tmp_path: Path) -> None:
    """`python` on a machine may differ from the Python in which its Ray runs."""
    job = tmp_path / "job.yaml"
    job.write_text("{task: 'a:B', steps: 1, data: {path: d, batch_size: 8}}")
    without = "import runpy, sys; sys.modules['ray'] = None; runpy.run_module('raytrain_plus', run_name='__main__')"
    words = [sys.executable, "-c", without, "run", job]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{sys.executable}: the Python package 'ray' is not installed")
    assert "activate the environment" in done.stderr
    assert "Traceback" not in done.stderr


def test_other_failed_imports_are_not_converted() -> None:
    for name in ("raytrain_plus.nothing", "nothing_at_all"):
        with pytest.raises(ModuleNotFoundError) as raised:
            __import__(name)
        assert missing_package(raised.value) is None
