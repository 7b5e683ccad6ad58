"""`raytrain init` and `raytrain new-job` in a folder; each written task makes a step."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytrain_plus.begin.catalogue import TEMPLATES
from raytrain_plus.checks.trial_process import TryingHere
from raytrain_plus.checks.validate import validate_job
from raytrain_plus.cli import main as cli
from raytrain_plus.errors import DataError
from raytrain_plus.job.yaml import load_job


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, from which tasks are imported; their modules are forgotten at the end."""
    before, path = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def said(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert isinstance(left.value.code, int)
    return left.value.code


def test_the_written_script_makes_a_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in TEMPLATES["trainer"].needs:
        pytest.importorskip(module)
    assert said("init", "new", "--template", "trainer") == 0
    monkeypatch.chdir(here / "new")
    monkeypatch.syspath_prepend(str(here / "new"))
    made = importlib.import_module("reviews").trainer(use_cpu=True)
    job, parcel = made._job(made)
    assert (job.workers.min, job.workers.max, job.epochs, job.data.batch_size) == (1, 2, 3, 32)
    assert (parcel / "model.pt").is_file()
    trying = TryingHere(job, [parcel])
    trying.data()
    assert set(trying.result().metrics) == {"eval_loss", "eval_accuracy"}


def test_the_written_lightning_script_makes_a_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in TEMPLATES["lightning"].needs:
        pytest.importorskip(module)
    assert said("init", "new", "--template", "lightning") == 0
    monkeypatch.chdir(here / "new")
    monkeypatch.syspath_prepend(str(here / "new"))
    made = importlib.import_module("spirals")
    job, parcel = made.trainer(accelerator="cpu")._job(made.Classifier(), None, None, made.Spirals())
    assert (job.workers.min, job.workers.max, job.epochs, job.data.batch_size) == (1, 2, 5, 64)
    trying = TryingHere(job, [parcel])
    trying.data()
    assert set(trying.result().metrics) == {"val_loss", "val_accuracy", "val_f1"}
    assert trying.result().remarks == ()


@pytest.mark.parametrize("name", [name for name, template in TEMPLATES.items() if not template.script])
def test_the_written_task_makes_a_step(name: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in TEMPLATES[name].needs:
        pytest.importorskip(module)
    assert said("init", "new", "--template", name) == 0
    monkeypatch.chdir(here / "new")
    job, roots = load_job(f"{TEMPLATES[name].stem}.yaml")
    trying = TryingHere(job, roots)
    trying.data()
    found = trying.result()
    assert (found.remarks, found.rows > 0) == ((), True)
    assert "loss" in found.metrics


def test_a_pretrained_folder_is_fine_tuned(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved as a user would save it; no hub, no network."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    assert said("init", "new", "--template", "transformers") == 0
    monkeypatch.chdir(here / "new")
    job, roots = load_job("sentiment.yaml", ["args.pretrained=saved"])
    (here / "new" / "saved").mkdir()
    TryingHere(load_job("sentiment.yaml")[0], roots).data()
    shutil.copy("data/sentiment/train/_tokenizer.json", "saved/tokenizer.json")
    config = transformers.DistilBertConfig(vocab_size=512, dim=32, n_layers=1, n_heads=2, hidden_dim=32)
    transformers.DistilBertModel(config).save_pretrained("saved")
    found = TryingHere(job, roots).result()
    assert set(found.metrics) == {"loss", "accuracy"}
    wrong, _ = load_job("sentiment.yaml", ["args.pretrained=nowhere"])
    with pytest.raises(Exception, match=r"pretrained: nowhere has no tokenizer\.json"):
        TryingHere(wrong, roots).result()


def test_no_file_is_overwritten_and_none_is_written_beside_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "new").mkdir()
    (here / "new" / "gpt.yaml").write_text("mine")
    assert said("init", "new", "--template", "gpt") == 2
    assert "new/gpt.yaml: exists, and is not overwritten" in capsys.readouterr().err
    assert [file.name for file in (here / "new").iterdir()] == ["gpt.yaml"]
    assert (here / "new" / "gpt.yaml").read_text() == "mine"


def test_a_folder_that_cannot_be_made_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "file").write_text("")
    assert said("init", "file/new", "--template", "gpt") == 2
    assert "cannot be written: Not a directory" in capsys.readouterr().err


TASK = """
from raytrain_plus import Task


class MyTask(Task):
    def __init__(self, width=8):
        pass
"""


def test_a_job_for_a_task_takes_its_sizes_from_the_data(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "my_own.py").write_text(TASK)
    pq.write_table(pa.table({"x": np.zeros(700)}), here / "rows.parquet", row_group_size=100)
    assert said("new-job", "my_own:MyTask", "--data", "rows.parquet") == 0
    assert (
        "my_task.yaml: wrote a job for my_own:MyTask; next: raytrain validate my_task.yaml" in capsys.readouterr().out
    )
    job, _ = load_job("my_task.yaml")
    assert (job.name, job.task, job.data.path) == ("my_task", "my_own:MyTask", "rows.parquet")
    assert (job.data.batch_size, job.data.shards) == (32, 8)
    assert "700 rows in 7 row groups: x" in (here / "my_task.yaml").read_text()
    assert "image_size" not in (here / "my_task.yaml").read_text()
    pq.write_table(pa.table({"image": [b"png"] * 9}), here / "pictures.parquet")
    assert said("new-job", "my_own:MyTask", "--data", "pictures.parquet", "--to", "pictures.yaml") == 0
    assert "  # image_size: [224, 224]" in (here / "pictures.yaml").read_text()
    capsys.readouterr()
    assert said("new-job", "my_own:MyTask") == 2
    assert "my_task.yaml: exists, and is not overwritten" in capsys.readouterr().err


def test_a_job_without_data_says_so_when_it_is_validated(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "my_own.py").write_text(
        TASK + "    def model(self):\n        import torch\n        return torch.nn.ReLU()\n"
    )
    assert said("new-job", "my_own:MyTask", "--to", "jobs/first.yaml", "--data", "not/there") == 0
    assert "the sizes in it do not come from the data: " in capsys.readouterr().out
    assert said("new-job", "my_own:MyTask", "--to", "jobs/second.yaml") == 0
    job, roots = load_job("jobs/second.yaml")
    with pytest.raises(DataError, match=r"YOUR/PARQUET/FILES: there is no such file or folder(?s:.*)correct the path"):
        validate_job(job, roots)


def test_a_module_that_prepares_its_data_is_used(here: Path) -> None:
    (here / "my_own.py").write_text(TASK + "\n\ndef prepare(folder, name):\n    pass\n")
    assert said("new-job", "my_own:MyTask") == 0
    assert load_job("my_task.yaml")[0].data.prepare == "my_own:prepare"


def test_a_task_that_is_none_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "my_own.py").write_text(TASK)
    assert said("new-job", "my_own:Mytask") == 2
    assert "did you mean 'MyTask'?" in capsys.readouterr().err
    assert not list(here.glob("*.yaml"))
