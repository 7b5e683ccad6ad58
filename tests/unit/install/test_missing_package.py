"""What is said where the Python that runs this package lacks another that it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from raytrain_plus.install.missing_package import lacking

REPOSITORY = Path(__file__).parents[3]


def test_a_python_without_what_is_needed_is_named(tmp_path: Path) -> None:
    """The Python that `python` means on a machine may be another than the one that its Ray runs in."""
    job = tmp_path / "job.yaml"
    job.write_text("{task: 'a:B', steps: 1, data: {path: d, batch_size: 8}}")
    without = "import runpy, sys; sys.modules['ray'] = None; runpy.run_module('raytrain_plus', run_name='__main__')"
    words = [sys.executable, "-c", without, "run", job]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith(f"{sys.executable}: the Python package 'ray' is not installed")
    assert "activate the environment" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_another_package_or_this_one_lacks_of_itself_is_no_such_mistake() -> None:
    for name in ("raytrain_plus.nothing", "nothing_at_all"):
        with pytest.raises(ModuleNotFoundError) as raised:
            __import__(name)
        assert lacking(raised.value) is None
