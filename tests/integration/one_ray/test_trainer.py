"""A Trainer script with one changed import: Trainer's own numbers, one hash on any workers, through a death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainingArguments

from raytrain_plus.audit.audit import audit
from raytrain_plus.bring.transformers import Trainer
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.result import Result
from raytrain_plus.storage.folders.local import LocalFolder
from tests.support.pretrained import bert

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("cluster")]

STEPS, SHARDS, MICROBATCH = 16, 3, 4
PER_SHARD = STEPS * MICROBATCH


class Words(Dataset[dict[str, Any]]):
    """Rows of uneven lengths, in an order of their own."""

    def __init__(self, order: list[int]) -> None:
        draw = torch.Generator().manual_seed(1)
        self.rows = [torch.randint(4, 64, (3 + n % 9,), generator=draw).tolist() for n in range(len(order))]
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.rows[self.order[index]]
        return {"input_ids": ids, "label": sum(ids) % 2}


def padded(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(one["input_ids"]) for one in features)
    ids = [one["input_ids"] + [0] * (longest - len(one["input_ids"])) for one in features]
    mask = [[1] * len(one["input_ids"]) + [0] * (longest - len(one["input_ids"])) for one in features]
    labels = [one["label"] for one in features]
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.tensor(mask),
        "labels": torch.tensor(labels),
    }


def accuracy(given: Any) -> dict[str, float]:
    return {"accuracy": float(np.mean(given.predictions.argmax(-1) == given.label_ids))}


def model() -> Any:
    torch.manual_seed(0)
    return bert(
        "BertForSequenceClassification",
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def trainer(cls: Any, out: Path, order: list[int], batch: int, arguments: Any = None, **given: Any) -> Any:
    settings = {
        "output_dir": str(out),
        "per_device_train_batch_size": batch,
        "max_steps": STEPS,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "warmup_steps": 3,
        "train_sampling_strategy": "sequential",
        "eval_strategy": "steps",
        "eval_steps": 8,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    args = TrainingArguments(**{**settings, **(arguments or {})})
    settings = {"eval_dataset": Words(list(range(50))), "compute_metrics": accuracy, **given}
    return cls(model(), args, data_collator=padded, train_dataset=Words(order), **settings)


def kill_one(folder: Path, killed: list[int]) -> None:
    """Kill a member of the run once it has made a few steps."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and not killed:
        events = list(read_events(LocalFolder(folder))) if (folder / "events.ndjson").exists() else []
        steps = [event["step"] for event in events if event["kind"] == "step_committed"]
        if steps and steps[-1] >= 3:
            views = [event for event in events if event["kind"] == "view_formed"]
            killed.append(views[-1]["members"][-1]["pid"])
            os.kill(killed[0], signal.SIGKILL)
        time.sleep(0.005)


def logged(made: Any, *names: str) -> list[float]:
    return [entry[name] for entry in made.state.log_history for name in names if name in entry]


def test_a_script_with_one_changed_import_gives_trainers_own_numbers_through_a_death(tmp_path: Path) -> None:
    rows = SHARDS * PER_SHARD
    runs: dict[str, Any] = {"reduction": "exact", "data": {"batch_size": SHARDS * MICROBATCH, "shards": SHARDS}}
    found = {}
    for name, workers in (("one", {"min": 1, "max": 1}), ("three", {"min": 2, "max": 3})):
        made = trainer(Trainer, tmp_path / name, list(range(rows)), MICROBATCH, run={**runs, "workers": workers})
        killed: list[int] = []
        watch = threading.Thread(target=kill_one, args=(tmp_path / name / "run", killed))
        if name == "three":
            watch.start()
        output = made.train()
        if name == "three":
            watch.join()
            assert killed
        folder = LocalFolder(tmp_path / name / "run")
        result = Result.load(folder)
        assert result is not None
        assert output.global_step == made.state.global_step == STEPS
        checked = audit(str(tmp_path / name / "run"))
        assert checked.clean, checked.faults
        found[name] = (result.state_sha256, logged(made, "loss"))
        saved = safetensors.torch.load_file(tmp_path / name / "run" / "model.safetensors")
        assert all(torch.equal(value, made.model.state_dict()[key]) for key, value in saved.items())
        if name == "three":
            assert [event for event in read_events(folder) if event["kind"] == "recovered"]
    assert found["one"] == found["three"]
    # A shard has a third of the rows: the batches of the run, as one process reads them.
    order = [
        PER_SHARD * shard + MICROBATCH * step + row
        for step in range(STEPS)
        for shard in range(SHARDS)
        for row in range(MICROBATCH)
    ]
    plain = trainer(transformers.Trainer, tmp_path / "plain", order, SHARDS * MICROBATCH)
    plain.train()
    for name in ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy"):
        assert logged(made, name) == pytest.approx(logged(plain, name), rel=1e-5), name
        assert len(logged(made, name)) in (STEPS, 2)
    assert made.state.epoch == pytest.approx(plain.state.epoch) == 1.0
    ours, theirs = made.evaluate(), plain.evaluate()
    assert ours["eval_accuracy"] == theirs["eval_accuracy"]
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-5)


