"""The notebooks in the repository are small, executed without an error, and free of traces of a machine."""

import re

import nbformat
import pytest

from tests.notebooks import EXAMPLES, NOTEBOOKS

ABSOLUTE = re.compile(r"(?<![\w.:/])/(?:tmp|home|root|work|Users|var|opt|usr|mnt)/")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_kept_small_and_tidy(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert len(text) < 100_000
    assert not ABSOLUTE.search(text)
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert all(not cell.metadata for cell in notebook.cells)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("<svg" in output.get("data", {}).get("text/html", "") for output in outputs)
    assert all(output.output_type != "error" and output.get("name") != "stderr" for output in outputs)
    assert [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"] == [
        number + 1 for number in range(sum(cell.cell_type == "code" for cell in notebook.cells))
    ]


def test_both_are_there() -> None:
    assert NOTEBOOKS == ("first_training.ipynb", "lost_worker.ipynb")
