"""`column_of` makes the columns of `pa.array`, without loading pandas; `selectable` rows are selected rightly."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from raytrain_plus.data.values.columns import column_of, copied, selectable

LEDGER = """
import sys
from pathlib import Path
import numpy as np
from raytrain_plus.data.ledger.ledger import NOTE
from raytrain_plus.data.ledger.ledger_files import LedgerFiles
from raytrain_plus.storage.folders.local import LocalFolder
parts = LedgerFiles(LocalFolder(Path(sys.argv[1])))
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


def images(rows: int) -> pa.Array:
    """Return images of 2 x 3 numbers; all numbers of an image are that of its row."""
    flat = pa.array(np.repeat(np.arange(rows), 6))
    return pa.FixedSizeListArray.from_arrays(pa.FixedSizeListArray.from_arrays(flat, 3), 2)


FORMS = {
    "a list of lists": images(10),
    "with a null": pc.if_else(pa.array([row == 4 for row in range(10)]), None, images(10)),
    "in a struct": pa.StructArray.from_arrays([images(10)], ["image"]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunks", [1, 2])
def test_the_right_rows_are_selected_from_a_slice(form: str, chunks: int) -> None:
    column = FORMS[form]
    parts = [column.slice(3, 5)] if chunks == 1 else [column.slice(3, 2), column.slice(5, 3)]
    rows = pa.table({"image": pa.chunked_array(parts), "row": pa.array(range(3, 8))})
    given = selectable(rows)
    assert given.equals(rows)
    expected = [column[3 + place].as_py() for place in (0, 2, 4)]
    assert given.take([0, 2, 4])["image"].to_pylist() == expected
    assert given.filter(pa.array([True, False] * 2 + [True]))["image"].to_pylist() == expected


def test_rows_of_which_arrow_selects_the_right_ones_are_not_copied() -> None:
    rows = pa.table({"x": range(10), "points": images(5).flatten(), "text": ["a"] * 10}).slice(3)
    assert selectable(rows) is rows


def test_a_copy_shares_no_memory_with_the_rows() -> None:
    rows = pa.table({"x": pa.array(range(10)), "text": ["a"] * 10, "image": images(10)}).slice(2, 3)
    made = copied(rows)
    assert made.equals(rows)
    addresses = [
        {buffer.address for column in table.columns for chunk in column.chunks for buffer in chunk.buffers() if buffer}
        for table in (rows, made)
    ]
    assert not addresses[0] & addresses[1]
    assert made.get_total_buffer_size() < rows.get_total_buffer_size()
    assert copied(rows.slice(0, 0)).equals(rows.slice(0, 0))
