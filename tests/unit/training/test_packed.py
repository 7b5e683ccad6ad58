"""Training on packed batches equals a plain PyTorch loop over the same batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raytrain_plus import Task
from raytrain_plus.collective.solo import SoloWorld
from raytrain_plus.data.dataset import held_out_data, training_data
from raytrain_plus.data.ledger.ledger import ROW_ID
from raytrain_plus.data.of_job import held_out_rows_of, rows_of
from raytrain_plus.data.reading.microbatches import Microbatch, cut
from raytrain_plus.data.values.collate import set_collate
from raytrain_plus.errors import TrainingError
from raytrain_plus.training.model.model import build_model
from raytrain_plus.training.passes.evaluation import evaluate
from raytrain_plus.training.passes.task_loss import task_loss
from raytrain_plus.training.step.build import whole_steps
from raytrain_plus.training.update.train_state import TrainState
from raytrain_plus.training.weights.model_part import Summing
from raytrain_plus.trial.task_trial import try_on_cpu
from tests.support.tokenizers import job, save
from tests.unit.training.group import context

VOCABULARY, WIDTH, SHARDS, ROWS, SEED = 17, 8, 3, 3, 5
CPU = torch.device("cpu")


class Causal(nn.Module):
    """One layer of causal attention that never crosses documents."""

    def __init__(self, size: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(size, WIDTH), nn.Embedding(32, WIDTH)
        self.mixed, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, size)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        x = self.tokens(batch["input_ids"]) + self.places(batch["position_ids"])
        lengths = batch["cu_seq_lens"].diff()
        document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        allowed = (document[:, None] == document[None]) & torch.ones(len(document), len(document)).tril().bool()
        scores: torch.Tensor = self.head(F.scaled_dot_product_attention(*self.mixed(x).chunk(3, -1), attn_mask=allowed))
        return scores


def mean_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean over all tokens of what predicting the next one of the same document costs."""
    each = F.cross_entropy(model(batch)[0, :-1], batch["labels"][0, 1:], ignore_index=-100, reduction="sum")
    return each / batch["labels"].numel()


class Packs(Task):
    def model(self) -> nn.Module:
        return Causal()

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([value for _, value in parameters], lr=1.0)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        return mean_loss(model, batch)


class Weighs(Packs):
    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        return {"loss": mean_loss(model, batch), "weight": 2.0}


class OfRows(Packs):
    def evaluate(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        return {"loss": batch["cu_seq_lens"].diff().float()}


def packing(cls: type[Task]) -> Task:
    task = cls()
    set_collate(task, "pack")
    return task


def documents(shard: int) -> list[list[int]]:
    rng = np.random.default_rng(shard)
    return [rng.integers(0, VOCABULARY, size).tolist() for size in rng.integers(1, 9, 2 * ROWS - (shard == 1))]


def microbatches(task: Task, shard: int) -> list[Microbatch]:
    lists = pa.array(documents(shard))
    return cut(pa.table({"input_ids": lists, "labels": lists, ROW_ID: range(len(lists))}), ROWS, task.collate)


def state_of(task: Task) -> TrainState:
    return TrainState(task, [build_model(task, SEED, CPU)], Summing(SHARDS), seed=SEED)


def test_a_step_is_the_step_of_a_plain_loop() -> None:
    task = packing(Packs)
    state = state_of(task)
    built = build_model(packing(Packs), SEED, CPU)
    plain = built.module
    given = {shard: microbatches(task, shard) for shard in range(SHARDS)}
    done = whole_steps(state).run(0, given, context(SoloWorld()))

    tokens = sum(len(one) for shard in range(SHARDS) for one in documents(shard))
    total = torch.zeros(())
    # Each document alone: no position, mask or label of another one.
    for document in (one for shard in range(SHARDS) for one in documents(shard)):
        alone = {"input_ids": torch.tensor([document]), "position_ids": torch.arange(len(document))[None]}
        alone |= {"cu_seq_lens": torch.tensor([0, len(document)]), "labels": torch.tensor([document])}
        total = total + mean_loss(plain, alone) * len(document)
    (total / tokens).backward()
    assert done.loss == pytest.approx(float(total.detach()) / tokens, rel=1e-6)
    assert done.rows == sum(len(documents(shard)) for shard in range(SHARDS))
    trained = dict(state.named)
    with torch.no_grad():
        for name, value in plain.named_parameters():
            assert value.grad is not None
            torch.testing.assert_close(trained[name], value - value.grad, rtol=1e-6, atol=1e-6)


def test_a_packed_batch_weighs_its_tokens_unless_the_task_says() -> None:
    [one, _] = microbatches(packing(Packs), 0)
    built = build_model(packing(Packs), SEED, CPU)
    assert one.rows == ROWS
    tokens = one.batch["input_ids"].numel()
    assert tokens != ROWS
    assert task_loss(packing(Packs), built.module, one.batch, one.rows).weight == tokens
    assert task_loss(packing(Weighs), built.module, one.batch, one.rows).weight == 2.0
    assert task_loss(Packs(), built.module, one.batch, one.rows).weight == ROWS


def evaluated(task: Task) -> dict[str, float]:
    state = state_of(task)
    passes = whole_steps(state).passes
    return evaluate(
        state,
        passes,
        lambda shard: microbatches(task, shard),
        range(SHARDS),
        context(SoloWorld()),
        shards=SHARDS,
        step=0,
    )


def test_held_out_means_are_over_tokens() -> None:
    task = packing(Packs)
    built = build_model(task, SEED, CPU)
    every = [one.batch for shard in range(SHARDS) for one in microbatches(task, shard)]
    with torch.no_grad():
        sums = [float(mean_loss(built.module, batch)) * batch["input_ids"].numel() for batch in every]
    expected = sum(sums) / sum(batch["input_ids"].numel() for batch in every)
    assert evaluated(task)["loss"] == pytest.approx(expected, rel=1e-6)


def test_values_of_rows_are_no_means_over_tokens() -> None:
    with pytest.raises(TrainingError, match="evaluate returned 'loss', a value for each row, and with data"):
        evaluated(packing(OfRows))


class Texts(Packs):
    """Predicts the tokens of texts; the rows have no labels of their own."""

    def model(self) -> nn.Module:
        return Causal(60)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
        ends = batch["cu_seq_lens"][1:-1].long()
        labels = batch["input_ids"].index_fill(1, ends, -100)
        return mean_loss(model, {**batch, "labels": labels})


def test_texts_are_tokenized_and_packed_by_a_job(tmp_path: Path) -> None:
    save(tmp_path / "saved")
    wanted = job(tmp_path, tmp_path / "saved", collate="pack")
    wanted = replace(wanted, task=Texts)
    seen, held_out = training_data(wanted, []), held_out_data(wanted, [])
    found = try_on_cpu(wanted, Texts, rows_of(wanted, seen, None), held_out_rows_of(wanted, held_out, None))
    assert (found.rows, found.remarks, set(found.metrics)) == (8, (), {"loss"})
    assert found.metrics["loss"] == pytest.approx(np.log(60), abs=2)
