"""A Trainer's own methods, called with one batch each, give what Trainer gives; what a run cannot do is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pyarrow as pa
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models
from torch import nn
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from raytrain_plus import Data, Job, Parallel, Workers
from raytrain_plus.bring.held_out_sets import NumberedSets
from raytrain_plus.bring.trainer_parcel import write_parcel
from raytrain_plus.bring.trainer_task import CallingTrainerTask, TrainerTask
from raytrain_plus.bring.transformers import Seq2SeqTrainer, Trainer
from raytrain_plus.data.reading.microbatches import Microbatch
from raytrain_plus.errors import InputError, TaskError
from raytrain_plus.job.task_loader import build_task
from raytrain_plus.task import RunFacts, StopRun
from raytrain_plus.training.model.model import build_model, model_without_values
from raytrain_plus.training.passes.task_loss import task_loss
from raytrain_plus.trial.slice_check import check_slices
from tests.support.pretrained import bert, gpt2, llama, qwen3_moe, saved, t5

CPU = torch.device("cpu")
TOKENS = [{"input_ids": [4 + n % 9] * (2 + n % 5), "label": n % 2} for n in range(12)]


def padded(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(one["input_ids"]) for one in features)

    def filled(values: list[int], padding: int) -> list[int]:
        return [*values, *[padding] * (longest - len(values))]

    batch = {
        "input_ids": torch.tensor([filled(one["input_ids"], 0) for one in features]),
        "attention_mask": torch.tensor([filled([1] * len(one["input_ids"]), 0) for one in features]),
    }
    if "label" in features[0]:
        batch["labels"] = torch.tensor([one["label"] for one in features])
    else:
        batch["labels"] = torch.tensor([filled(one["input_ids"], -100) for one in features])
    return batch


def accuracy(given: Any) -> dict[str, float]:
    assert isinstance(given.predictions, np.ndarray)
    return {"accuracy": float((given.predictions.argmax(-1) == given.label_ids).mean())}


def arguments(tmp_path: Path, **given: Any) -> Any:
    return TrainingArguments(output_dir=str(tmp_path / "out"), report_to=[], use_cpu=True, **given)


def classifier() -> Any:
    torch.manual_seed(0)
    return bert("BertForSequenceClassification", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def adapted() -> Any:
    return peft.get_peft_model(classifier(), peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS"))


def trainer(tmp_path: Path, model: Any = None, cls: Any = Trainer, **given: Any) -> Any:
    args = given.pop("args", None) or arguments(tmp_path)
    model = classifier() if model is None and "model_init" not in given else model
    return cls(model, args, data_collator=padded, train_dataset=TOKENS, **given)


def task_of(tmp_path: Path, made: Any, cls: Any = TrainerTask) -> Any:
    write_parcel(tmp_path / "parcel", made, None if made.model_init else made.model, made.train_dataset, None)
    return build_task(cls, {"folder": str(tmp_path / "parcel")}, RunFacts(total_steps=10, batch_size=12))


TABLE = pa.table({name: [one[name] for one in TOKENS] for name in TOKENS[0]})


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"label_smoothing_factor": 0.1},
        {"weight_decay": 0.1, "optim": "sgd", "lr_scheduler_type": "cosine", "warmup_steps": 2},
    ],
)
def test_a_step_is_that_of_trainer(tmp_path: Path, given: Any) -> None:
    made = trainer(tmp_path, args=arguments(tmp_path, learning_rate=1e-2, max_grad_norm=0.0, max_steps=10, **given))
    task = task_of(tmp_path, made)
    model = build_model(task, 0, CPU).module
    optimizer = task.optimizer(model.named_parameters())
    scheduler = task.scheduler(optimizer)
    batch = task.collate(TABLE)
    losses = []
    for _ in range(4):
        found = task_loss(task, model, dict(batch), 12)
        found.loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(found.loss.item())
    # Trainer itself, on one process.
    plain = transformers.Trainer(
        classifier(), made.args, data_collator=padded, train_dataset=TOKENS, optimizers=(None, None)
    )
    plain.create_optimizer_and_scheduler(10)
    expected = []
    for _ in range(4):
        inputs = padded(TOKENS)
        loss = plain.compute_loss(plain.model, inputs, num_items_in_batch=torch.tensor(12))
        loss.backward()
        plain.optimizer.step()
        plain.lr_scheduler.step()
        plain.optimizer.zero_grad()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-6)
    assert losses[-1] < losses[0]


class Weighted(Trainer):
    """A trainer with a constructor, a loss and an optimizer of its own."""

    def __init__(self, *args: Any, class_weights: list[float], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.class_weights = class_weights

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, inputs["labels"], torch.tensor(self.class_weights))
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, model: Any = None) -> Any:
        trained = [value for name, value in self.model.named_parameters() if "classifier" in name]
        others = [value for name, value in self.model.named_parameters() if "classifier" not in name]
        self.optimizer = torch.optim.SGD([{"params": trained, "lr": 1.0}, {"params": others, "lr": 0.1}])
        return self.optimizer


def test_overridden_methods_and_the_users_own_attributes_are_used(tmp_path: Path) -> None:
    task = task_of(tmp_path, trainer(tmp_path, cls=Weighted, class_weights=[1.0, 3.0]))
    model = build_model(task, 0, CPU).module
    batch = task.collate(TABLE)
    logits = model(**batch).logits
    expected = nn.functional.cross_entropy(logits, batch["labels"], torch.tensor([1.0, 3.0]))
    assert task_loss(task, model, batch, 12).loss.item() == pytest.approx(expected.item())
    optimizer = task.optimizer(model.named_parameters())
    first = optimizer.param_groups[0]
    assert (len(first["params"]), first["lr"]) == (2, 1.0)
    assert first["params"][0] is model.classifier.weight


def test_an_evaluation_gives_the_numbers_of_trainer(tmp_path: Path) -> None:
    made = trainer(tmp_path, compute_metrics=accuracy, eval_dataset=TOKENS)
    task = task_of(tmp_path, made)
    model = build_model(task, 0, CPU).module.eval()
    batches = [task.evaluate(model, task.collate(TABLE.slice(at, 5))) for at in (0, 5, 10)]
    outputs = {name: torch.cat([one[name] for one in batches]) for name in batches[0]}
    found = task.summarise(outputs)
    args = arguments(tmp_path, per_device_eval_batch_size=4)
    plain = transformers.Trainer(
        classifier(), args, data_collator=padded, eval_dataset=TOKENS, compute_metrics=accuracy
    )
    expected = plain.evaluate()
    assert found["eval_accuracy"] == expected["eval_accuracy"]
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)


def test_metrics_get_what_they_are_to_include(tmp_path: Path) -> None:
    def seen(given: Any) -> dict[str, float]:
        return {"inputs": float((given.inputs >= 0).sum()), "losses": float(given.losses.sum())}

    args = arguments(tmp_path, include_for_metrics=["inputs", "loss"])
    task = task_of(tmp_path, trainer(tmp_path, compute_metrics=seen, args=args))
    model = build_model(task, 0, CPU).module.eval()
    found = task.summarise(task.evaluate(model, task.collate(TABLE)))
    plain = transformers.Trainer(classifier(), args, data_collator=padded, eval_dataset=TOKENS, compute_metrics=seen)
    expected = plain.evaluate()
    for name in ("eval_inputs", "eval_losses"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6), name


def test_each_of_several_held_out_sets_has_the_metrics_that_trainer_gives_it(tmp_path: Path) -> None:
    sets = {"few": TOKENS[:3], "many": TOKENS[3:]}
    made = trainer(tmp_path, compute_metrics=accuracy, eval_dataset=sets)
    made.held_out_names = list(sets)
    task = task_of(tmp_path, made)
    model = build_model(task, 0, CPU).module.eval()
    table = TABLE.append_column("raytrain_set", pa.array([0] * 3 + [1] * 9))
    # The first batch has rows of both.
    batches = [task.evaluate(model, task.collate(table.slice(at, 5))) for at in (0, 5, 10)]
    outputs = {name: torch.cat([one[name] for one in batches]) for name in batches[0]}
    found = task.summarise(outputs)
    plain = transformers.Trainer(
        classifier(), made.args, data_collator=padded, eval_dataset=sets, compute_metrics=accuracy
    )
    expected = plain.evaluate()
    assert set(found) == {"eval_few_loss", "eval_few_accuracy", "eval_many_loss", "eval_many_accuracy"}
    for name, value in found.items():
        assert value == pytest.approx(expected[name], rel=1e-6), name
    # A trial sees the first rows alone.
    first = task.summarise(task.evaluate(model, task.collate(table.slice(0, 2))))
    assert set(first) == set(found)
    assert np.isnan(first["eval_many_accuracy"])
    assert not np.isnan(first["eval_few_accuracy"])
    # The number of the set is none of the model's arguments.
    assert task_loss(task, model, task.collate(table), 12).loss.item() > 0


def test_sets_are_read_one_after_the_other() -> None:
    rows = NumberedSets([TOKENS[:3], TOKENS[3:5]])
    assert [rows[number] for number in range(len(rows))] == [
        {**one, "raytrain_set": number} for one, number in zip(TOKENS, (0, 0, 0, 1, 1), strict=False)
    ]
    for odd in ([], iter(TOKENS), [(1, 2)]):
        with pytest.raises(InputError, match="a dict of held-out datasets needs datasets with a length"):
            NumberedSets([TOKENS, odd])


def test_tokens_are_counted_and_their_mean_stands_beside_the_mean_over_rows(tmp_path: Path) -> None:
    for kind in (gpt2, llama):
        made = trainer(tmp_path / kind.__name__, model=kind())
        task = task_of(tmp_path / kind.__name__, made)
        model = build_model(task, 0, CPU).module.eval()
        table = TABLE.select(["input_ids"])
        whole = task_loss(task, model, task.collate(table), 12)
        parts = [task_loss(task, model, task.collate(table.slice(at, 3)), 3) for at in (0, 3, 6, 9)]
        total = sum(float(one.weight) for one in parts)
        assert total == float(whole.weight) > 12
        assert sum(one.loss.item() * float(one.weight) for one in parts) / total == pytest.approx(whole.loss.item())
        found = task.evaluate(model, task.collate(table))
        assert float(found["weight"]) == total
        assert set(found["metrics"]) == {"eval_loss", "eval_token_loss"}


def test_the_tokens_of_a_masked_model_are_masked_alike_whenever_rows_are_read(tmp_path: Path) -> None:
    class Words(transformers.DataCollatorForLanguageModeling):
        def __post_init__(self) -> None:
            self.generator = None

        def __call__(self, features: Any, return_tensors: Any = None) -> Any:
            return {"input_ids": torch.randint(32, (len(features), 4), generator=self.generator)}

    made = trainer(tmp_path)
    made.data_collator = Words(tokenizer=None, mlm=True)
    task = task_of(tmp_path, made)
    first, again, other = (task.collate(TABLE.slice(at, 3))["input_ids"] for at in (0, 0, 3))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_model_is_built_anew_or_travels_with_all_that_was_changed_in_it(tmp_path: Path) -> None:
    model = classifier()
    model.bert.embeddings.requires_grad_(False)
    model.classifier = nn.Linear(16, 7)
    task = task_of(tmp_path, trainer(tmp_path, model=model))
    there = build_model(task, 0, CPU).module
    assert there.classifier.out_features == 7
    assert not there.bert.embeddings.word_embeddings.weight.requires_grad
    assert all(torch.equal(value, there.state_dict()[name]) for name, value in model.state_dict().items())
    empty = model_without_values(task)
    assert empty is not None
    assert {value.device.type for value in empty.parameters()} == {"meta"}
    drawn = task_of(tmp_path, trainer(tmp_path, model_init=lambda: bert("BertForSequenceClassification")))
    one, two = (build_model(drawn, seed, CPU).module.classifier.weight for seed in (1, 2))
    assert not torch.equal(one, two)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_model_with_an_adapter_travels_once_and_only_the_adapter_is_saved(tmp_path: Path) -> None:
    model = adapted()
    made = trainer(tmp_path, model=model, args=arguments(tmp_path, learning_rate=1e-1, max_steps=10))
    task = task_of(tmp_path, made)
    there = build_model(task, 0, CPU)
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad and "original" not in name}
    assert there.rebuilt.keys() == frozen
    optimizer = task.optimizer((n, value) for n, value in there.module.named_parameters() if value.requires_grad)
    losses = []
    for _ in range(8):
        loss = task_loss(task, there.module, task.collate(TABLE), 12).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    # A run that an older version began has saved them.
    del made.saves_frozen_weights
    assert build_model(task_of(tmp_path, made), 0, CPU).rebuilt == {}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing.*` is deprecated")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize(
    ("parallel", "given"),
    [
        ({"tensor": 2}, {}),
        ({"tensor": 2, "experts": 2}, {}),
        ({"experts": 2}, {"gradient_checkpointing": True}),
    ],
    ids=str,
)
def test_a_script_trains_a_model_in_slices_by_its_own_plan(tmp_path: Path, parallel: Any, given: Any) -> None:
    sparse = qwen3_moe(intermediate_size=256, moe_intermediate_size=128)
    made = trainer(tmp_path, model=sparse, args=arguments(tmp_path, **given))
    task = task_of(tmp_path, made)
    job = Job(
        name="job",
        task="module:Task",
        data=Data(path="rows", batch_size=24, shards=4),
        steps=3,
        parallel=Parallel(**parallel),
        workers=Workers(min=1),
    )
    batch = task.collate(TABLE.select(["input_ids"]))
    check_slices(job, task, CPU, Microbatch(batch, 12, start=0, ids=0))
    assert task_of(tmp_path / "adapted", trainer(tmp_path / "adapted", model=adapted())).tensor() == {}


def test_items_keep_the_types_that_their_dataset_gave_them(tmp_path: Path) -> None:
    class Collator:
        def __call__(self, features: Any) -> dict[str, torch.Tensor]:
            self.seen = features
            return {"input_ids": torch.zeros(len(features), 2, dtype=torch.long)}

    made = trainer(tmp_path, args=arguments(tmp_path, remove_unused_columns=False))
    made.data_collator = Collator()
    made.item_kinds = {"half": "array", "image": "tensor", "double": "tensor"}
    task = task_of(tmp_path, made)
    table = pa.table(
        {
            "ids": [[1, 2], [3]],
            "text": ["a", None],
            "half": pa.array([0.5, 1.5], pa.float32()),
            "double": [0.5, 1.5],
            "image": pa.array([[[1, 2], [3, 4]], [[5, 6], [7, 8]]], pa.list_(pa.list_(pa.uint8(), 2))),
        }
    )
    task.collate(table)
    seen = task._trainer.data_collator.seen
    assert [one["ids"] for one in seen] == [[1, 2], [3]]
    assert [one["text"] for one in seen] == ["a", None]
    assert seen[1]["half"].dtype == np.float32
    assert (seen[1]["image"].dtype, seen[1]["image"].tolist()) == (torch.uint8, [[5, 6], [7, 8]])
    assert (seen[1]["double"].dtype, float(seen[1]["double"])) == (torch.float64, 1.5)


def test_a_batch_of_a_tokenizer_is_a_dict(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.data_collator = lambda features: transformers.BatchEncoding(padded(features))
    batch = task_of(tmp_path, made).collate(TABLE)
    assert (type(batch), len(batch["labels"])) == (dict, 12)


def test_a_collator_that_drops_rows_is_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.data_collator = lambda features: padded(features[1:])
    with pytest.raises(TaskError, match="made a batch of 2 rows of 3 rows"):
        task_of(tmp_path, made).collate(TABLE.slice(0, 3))


def test_metrics_that_are_no_dict_and_predictions_that_are_no_rows_are_refused(tmp_path: Path) -> None:
    task = task_of(tmp_path, trainer(tmp_path, compute_metrics=lambda given: torch.ones(2)))
    model = build_model(task, 0, CPU).module.eval()
    outputs = task.evaluate(model, task.collate(TABLE))
    with pytest.raises(TaskError, match="compute_metrics returned Tensor"):
        task.summarise(outputs)
    made = trainer(tmp_path, compute_metrics=accuracy, preprocess_logits_for_metrics=lambda logits, _: logits.sum())
    task = task_of(tmp_path, made)
    build_model(task, 0, CPU)
    with pytest.raises(TaskError, match=r"the predictions of an evaluation hold \(\) for a batch of 12 rows"):
        task.evaluate(model, task.collate(TABLE))


class Heard(TrainerCallback):
    """Notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heard.append(("step", state.global_step))
        control.should_training_stop = state.global_step > 2
        control.should_save = state.global_step > 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.heard.append(("log", state.global_step, logs["loss"]))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self.heard.append(("evaluate", metrics["eval_loss"]))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.heard.append(("save",))


