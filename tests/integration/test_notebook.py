"""In a notebook: a task written in a cell trains, and its cell shows how it goes."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.integration.tasks import write_data

CELLS = [
    """
from torch import nn
from torch.nn import functional as F
from raytrain_plus import Data, Job, Task, Workers, run

class Mine(Task):
    def model(self):
        return nn.Linear(6, 3)
    def loss(self, model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"])
""",
    """
job = Job(name="cell", task=Mine, data=Data(path="data", batch_size=48), epochs=2, workers=Workers(min=2))
result = run(job)
""",
    """
assert result.status == "finished", result.error
again = run(job)
print(result.steps, result.samples, again.state_sha256 == result.state_sha256)
""",
]


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
def test_a_task_from_a_cell_trains(tmp_path: Path) -> None:
    write_data(tmp_path / "data", rows=500)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    NotebookClient(
        notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}, kernel_name="python3"
    ).execute()
    shown = [output for output in notebook.cells[1].outputs if output.output_type == "display_data"]
    text = "".join(shown[0]["data"]["text/plain"])
    assert "cell finished: 21 steps, 1,000 samples" in text
    assert "2 workers ready" in text
    printed = "".join(output.get("text", "") for output in notebook.cells[2].outputs if output.output_type == "stream")
    assert "21 1000 True" in printed
