"""Missing data is prepared, or refused with the place and the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_plus.data.prepare import prepare
from raytrain_plus.errors import DataError, TaskError


def test_a_path_that_cannot_be_accessed_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x: cannot be accessed: File name too long"):
        prepare("a:b", tmp_path / ("x" * 300), [])


def test_a_function_that_exits_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "ending_prepare.py").write_text("import sys\ndef make(folder, name):\n    sys.exit('no network')\n")
    with pytest.raises(TaskError, match=r"sys.exit(.|\n)*data.prepare raised SystemExit: no network"):
        prepare("ending_prepare:make", tmp_path / "data", [tmp_path])
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and "data" in path.name]
