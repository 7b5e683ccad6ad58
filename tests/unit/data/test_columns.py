"""`column_of` returns the same columns as `pa.array`, without loading pandas."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from raytrain_plus.data.columns import column_of

LEDGER = """
import sys
from pathlib import Path
import numpy as np
from raytrain_plus.data.ledger import NOTE
from raytrain_plus.data.parts import Parts
from raytrain_plus.storage.local import LocalFolder
parts = Parts(LocalFolder(Path(sys.argv[1])))
parts.add(0, 0, np.ones(4, NOTE).tobytes())
parts.close()
assert any(Path(sys.argv[1]).rglob("*.parquet"))
assert "pandas" not in sys.modules
"""


@pytest.mark.parametrize("kind", ["i8", "u8", "f8", "i4"])
def test_the_same_numbers(kind: str) -> None:
    values = np.arange(10, dtype=kind)
    for some in (values, values[::3], values[:0]):
        made = column_of(some)
        made.validate(full=True)
        assert made.equals(pa.array(some))


def test_a_controller_writes_its_ledger_without_pandas(tmp_path: object) -> None:
    done = subprocess.run([sys.executable, "-c", LEDGER, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