def test_callbacks_hear_of_steps_evaluations_and_checkpoints(tmp_path: Path) -> None:
    made = trainer(tmp_path, callbacks=[Heard()], args=arguments(tmp_path, logging_steps=2))
    task = task_of(tmp_path, made, CallingTrainerTask)
    values = {"loss": 0.5, "grad_norm": 1.0, "lr": 0.1, "epoch": 0}
    assert task.on_step({"step": 0, **values}) is None
    with pytest.raises(TaskError, match="Heard sets should_save, which a run ignores"):
        task.on_step({"step": 1, **values})
    assert task.on_evaluate(-1, {"eval_loss": 9.0}) is None
    task.on_evaluate(1, {"eval_loss": 0.25})
    task.on_checkpoint(1, "there")
    [callback] = task._trainer.callbacks_called
    assert callback.heard == [("step", 1), ("step", 2), ("log", 2, 0.5), ("evaluate", 0.25), ("save",)]
    # A run that stops is saved.
    assert task.on_step({"step": 2, **values}) == StopRun("Heard sets should_training_stop")
    assert callback.heard[-1] == ("step", 3)
    assert task.on_step({"step": 3, **values}) == StopRun("Heard sets should_training_stop")
    assert callback.heard[-1] == ("log", 4, 0.5)


