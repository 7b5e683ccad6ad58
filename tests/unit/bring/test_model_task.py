"""A model of Transformers trains from its folder, without a task, and is written as a folder again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import transformers
from torch import nn

from raytrain_plus.bring import Model
from raytrain_plus.errors import InputError, TaskError
from raytrain_plus.job.task_loader import build_task
from raytrain_plus.runs.pretrained_folder import write_folder
from raytrain_plus.task import RunFacts
from raytrain_plus.training.model.model import build_model, model_without_values
from raytrain_plus.training.passes.task_loss import task_loss
from tests.support.pretrained import KINDS, bert, gpt2, rows, saved, trained

CPU = torch.device("cpu")


def built(folder: Path, **args: Any) -> Any:
    return build_task(Model, {"folder": str(folder), **args}, RunFacts(total_steps=10, batch_size=8))


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_trained_and_written_as_a_folder_that_opens(tmp_path: Path, kind: str) -> None:
    folder = saved(tmp_path / "before", kind)
    task = built(folder, learning_rate=1e-2)
    model, losses = trained(task, rows(kind))
    assert losses[-1] < losses[0] * 0.9
    write_folder(model, tmp_path / "after", [task.folder])
    opened = type(model).from_pretrained(tmp_path / "after")
    assert {name: value.tolist() for name, value in opened.state_dict().items()} == {
        name: value.tolist() for name, value in model.state_dict().items()
    }
    names = {file.name for file in folder.iterdir()}
    assert {file.name for file in (tmp_path / "after").iterdir()} == names
    assert {(tmp_path / "after" / name).stat().st_mode & 0o777 for name in names} == {
        (folder / "vocab.txt").stat().st_mode & 0o777
    }
    if hasattr(opened, "generate") and opened.can_generate():
        ids = torch.tensor([[4, 5, 6]])
        assert opened.generate(ids, max_new_tokens=4, min_new_tokens=4).shape[1] >= 5
        assert opened.config.use_cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [1, 2, 8])
def test_microbatches_weighted_by_their_labels_give_the_loss_of_the_whole_batch(
    tmp_path: Path, kind: str, parts: int
) -> None:
    task = built(saved(tmp_path, kind))
    model = task.model().eval()
    table = rows(kind)
    whole = task_loss(task, model, task.collate(table), 8)
    gradients = torch.autograd.grad(whole.loss, list(model.parameters()), allow_unused=True)
    size = 8 // parts
    made = [task_loss(task, model, task.collate(table.slice(size * part, size)), size) for part in range(parts)]
    total = sum(float(one.weight) for one in made)
    assert total == float(whole.weight)
    loss = sum(one.loss * float(one.weight) for one in made) / total
    assert loss.item() == pytest.approx(whole.loss.item(), rel=1e-6)
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    for one, other in zip(found, gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, rtol=1e-4, atol=1e-7)


def test_what_is_counted_is_what_the_fixed_trainer_divides_by(tmp_path: Path) -> None:
    # Uneven lengths: a mean of the batches' means would be another number.
    for kind in ("llama", "t5", "bert"):
        task = built(saved(tmp_path / kind, kind))
        model = task.model()
        batch = task.collate(rows(kind))
        arguments = transformers.TrainingArguments(output_dir=str(tmp_path / "out"), report_to=[])
        trainer = transformers.Trainer(model, arguments)
        counted = trainer._get_num_items_in_batch([batch], CPU)
        assert float(task_loss(task, model, batch, 8).weight) == float(counted), kind


def test_a_causal_model_learns_its_own_tokens_and_none_of_the_padding(tmp_path: Path) -> None:
    task = built(saved(tmp_path, "gpt2"))
    batch = task.collate(pa.table({"input_ids": [[4, 5, 6], [7]], "text": ["left", "out"], "label": [1, 2]}))
    assert batch["labels"].tolist() == [[4, 5, 6], [7, -100, -100]]
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    # A single token predicts nothing.
    assert float(task_loss(task, task.model(), batch, 2).weight) == 2


def test_labels_may_have_the_names_that_collators_of_transformers_know(tmp_path: Path) -> None:
    task = built(saved(tmp_path, bert("BertForSequenceClassification", num_labels=3)))
    batch = task.collate(pa.table({"input_ids": [[4, 5], [6, 7]], "label": [0, 2]}))
    found = task_loss(task, task.model(), batch, 2)
    assert (batch["labels"].tolist(), float(found.weight)) == ([0, 2], 2)


def test_a_regression_counts_its_rows(tmp_path: Path) -> None:
    folder = saved(tmp_path, bert("BertForSequenceClassification", num_labels=1))
    for labels in ([0.5, -100.0], [1, -100]):
        task = built(folder)
        batch = task.collate(pa.table({"input_ids": [[4, 5], [6, 7]], "labels": labels}))
        batch["labels"] = batch["labels"].float()
        assert task_loss(task, task.model(), batch, 2).weight == 2


def test_another_head_is_trained_from_new_and_the_user_is_told(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bert")
    task = built(folder, head="SequenceClassification", config={"num_labels": 5})
    assert task.remarks() == ()
    model = build_model(task, 0, CPU).module
    assert model.classifier.out_features == 5
    assert isinstance(model, transformers.BertForSequenceClassification)
    before = transformers.BertForMaskedLM.from_pretrained(folder)
    assert torch.equal(model.bert.embeddings.word_embeddings.weight, before.bert.embeddings.word_embeddings.weight)
    [said] = task.remarks()
    assert said.startswith(f"{folder} has no weights for bert.pooler.dense.bias, bert.pooler.dense.weight, classifier")
    again = build_model(built(folder, head="SequenceClassification", config={"num_labels": 5}), 0, CPU).module
    assert torch.equal(model.classifier.weight, again.classifier.weight)


def test_under_the_meta_device_nothing_is_read(tmp_path: Path) -> None:
    folder = saved(tmp_path, "llama")
    (folder / "model.safetensors").write_bytes(b"")
    model = model_without_values(built(folder))
    assert model is not None
    assert {value.device.type for value in model.parameters()} == {"meta"}
    assert built(folder).tensor()["model.layers.*.self_attn.q_proj"] == "colwise"


def test_whether_the_model_was_built_without_values_leaves_random_numbers_alone(tmp_path: Path) -> None:
    task = built(saved(tmp_path, "gpt2"))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    task.collate(rows("gpt2"))
    assert torch.equal(torch.rand(3), expected)


def test_biases_and_norms_have_no_weight_decay(tmp_path: Path) -> None:
    task = built(saved(tmp_path, "gpt2"), weight_decay=0.1)
    model = task.model()
    groups = {
        name: group["weight_decay"]
        for group in task.optimizer(model.named_parameters()).param_groups
        for name, value in model.named_parameters()
        if any(value is one for one in group["params"])
    }
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path / "out"), report_to=[])
    decayed = set(transformers.Trainer(model, arguments).get_decay_parameter_names(model))
    # A tied weight has two names there.
    assert {name for name, decay in groups.items() if decay} == decayed & groups.keys()
    assert 0 < len(decayed) < len(groups)


@pytest.mark.parametrize(
    ("schedule", "warmup", "rates"),
    [
        ("linear", 0, [1.0, 0.9, 0.8, 0.7]),
        ("linear", 2, [0.5, 1.0, 1.0, 0.875]),
        ("constant", 0, [1.0] * 4),
        ("constant", 2, [0.5, 1.0, 1.0, 1.0]),
    ],
)
def test_the_learning_rate_follows_its_schedule(
    tmp_path: Path, schedule: str, warmup: float, rates: list[float]
) -> None:
    task = built(saved(tmp_path, "gpt2"), schedule=schedule, warmup=warmup, learning_rate=1.0)
    optimizer = task.optimizer(task.model().named_parameters())
    scheduler = task.scheduler(optimizer)
    found = []
    for _ in rates:
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    assert found == pytest.approx(rates)


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.score(x)[:, 0] - labels).square().mean()}


def scorer() -> nn.Module:
    return Scorer()


def no_model() -> str:
    return "text"


def halved(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"], batch["labels"])["loss"] / 2


HERE = "tests.unit.bring.test_model_task"


def test_a_function_builds_any_model_that_returns_its_loss() -> None:
    table = pa.table({"x": [[1.0, 2.0], [3.0, 4.0]], "labels": [0.5, 1.5], "other": ["a", "b"]})
    task = build_task(Model, {"build": f"{HERE}:scorer"})
    model = build_model(task, 0, CPU).module
    found = task_loss(task, model, task.collate(table), 2)
    assert found.weight == 2
    half = build_task(Model, {"build": f"{HERE}:scorer", "loss": f"{HERE}:halved"})
    assert float(task_loss(half, model, half.collate(table), 2).loss.detach()) == pytest.approx(
        float(found.loss.detach()) / 2
    )


def test_a_model_without_its_own_loss_is_refused(tmp_path: Path) -> None:
    task = built(saved(tmp_path, bert("BertForSequenceClassification")))
    model = task.model()
    with pytest.raises(TaskError, match="BertForSequenceClassification returned no loss for a batch of input_ids"):
        task.loss(model, task.collate(pa.table({"input_ids": [[4, 5]]})))
    with pytest.raises(TaskError, match="no column of the data is an argument of the model"):
        task.collate(pa.table({"text": ["a"]}))
    with pytest.raises(TaskError, match="the batch is a tuple"):
        task.loss(model, (torch.zeros(1),))


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", "bert")
    for args, said in (
        ({}, "either `folder` or `build`"),
        ({"folder": str(folder), "build": f"{HERE}:scorer"}, "either `folder` or `build`"),
        ({"folder": str(folder), "schedule": "square"}, "unknown schedule 'square'"),
    ):
        with pytest.raises(InputError) as found:
            Model(**args)
        assert said in str(found.value)
    with pytest.raises(TaskError, match="the function returned str"):
        Model(build=f"{HERE}:no_model").model()
    with pytest.raises(TaskError, match="has no 'classes'"):
        built(folder, config={"classes": 3}).model()
    with pytest.raises(TaskError, match="a model of type bert has no head 'Poetry'") as refused:
        built(folder, head="Poetry").model()
    assert "MaskedLM" in str(refused.value) or "CausalLM" in str(refused.value)


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="there is no folder"):
        Model(folder=str(tmp_path / "none"))
    with pytest.raises(TaskError, match=r"has no config\.json"):
        Model(folder=str(tmp_path))
    folder = saved(tmp_path / "pickled", "gpt2")
    (folder / "model.safetensors").unlink()
    with pytest.raises(TaskError, match=r"has no model\.safetensors"):
        Model(folder=str(folder))
    torch.save(gpt2().state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(TaskError, match=r"has its weights as a pickle only, pytorch_model\.bin") as refused:
        Model(folder=str(folder))
    assert "save_pretrained" in str(refused.value)
    (folder / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(TaskError, match="GPT2LMHeadModel cannot take the weights in"):
        Model(folder=str(folder)).model()
    (folder / "config.json").write_text('{"model_type": "unheard of"}')
    with pytest.raises(TaskError, match=r"Transformers cannot use .*config\.json"):
        Model(folder=str(folder)).model()


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    folder, other = saved(tmp_path / "a", "bert"), saved(tmp_path / "b", "llama")
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(TaskError, match="holds weights of another model than BertForMaskedLM, such as lm_head"):
        built(folder).model()
    wide = saved(tmp_path / "wide", bert(type_vocab_size=3))
    (saved(tmp_path / "c", "bert") / "config.json").write_text((wide / "config.json").read_text())
    with pytest.raises(TaskError, match="cannot take the weights"):
        built(tmp_path / "c").model()


def test_only_models_of_transformers_are_written_as_folders_and_none_is_replaced(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the model is a Linear"):
        write_folder(nn.Linear(1, 1), tmp_path / "a", [])
    with pytest.raises(InputError, match="the folder exists"):
        write_folder(gpt2(), tmp_path, [])
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="the folder cannot be written"):
        write_folder(gpt2(), tmp_path / "file" / "a", [])
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
