"""The notebooks of `examples/`, executed: by their tests, and by hand to save their outputs.

    python -m tests.notebooks

An output that is saved says nothing of the machine that made it.
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
"""For one cell."""


def executed(name: str, folder: Path) -> NotebookNode:
    """The notebook, executed in a copy of the examples in `folder`, beside which it puts what it makes."""
    copy = folder / "examples"
    shutil.copytree(EXAMPLES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    notebook = nbformat.read(copy / name, as_version=4)
    where = {"metadata": {"path": str(copy)}}
    NotebookClient(notebook, timeout=LIMIT_S, resources=where, kernel_name="python3", record_timing=False).execute()
    return notebook


def tidy(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """The same, for keeping: paths as they are seen from where it lies, no name of the machine, no log."""
    for cell in notebook.cells:
        cell.metadata.clear()
        if cell.cell_type == "code":
            # What libraries log, with times and versions.
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    text = nbformat.writes(notebook).replace(f"{folder}/examples/", "").replace(str(folder), "..")
    return nbformat.reads(text.replace(f" on {socket.gethostname()}", " on this machine"), as_version=4)


def main() -> None:
    """Saves them all."""
    for name in NOTEBOOKS:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made).resolve()
            nbformat.write(tidy(executed(name, folder), folder), EXAMPLES / name)


if __name__ == "__main__":
    main()