def of_more(made: Any) -> dict[int, float]:
    return {one["step"]: one["eval_more_loss"] for one in made.state.log_history if "eval_more_loss" in one}


class Enough(TrainerCallback):
    """Stops at the first evaluation after this step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step > self.step


def test_a_callback_stops_the_run_which_has_the_best_model_then_and_can_be_resumed(tmp_path: Path) -> None:
    changed = {"max_steps": 400, "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 400}
    changed["train_sampling_strategy"] = "group_by_length"
    best = {"metric_for_best_model": "more_loss", "load_best_model_at_end": True}
    run = {"workers": {"min": 1, "max": 1}}

    def made(after: int) -> Any:
        sets = {"few": Words(list(range(7))), "more": Words(list(range(20)))}
        settings: dict[str, Any] = {"eval_dataset": sets, "callbacks": [Enough(after)], "run": run}
        return trainer(Trainer, tmp_path, list(range(48)), 4, arguments={**changed, **best}, **settings)

    first = made(4)
    first.train()
    folder = LocalFolder(tmp_path / "run")
    result = Result.load(folder)
    assert result is not None
    assert (result.status, result.steps) == ("stopped", first.state.global_step)
    assert 6 <= result.steps < 400
    noted = [event["text"] for event in read_events(folder) if event["kind"] == "noted"]
    assert "Task.on_evaluate after step 6 stops the run: Enough sets should_training_stop" in noted
    losses = of_more(first)
    assert first.state.best_metric == min(losses.values()) == losses[first.state.best_global_step]
    assert Path(first.state.best_model_checkpoint).is_dir()
    assert first.evaluate()["eval_more_loss"] == pytest.approx(first.state.best_metric, rel=1e-5)
    # What stopped the run before does not do so again.
    again = made(result.steps + 10)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step > result.steps + 10
    assert losses.items() <= of_more(again).items()
    checked = audit(str(tmp_path / "run"))
    assert checked.clean, checked.faults


SCRIPT = """
import sys

import torch
import transformers
from raytrain_plus.bring.transformers import Trainer

torch.manual_seed(0)
config = transformers.BertConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
)


class Scaled(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (3 * outputs.loss, outputs) if return_outputs else 3 * outputs.loss


rows = [{"input_ids": torch.tensor([4, 5, n % 30]), "labels": torch.tensor(n % 2)} for n in range(32)]
args = transformers.TrainingArguments(sys.argv[1], max_steps=3, per_device_train_batch_size=4, report_to=[])
trainer = Scaled(transformers.BertForSequenceClassification(config), args, train_dataset=rows)
print("made", trainer.train().global_step, "steps")
"""


@pytest.mark.slow
def test_a_script_is_executed_with_settings_given_beside_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "raytrain_plus", "run", "train.py", "--set", "workers.max=2", "--", "out"],
        cwd=tmp_path,
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "made 3 steps" in done.stdout
    result = Result.load(LocalFolder(tmp_path / "out" / "run"))
    assert result is not None
    # Two declared workers make the batch, wherever they came.
    assert result.samples == 3 * 2 * 4
    assert (tmp_path / "out" / "run.trainer" / "1" / "trainer.pkl").is_file()
