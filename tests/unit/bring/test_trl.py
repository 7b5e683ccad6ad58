"""TRL's `SFTTrainer`, called with one batch each, gives what TRL gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import transformers
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

from raytrain_plus.bring.trainer_parcel import read_trainer, write_parcel
from raytrain_plus.bring.trainer_task import TrainerTask
from raytrain_plus.bring.trl import SFTTrainer
from raytrain_plus.errors import InputError
from raytrain_plus.job.task_loader import build_task
from raytrain_plus.task import RunFacts
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.passes.task_loss import task_loss
from tests.support.pretrained import WORDS, llama


@pytest.fixture(autouse=True)
def _no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")


def made(tmp_path: Path, cls: Any = SFTTrainer, **settings: Any) -> Any:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[SEP]")
    rows = Dataset.from_list([{"text": " ".join(f"w{n * k % 28}" for k in range(3 + n % 7))} for n in range(12)])
    given = {
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
        "learning_rate": 1e-2,
        "max_steps": 10,
        **settings,
    }
    args = trl.SFTConfig(str(tmp_path / "out"), **given)
    torch.manual_seed(0)
    return cls(llama(pad_token_id=0, eos_token_id=3), args, train_dataset=rows, processing_class=tokenizer)


def test_a_step_is_that_of_trl(tmp_path: Path) -> None:
    ours = made(tmp_path)
    write_parcel(tmp_path / "parcel", ours, ours.model, ours.train_dataset, None)
    task = build_task(TrainerTask, {"folder": str(tmp_path / "parcel")}, RunFacts(total_steps=10, batch_size=12))
    model = build_model(task, 0, torch.device("cpu")).module
    optimizer = task.optimizer(model.named_parameters())
    scheduler = task.scheduler(optimizer)
    used = ours._remove_unused_columns(ours.train_dataset)
    batch = task.collate(pa.Table.from_pylist([used[number] for number in range(12)]))
    losses = []
    for _ in range(4):
        found = task_loss(task, model, dict(batch), 12)
        found.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(found.loss.item())
    plain = made(tmp_path / "plain", trl.SFTTrainer, logging_steps=1, train_sampling_strategy="sequential")
    plain.args.per_device_train_batch_size, plain.args.max_steps = 12, 10
    plain._train_batch_size = 12
    plain.train()
    expected = [one["loss"] for one in plain.state.log_history if "loss" in one]
    assert losses == pytest.approx(expected[:4], rel=1e-5)
    assert losses[-1] < losses[0]


def test_a_worker_keeps_nothing_of_the_batches_that_it_has_seen(tmp_path: Path) -> None:
    ours = made(tmp_path)
    write_parcel(tmp_path / "parcel", ours, ours.model, ours.train_dataset, None)
    trainer = read_trainer(tmp_path / "parcel")
    trainer.model = ours.model
    batch = trainer.data_collator([{"input_ids": [4, 5, 6]}, {"input_ids": [7, 8]}])
    trainer.compute_loss(ours.model, dict(batch))
    assert {name for mode in trainer._metrics.values() for name, kept in mode.items() if kept} == {"num_tokens"}


def test_a_script_becomes_a_job(tmp_path: Path) -> None:
    ours = made(tmp_path, per_device_train_batch_size=6)
    job, _ = ours._job(ours)
    assert (job.data.batch_size, job.steps, job.clip_norm) == (6, 10, 1.0)


def test_what_only_the_steps_of_trl_do_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="padding_free=True, or packing with the strategy 'bfd', is not offered"):
        made(tmp_path, padding_free=True, max_length=None).train()
    offloads = made(tmp_path)
    # Its constructor needs a GPU for it.
    offloads.args.activation_offloading = True
    with pytest.raises(InputError, match="activation_offloading=True is not offered"):
        offloads.train()
