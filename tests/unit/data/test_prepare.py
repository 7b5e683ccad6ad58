"""What is missing is made, or refused with the place and the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytrain_plus.data.prepare import prepare
from raytrain_plus.errors import DataError


def test_a_path_that_cannot_be_looked_at_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x: cannot be looked at: File name too long"):
        prepare("a:b", tmp_path / ("x" * 300), [])
