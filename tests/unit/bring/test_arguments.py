"""Trainer's arguments are the settings of a job, or refused by name, or listed as ignored."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from raytrain_plus.bring.arguments import IGNORED, REFUSED, ignored, settings_of_arguments
from raytrain_plus.errors import InputError


def arguments(tmp_path: Path, **given: Any) -> Any:
    return TrainingArguments(output_dir=str(tmp_path), **given)


def settings(tmp_path: Path, *, workers: int = 2, rows: int | None = 100, evaluates: bool = False, **given: Any) -> Any:
    return settings_of_arguments(arguments(tmp_path, **given), workers, rows, evaluates)


def test_the_defaults_are_those_of_trainer(tmp_path: Path) -> None:
    found = settings(tmp_path)
    assert found == {
        "data": {"batch_size": 16, "shards": 2, "shuffle": "rows"},
        "seed": 42,
        "precision": "fp32",
        "compile": False,
        "trackers": [],
        "epochs": 3,
        "clip_norm": 1.0,
        "checkpoint": {"every_steps": 500, "keep": 3},
    }


def test_the_batch_is_made_of_the_declared_workers_and_each_shard_is_a_microbatch(tmp_path: Path) -> None:
    found = settings(tmp_path, workers=3, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    assert found["data"] == {"batch_size": 24, "shards": 6, "shuffle": "rows"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_steps": 7}, {"steps": 7}),
        ({"num_train_epochs": 2}, {"epochs": 2}),
        # 100 rows are 7 steps of 16.
        ({"num_train_epochs": 1.5}, {"steps": 11}),
        ({"max_grad_norm": 0.0}, {"clip_norm": None}),
        ({"train_sampling_strategy": "sequential"}, {"data": {"batch_size": 16, "shards": 2, "shuffle": "none"}}),
        ({"bf16": True, "use_cpu": True}, {"precision": "bf16"}),
        ({"seed": 5}, {"seed": 5}),
        ({"torch_compile": True}, {"compile": True}),
        ({"report_to": ["wandb", "tensorboard"]}, {"trackers": ["wandb"]}),
        ({"save_strategy": "no"}, {"checkpoint": {"every_steps": None, "keep": 3}}),
        ({"save_strategy": "epoch", "save_total_limit": 2}, {"checkpoint": {"every_steps": 7, "keep": 2}}),
        # 3 epochs are 21 steps.
        ({"save_steps": 0.25}, {"checkpoint": {"every_steps": 6, "keep": 3}}),
        ({"eval_strategy": "epoch"}, {"evaluate": {"every_steps": 7}}),
        ({"eval_strategy": "steps", "eval_steps": 4}, {"evaluate": {"every_steps": 4}}),
        ({"eval_strategy": "steps"}, {"evaluate": {"every_steps": 500}}),
        ({"eval_strategy": "no"}, {"evaluate": None}),
        (
            {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True},
            {"checkpoint": {"every_steps": 7, "keep": 3, "keep_best": {"metric": "eval_loss", "mode": "min"}}},
        ),
        (
            {"eval_strategy": "epoch", "save_strategy": "best", "metric_for_best_model": "accuracy"},
            {"checkpoint": {"every_steps": None, "keep": 3, "keep_best": {"metric": "eval_accuracy", "mode": "max"}}},
        ),
    ],
)
def test_arguments_become_settings(tmp_path: Path, given: Any, expected: Any) -> None:
    found = settings(tmp_path, evaluates=True, **given)
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True is not offered"),
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices=False is not offered"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last=True is not offered"),
        ({"optim": "galore_adamw", "optim_target_modules": ["x"]}, "optim_target_modules=['x'] is not offered"),
        ({"optim": "adamw_bnb_8bit"}, "optim='adamw_bnb_8bit' is not offered"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"}, "needs a metric in every step"),
        ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy='batch_rebalance' is not offered"),
        ({"include_for_metrics": ["inputs", "logits"]}, "include_for_metrics=['logits'] is not offered"),
        ({"report_to": ["comet_ml"]}, "report_to='comet_ml' is not offered"),
        ({"torch_compile_backend": "eager", "torch_compile": True}, "torch_compile_backend='eager' is not offered"),
        ({"save_strategy": "best"}, "the best model is known by its evaluations, and there are none"),
    ],
)
def test_what_a_run_does_not_have_is_refused_by_name_with_a_remedy(tmp_path: Path, given: Any, said: str) -> None:
    with pytest.raises(InputError) as found:
        settings(tmp_path, **given)
    assert said in str(found.value)
    assert found.value.remedy or found.value.expected


def test_rows_are_grouped_by_the_length_of_the_models_main_input(tmp_path: Path) -> None:
    assert "group_by_length" not in settings(tmp_path)["data"]
    found = settings(tmp_path, train_sampling_strategy="group_by_length")["data"]
    assert (found["group_by_length"], found["shuffle"]) == ("input_ids", "rows")


def test_a_dataset_without_a_length_needs_a_number_of_steps(tmp_path: Path) -> None:
    assert settings(tmp_path, rows=None, max_steps=9)["steps"] == 9
    for given in ({"num_train_epochs": 0.5}, {"save_strategy": "epoch"}):
        with pytest.raises(InputError, match="a dataset without a length"):
            settings(tmp_path, rows=None, **given)


def test_every_name_is_one_of_trainers_and_its_default_is_trainers(tmp_path: Path) -> None:
    plain = arguments(tmp_path)
    assert ignored(plain) == []
    for name in (*REFUSED, *IGNORED):
        assert hasattr(plain, name), name
    assert not REFUSED.keys() & IGNORED.keys()


USED = """
include_for_metrics
activation_checkpointing adam_beta1 adam_beta2 adam_epsilon bf16 eval_steps eval_strategy fp16
gradient_accumulation_steps
gradient_checkpointing gradient_checkpointing_kwargs greater_is_better label_names label_smoothing_factor learning_rate
load_best_model_at_end logging_steps lr_scheduler_kwargs lr_scheduler_type max_grad_norm max_steps
metric_for_best_model neftune_noise_alpha num_train_epochs optim optim_args output_dir per_device_train_batch_size
prediction_loss_only remove_unused_columns report_to run_name save_steps save_strategy save_total_limit seed tf32
torch_compile train_sampling_strategy use_cache use_cpu warmup_steps weight_decay
"""
"""Arguments that are settings of the job, or that the trainer's own methods read."""
NOTHING = """
disable_tqdm do_eval do_predict do_train hub_always_push hub_private_repo hub_revision hub_strategy hub_token
liger_kernel_config local_rank project resume_from_checkpoint trackio_bucket_id trackio_space_id
trackio_static_space_id
"""
"""Arguments that are for a script, for what is refused, or for a terminal."""


def test_every_argument_is_used_refused_or_ignored_by_name(tmp_path: Path) -> None:
    known = {*USED.split(), *NOTHING.split(), *REFUSED, *IGNORED}
    named = {field.name for field in fields(TrainingArguments)}
    assert named - known == set()


def test_what_is_ignored_is_listed(tmp_path: Path) -> None:
    given = arguments(tmp_path, dataloader_num_workers=4, per_device_eval_batch_size=2, data_seed=3)
    assert ignored(given) == ["data_seed", "dataloader_num_workers", "per_device_eval_batch_size"]