def test_callbacks_see_the_best_evaluation_as_trainer_has_it(tmp_path: Path) -> None:
    args = arguments(tmp_path, metric_for_best_model="accuracy")
    task = task_of(tmp_path, trainer(tmp_path, callbacks=[Heard()], args=args), CallingTrainerTask)
    state = task._trainer.state
    for step, value in ((-1, 0.9), (1, 0.5), (3, 0.75), (5, 0.75), (7, float("nan"))):
        task.on_evaluate(step, {"eval_loss": 1.0, "eval_accuracy": value})
        task.on_checkpoint(step, f"there {step}")
    assert (state.best_metric, state.best_global_step, state.best_model_checkpoint) == (0.75, 4, "there 3")


class Ends(TrainerCallback):
    def on_train_end(self, *_: Any, **__: Any) -> None: ...


class OwnStep(Trainer):
    def training_step(self, *_: Any, **__: Any) -> Any: ...


class OwnSampler(Trainer):
    def _get_train_sampler(self, *_: Any, **__: Any) -> Any: ...


class OwnLog(Trainer):
    def log(self, *_: Any, **__: Any) -> Any: ...


def noisy(features: Any) -> Any:
    return {**padded(features), "noise": torch.rand(len(features))}


class Stops(EarlyStoppingCallback):
    """Not the one that a run knows: its own events are looked at."""

    def on_train_begin(self, *_: Any, **__: Any) -> None: ...


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cls": OwnStep}, "OwnStep overrides training_step, which a run does not call"),
        ({"cls": OwnSampler}, "OwnSampler overrides _get_train_sampler, which a run does not call"),
        ({"cls": OwnLog}, "OwnLog overrides log, which a run does not call"),
        ({"callbacks": [Stops(3)]}, "the callback Stops defines on_train_begin"),
        ({"run": {"workers": 3}}, "data and workers are groups"),
        ({"callbacks": [Ends()]}, "the callback Ends defines on_train_end, which a run does not call"),
        ({"callbacks": [EarlyStoppingCallback(3, 0.1)]}, "early_stopping_threshold"),
        ({"compute_loss_func": (one for one in ())}, "the trainer, which holds what its constructor"),
    ],
)
def test_what_a_run_cannot_do_is_refused_before_anything_starts(tmp_path: Path, given: Any, said: str) -> None:
    with pytest.raises(InputError) as found:
        trainer(tmp_path, **given).train()
    assert said in str(found.value)


