"""Execute the notebooks of `examples/`: in their tests, and by hand to save their outputs.

    python -m tests.notebooks

Saved outputs do not identify the machine that made them.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = tuple(sorted(path.name for path in EXAMPLES.glob("*.ipynb")))
LIMIT_S = 120
"""Maximum seconds of one cell."""


def executed(name: str, folder: Path) -> NotebookNode:
    """Execute a notebook in a copy of the examples in `folder`, which also receives its outputs; return it."""
    copy = folder / "examples"
    shutil.copytree(EXAMPLES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    notebook = nbformat.read(copy / name, as_version=4)
    where = {"metadata": {"path": str(copy)}}
    NotebookClient(notebook, timeout=LIMIT_S, resources=where, kernel_name="python3", record_timing=False).execute()
    return notebook


def tidy(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """Return the notebook as it is saved: with relative paths, without the machine's name and logs."""
    for cell in notebook.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            # Logs of libraries, with times and versions.
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    text = nbformat.writes(notebook).replace(f"{folder}/examples/", "").replace(str(folder), "..")
    return nbformat.reads(text.replace(f" on {socket.gethostname()}", " on this machine"), as_version=4)


def main() -> None:
    """Execute and save all notebooks."""
    for name in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made).resolve()
            nbformat.write(tidy(executed(name, folder), folder), EXAMPLES / name)


if __name__ == "__main__":
    main()
