"""What the arguments of `transformers.Trainer` are as settings of a job. Pure.

`TrainingArguments` are read by name; what a run does not have is refused, with a remedy, or listed as ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from raytrain_plus.errors import InputError

WHERE = "TrainingArguments"
REFUSED: Mapping[str, tuple[Any, str]] = {
    "auto_find_batch_size": (False, "set per_device_train_batch_size; memory that runs out is reported with a remedy"),
    "average_tokens_across_devices": (True, "leave it out: the result would depend on the number of workers"),
    "batch_eval_metrics": (False, "leave it out: compute_metrics gets the values of all rows at once"),
    "bf16_full_eval": (False, "leave it out: evaluations compute in the precision of training"),
    "debug": ("", "leave it out"),
    "deepspeed": (None, "run={'parallel': {'sharded': 'full'}}"),
    "dataloader_drop_last": (False, "leave it out: every row is used once an epoch"),
    "eval_delay": (0, "leave it out: the first evaluation is that of the untrained state"),
    "eval_do_concat_batches": (True, "leave it out: compute_metrics gets the values of all rows at once"),
    "eval_use_gather_object": (False, "return tensors from the model"),
    "fp16_full_eval": (False, "leave it out: evaluations compute in the precision of training"),
    "fsdp": (None, "run={'parallel': {'sharded': 'full'}}"),
    "fsdp_config": (None, "run={'parallel': {'sharded': 'full'}}"),
    "optim_target_modules": (None, "use an optimizer of whole weights, such as adamw_torch"),
    "parallelism_config": (None, "run={'parallel': {'tensor': 2}}"),
    "push_to_hub": (False, "export the run with --format transformers, and push that folder"),
    "torch_compile_backend": (None, "leave it out: torch_compile=True compiles with inductor"),
    "torch_compile_mode": (None, "leave it out: torch_compile=True compiles with inductor"),
    "use_liger_kernel": (False, "apply Liger's patch to the model before it is given to Trainer"),
}
"""Arguments that are refused unless they have this value: name -> the value, and the remedy."""
IGNORED: Mapping[str, Any] = {
    "accelerator_config": None,
    "activation_checkpointing_kwargs": None,
    "data_seed": None,
    "dataloader_num_workers": 0,
    "dataloader_in_order": True,
    "dataloader_multiprocessing_context": None,
    "dataloader_persistent_workers": False,
    "dataloader_pin_memory": True,
    "dataloader_prefetch_factor": None,
    "ddp_backend": None,
    "ddp_broadcast_buffers": None,
    "ddp_bucket_cap_mb": None,
    "ddp_find_unused_parameters": None,
    "ddp_static_graph": None,
    "ddp_timeout": 1800,
    "enable_jit_checkpoint": False,
    "eval_accumulation_steps": None,
    "eval_on_start": False,
    "full_determinism": False,
    "hub_model_id": None,
    "ignore_data_skip": False,
    "include_num_input_tokens_seen": "no",
    "length_column_name": "length",
    "log_level": "passive",
    "log_level_replica": "warning",
    "log_on_each_node": True,
    "logging_first_step": False,
    "logging_nan_inf_filter": True,
    "logging_strategy": "steps",
    "per_device_eval_batch_size": 8,
    "restore_callback_states_from_checkpoint": False,
    "save_on_each_node": False,
    "save_only_model": False,
    "skip_memory_metrics": True,
    "torch_empty_cache_steps": None,
}
"""Arguments that a run has no use for: name -> the default, of which nothing is said."""
WHOLE_WEIGHTS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adafactor")
"""Optimizers that a run can step, save and divide."""
GROUPED = "group_by_length"
TRACKERS = ("mlflow", "wandb")
BUILT_IN = ("none", "tensorboard")


def check_arguments(args: Any) -> None:
    """Raise `InputError` for an argument that a run does not have."""
    for name, (plain, remedy) in REFUSED.items():
        given = getattr(args, name, plain)
        if given != plain and not (plain in (None, [], "") and not given) and not _is_plain(name, given):
            raise InputError(f"{name}={given!r} is not offered", where=WHERE, remedy=remedy)
    optimizer = _text(args.optim)
    if optimizer not in WHOLE_WEIGHTS:
        raise InputError(
            f"optim={optimizer!r} is not offered",
            where=WHERE,
            expected=f"one of {', '.join(WHOLE_WEIGHTS)}",
            remedy="override create_optimizer to use another optimizer of torch",
        )
    if _text(args.lr_scheduler_type) in ("reduce_lr_on_plateau", "greedy"):
        raise InputError(
            f"lr_scheduler_type={_text(args.lr_scheduler_type)!r} needs a metric in every step",
            where=WHERE,
            remedy="use a schedule as long as the run, such as cosine",
        )
    included = [name for name in args.include_for_metrics or () if name not in ("inputs", "loss")]
    if included:
        raise InputError(
            f"include_for_metrics={included!r} is not offered", where=WHERE, expected="some of 'inputs' and 'loss'"
        )
    sampling = _text(getattr(args, "train_sampling_strategy", "random"))
    if sampling not in ("random", "sequential", GROUPED):
        raise InputError(
            f"train_sampling_strategy={sampling!r} is not offered",
            where=WHERE,
            expected=f"random, sequential or {GROUPED}",
        )
    for tracker in _trackers(args):
        if tracker not in (*TRACKERS, *BUILT_IN):
            raise InputError(
                f"report_to={tracker!r} is not offered",
                where=WHERE,
                expected=f"one of {', '.join(TRACKERS)}; TensorBoard's files are always written",
            )


def ignored(args: Any) -> list[str]:
    """Return the arguments that have values, and that a run ignores."""
    return [
        name
        for name, plain in IGNORED.items()
        if _text(getattr(args, name, plain)) not in (_text(plain), "None") and not _is_plain(name, getattr(args, name))
    ]


def settings_of_arguments(
    args: Any, workers: int, rows: int | None, evaluates: bool, batch_size: int | None = None, main: str = "input_ids"
) -> dict[str, Any]:
    """Return the settings of a job, as in a job file, without its task and its data.

    `workers`: the declared number, of which the batch is made: it stays the same while workers come and go. `rows`:
    those of the training set, if they are known. `evaluates`: whether there are held-out rows. `batch_size`: that of
    the run, if it is given. `main`: the model's main input, whose length is that of a row. Raises `InputError` for
    values that a run does not have.
    """
    check_arguments(args)
    batch = batch_size or args.per_device_train_batch_size * args.gradient_accumulation_steps * workers
    epoch = None if rows is None else math.ceil(rows / batch)
    found: dict[str, Any] = {
        "data": {
            "batch_size": batch,
            "shards": args.gradient_accumulation_steps * workers,
            "shuffle": "none" if _text(getattr(args, "train_sampling_strategy", "random")) == "sequential" else "rows",
        },
        "seed": args.seed,
        "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "tf32" if args.tf32 else "fp32",
        "compile": bool(args.torch_compile),
        "trackers": [one for one in _trackers(args) if one in TRACKERS],
        **_length(args, epoch),
    }
    if _text(getattr(args, "train_sampling_strategy", "random")) == GROUPED:
        found["data"]["group_by_length"] = main
    total = found.get("steps") or (epoch or 1) * found["epochs"]
    if args.max_grad_norm:
        found["clip_norm"] = args.max_grad_norm
    every = _every("eval", _text(args.eval_strategy), args.eval_steps or args.logging_steps, epoch, total)
    if evaluates and every is not None:
        found["evaluate"] = {"every_steps": every}
    saves = _text(args.save_strategy)
    found["checkpoint"] = {
        "every_steps": None if saves == "best" else _every("save", saves, args.save_steps, epoch, total),
        "keep": args.save_total_limit or 3,
    }
    if args.load_best_model_at_end or saves == "best":
        if "evaluate" not in found:
            raise InputError(
                "the best model is known by its evaluations, and there are none",
                where=WHERE,
                remedy="give eval_dataset, and set eval_strategy to 'steps' or 'epoch'",
            )
        found["checkpoint"]["keep_best"] = {"metric": best_metric(args), "mode": best_mode(args)}
    return found


def best_metric(args: Any) -> str:
    """Return the name of the metric by which a model is the best."""
    name = args.metric_for_best_model or "loss"
    return name if name.startswith("eval_") else f"eval_{name}"


def best_mode(args: Any) -> str:
    """Return whether its lowest (`min`) or highest (`max`) value is the best, by Trainer's own rule."""
    greater = args.greater_is_better
    if greater is None:
        greater = not best_metric(args).endswith("loss")
    return "max" if greater else "min"