def test_optimizers_of_this_process_are_refused(tmp_path: Path) -> None:
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="workers have models of their own"):
        trainer(tmp_path, model=model, optimizers=(optimizer, None)).train()
    with pytest.raises(InputError, match="there is no train_dataset"):
        Trainer(model, arguments(tmp_path)).train()
    with pytest.raises(InputError, match=r"train\(trial\) is not offered"):
        trainer(tmp_path).train(trial=1)


def test_collators_that_draw_random_numbers_are_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.data_collator = noisy
    with pytest.raises(InputError, match="draws random numbers"):
        made.train()


def test_a_resumed_run_has_the_trainer_that_began_it(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    job, parcel = made._job(made)
    run = tmp_path / "out" / "run"
    run.mkdir()
    (run / "job.yaml").write_text(job.to_yaml())
    assert made._job(made, True)[1] == parcel
    changed = trainer(tmp_path, args=arguments(tmp_path, learning_rate=1.0))
    with pytest.raises(InputError, match=r"the run was begun with learning_rate=5e-05, and this is 1\.0"):
        changed._job(changed, True)
    assert changed._job(changed)[1].name == "2"


def test_the_state_and_the_log_of_a_trainer_are_not_known_in_a_step(tmp_path: Path) -> None:
    class Anneals(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return model(**inputs).loss * self.state.global_step

    class Logs(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            self.log({"x": 1.0})

    for number, (cls, said) in enumerate(((Anneals, r"state\.global_step is not known"), (Logs, "is not"))):
        task = task_of(tmp_path / str(number), trainer(tmp_path, cls=cls))
        model = build_model(task, 0, CPU).module
        with pytest.raises(TaskError, match=said):
            task.loss(model, task.collate(TABLE))


def test_a_model_begins_with_the_special_tokens_of_its_tokenizer(tmp_path: Path) -> None:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"[UNK]": 0, "[PAD]": 1}, unk_token="[UNK]")), pad_token="[PAD]"
    )
    model = llama()
    assert model.config.pad_token_id is None
    made = trainer(tmp_path, model=model, processing_class=tokenizer, args=arguments(tmp_path, max_steps=1))
    _, parcel = made._job(made)
    task = build_task(TrainerTask, {"folder": str(parcel)}, RunFacts(total_steps=1, batch_size=8))
    there: Any = task.model()
    assert there.config.pad_token_id == 1
    assert (parcel / "tokenizer.json").is_file()


def test_a_model_that_is_built_from_a_folder_in_each_worker(tmp_path: Path) -> None:
    folder = saved(tmp_path / "bert", classifier())

    def read() -> Any:
        return transformers.BertForSequenceClassification.from_pretrained(folder)

    task = task_of(tmp_path, trainer(tmp_path, model_init=read))
    batch = task.collate(TABLE)
    model = build_model(task, 0, CPU).module
    assert task_loss(task, model, batch, 12).loss.item() > 0
    assert len(task.optimizer(model.named_parameters()).param_groups) == 2


def test_settings_of_the_run_come_before_those_of_the_arguments(tmp_path: Path) -> None:
    run = {"workers": {"min": 1, "max": 3}, "reduction": "exact", "data": {"shards": 6}, "steps": 4}
    made = trainer(tmp_path, run=run, eval_dataset=TOKENS, args=arguments(tmp_path, eval_strategy="epoch"))
    job, parcel = made._job(made)
    assert (job.workers.max, job.reduction, job.steps, job.epochs) == (3, "exact", 4, None)
    assert (job.data.batch_size, job.data.shards) == (24, 6)
    assert job.evaluate is not None
    assert job.evaluate.every_steps == 1
    assert (job.storage, job.name, parcel) == (str(tmp_path / "out"), "run", tmp_path / "out" / "run.trainer" / "1")
    assert made._job(made)[1].name == "2"
    stopped = trainer(
        tmp_path,
        callbacks=[EarlyStoppingCallback(2)],
        eval_dataset=TOKENS,
        args=arguments(
            tmp_path,
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
        ),
    )
    job, _ = stopped._job(stopped)
    assert job.early_stop is not None
    assert (job.early_stop.metric, job.early_stop.mode, job.early_stop.patience) == ("eval_accuracy", "max", 2)


def test_a_sequence_model_generates_what_is_compared(tmp_path: Path) -> None:
    args = transformers.Seq2SeqTrainingArguments(
        output_dir=str(tmp_path / "out"),
        report_to=[],
        use_cpu=True,
        predict_with_generate=True,
        generation_max_length=5,
    )
    rows = [{"input_ids": [4, 5, 6], "labels": [7, 8]}, {"input_ids": [6, 7, 9], "labels": [8, 9]}]

    def exact(given: Any) -> dict[str, float]:
        # Trainer pads what is generated to 20.
        return {"left": float((given.predictions[:, 5:] != 0).sum()), "rows": len(given.label_ids)}

    made = Seq2SeqTrainer(t5(), args, train_dataset=rows, compute_metrics=exact)
    task = task_of(tmp_path, made)
    model = build_model(task, 0, CPU).module.eval()
    batch = task.collate(pa.table({name: [one[name] for one in rows] for name in rows[0]}))
    found = task.evaluate(model, batch)
    assert float(found["weight"]) == 4
    outputs = {name: value for name, value in found["metrics"].items() if name != "eval_token_loss"}
    summary = task.summarise(outputs)
    assert (summary["eval_left"], summary["eval_rows"]) == (0, 2)