def improve(state: Any, args: Any, step: int, metrics: Mapping[str, float]) -> None:
    """Set the best metric and step of Trainer's `state` if the evaluation after `step` is the best, by its rule."""
    value = None if args.metric_for_best_model is None else metrics.get(best_metric(args))
    if value is None:
        return
    sign = 1 if best_mode(args) == "max" else -1
    if sign * value > (-math.inf if state.best_metric is None else sign * state.best_metric):
        state.best_metric = value
        if _text(args.save_strategy) != "no":
            state.best_global_step = step + 1


def _length(args: Any, epoch: int | None) -> dict[str, int]:
    if args.max_steps > 0:
        return {"steps": args.max_steps}
    epochs = args.num_train_epochs
    if float(epochs).is_integer():
        return {"epochs": int(epochs)}
    if epoch is None:
        raise InputError(
            f"num_train_epochs={epochs} of a dataset without a length", where=WHERE, remedy="set max_steps"
        )
    return {"steps": math.ceil(epochs * epoch)}


def _every(what: str, strategy: str, steps: float | None, epoch: int | None, total: int) -> int | None:
    """Return the number of steps between evaluations, or between checkpoints; None for none."""
    if strategy == "no":
        return None
    if strategy == "epoch":
        if epoch is None:
            raise InputError(
                f"{what}_strategy='epoch' for a dataset without a length",
                where=WHERE,
                remedy=f"{what}_strategy='steps'",
            )
        return epoch
    assert steps is not None, "Trainer has defaults"
    return in_steps(steps, total)


def in_steps(steps: float, total: int) -> int:
    """Return a number of steps; below 1 it is a share of the run's."""
    return max(1, math.ceil(total * steps)) if steps < 1 else int(steps)


def _trackers(args: Any) -> list[str]:
    given = args.report_to or []
    return [given] if isinstance(given, str) else list(given)


def _is_plain(name: str, given: Any) -> bool:
    """Return whether Transformers itself has set what stands for nothing."""
    if name == "fsdp_config":
        return not any(value for key, value in dict(given).items() if key not in ("min_num_params", "xla"))
    return name == "accelerator_config" or (name == "torch_compile_backend" and given == "inductor")


def _text(value: Any) -> str:
    """Return an enumeration's value as text."""
    return str(getattr(value, "value", value))
