"""`Trainer` of Transformers, whose `train` is a run that goes on while machines come and go.

from raytrain_plus.bring.transformers import Trainer     # in place of `from transformers import Trainer`

trainer = Trainer(model, args, train_dataset=..., run={"workers": {"min": 1, "max": 4}})
trainer.train()
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import yaml
from transformers.trainer_callback import (
    DefaultFlowCallback,
    EarlyStoppingCallback,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)
from transformers.trainer_utils import TrainOutput
from transformers.utils import is_datasets_available

from raytrain_plus.bring.arguments import best_metric, best_mode, improve, in_steps, settings_of_arguments
from raytrain_plus.bring.held_out_sets import NumberedSets
from raytrain_plus.bring.item_kinds import kinds_of
from raytrain_plus.bring.parcel import HELD_OUT, TRAIN, check_same, module_of, new_parcel, read_parcel_model
from raytrain_plus.bring.script import with_overrides
from raytrain_plus.bring.settings_merged import merged
from raytrain_plus.bring.trainer_parcel import write_parcel
from raytrain_plus.bring.trainer_task import Unknown, masks_at_random, prepared
from raytrain_plus.checks.promises import promises_of
from raytrain_plus.errors import InputError, RunError
from raytrain_plus.job.settings import Job
from raytrain_plus.job.yaml import read_job
from raytrain_plus.launch.runner import run as run_job
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.parallel.sizing import size_table
from raytrain_plus.result import Result
from raytrain_plus.runs.export import load
from raytrain_plus.runs.folder import job_of
from raytrain_plus.runs.history import load_history
from raytrain_plus.state.stored.manifest import FOLDER as CHECKPOINTS
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.storage.interface import Folder
from raytrain_plus.training.weights.model_part import inexact_parameter

TASK = "raytrain_plus.bring.trainer_task:TrainerTask"
CALLING = "raytrain_plus.bring.trainer_task:CallingTrainerTask"
CALLED = {
    "_get_num_items_in_batch",
    "_prepare_inputs",
    "_save",
    "compute_loss",
    "create_model_card",
    "create_optimizer",
    "create_scheduler",
    "evaluate",
    "get_decay_parameter_names",
    "get_eval_dataloader",
    "get_test_dataloader",
    "log_metrics",
    "predict",
    "prediction_step",
    "push_to_hub",
    "save_metrics",
    "save_model",
    "save_state",
}
"""Methods of Trainer that a run calls, or a script itself after it; what overrides others would do nothing."""
UNHEARD = (
    "on_epoch_begin",
    "on_epoch_end",
    "on_init_end",
    "on_optimizer_step",
    "on_pre_optimizer_step",
    "on_predict",
    "on_prediction_step",
    "on_step_begin",
    "on_substep_end",
    "on_train_begin",
    "on_train_end",
)
"""Events of which callbacks in a run do not hear."""
_LOGGED = ("step_committed", "evaluated")
_BUILT_IN = (DefaultFlowCallback, EarlyStoppingCallback, PrinterCallback, ProgressCallback)
_LEFT = (
    "_eval_dataloaders",
    "_memory_tracker",
    "_run_settings",
    "accelerator",
    "callback_handler",
    "control",
    "eval_dataset",
    "gather_function",
    "lr_scheduler",
    "model",
    "model_wrapped",
    "optimizer",
    "train_dataset",
)
"""What a trainer does not take along to the workers."""


class TrainsAsRun:
    """What replaces `train`, mixed into a trainer of Transformers."""

    def __init__(self, *args: Any, run: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Take the arguments of the trainer, and `run`: settings of a job, such as {"workers": {"min": 1, "max": 4}}.

        They come before those that follow from `TrainingArguments`. `Job` has the list.
        """
        super().__init__(*args, **kwargs)
        self._run_settings = dict(run or {})
        self.saves_frozen_weights = False
        """Whether a run saves frozen weights, which its workers read from the model's file."""
        self.item_kinds: dict[str, str] = {}
        """What the fields of the items are that are no values of Python's own: see `kind_of`."""
        self.columns_removed = False
        """Whether the dataset has only the columns that the model takes."""
        self.held_out_names: list[str] = []
        """The names of the held-out datasets, if there are several."""

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train in a run, and return what Trainer returns; the model has the weights of its end, or the best ones.

        `resume_from_checkpoint`: anything true continues the run in `output_dir` from its newest checkpoint; else an
        earlier run there is moved aside. Raises `InputError`, before any worker starts, for what a run cannot do, and
        `RunError` if it fails.
        """
        if args or any(value is not None for value in kwargs.values()):
            given = ", ".join(kwargs) or "more than one argument"
            raise InputError(f"train({given}) is not offered", where="Trainer.train", expected="resume_from_checkpoint")
        trainer: Any = self
        job, parcel = self._job(trainer, bool(resume_from_checkpoint))
        inexact = "" if trainer.model is None else inexact_parameter(list(trainer.model.named_parameters()))
        for line in promises_of(job, size_table(job), inexact):
            print(f"promised: {line}", flush=True)
        result = run_job(job, fresh=not resume_from_checkpoint, roots=[parcel])
        if result.status == "failed":
            raise RunError(result.error or "the run failed")
        found = _output(trainer, result)
        _take_back(trainer, result, parcel)
        return found

    def _job(self, trainer: Any, resumes: bool = False) -> tuple[Job, Path]:
        """Return the job of the run, and the folder beside it that the workers read."""
        _check(trainer)
        if trainer.train_dataset is None:
            raise InputError("there is no train_dataset", where="Trainer", remedy="Trainer(..., train_dataset=...)")
        train, held_out = (_used(trainer, one) for one in (trainer.train_dataset, trainer.eval_dataset))
        given = with_overrides(self._run_settings)
        data, workers = given.get("data") or {}, given.get("workers") or {}
        if not isinstance(data, Mapping) or not isinstance(workers, Mapping):
            raise InputError("data and workers are groups", where="Trainer(run=...)", expected="workers: {max: 4}")
        settings = settings_of_arguments(
            trainer.args,
            int(workers.get("max") or workers.get("min") or 1),
            _length(train),
            held_out is not None,
            data.get("batch_size"),
            getattr(trainer.model, "main_input_name", "input_ids"),
        )
        if "evaluate" in settings and _overrides(trainer, "evaluate"):
            raise InputError(
                f"{type(trainer).__name__} overrides evaluate, which a run does not call",
                where="Trainer",
                remedy="eval_strategy='no', and call evaluate after train",
            )
        if trainer.args.device.type == "cuda":
            settings["workers"] = {"gpus": 1}
        storage, name = Path(trainer.args.output_dir).absolute(), trainer.args.run_name or "run"
        parcel = _resumed(storage / name) if resumes else None
        if parcel is not None:
            check_same(parcel, trainer.args.to_dict(), "TrainingArguments", "train()")
        else:
            parcel = new_parcel(storage / f"{name}.trainer")
            _write(parcel, trainer, train, held_out if "evaluate" in settings else None)
        settings["data"]["dataset"] = f"{module_of(parcel)}:{TRAIN}"
        if "evaluate" in settings:
            settings["evaluate"]["dataset"] = f"{module_of(parcel)}:{HELD_OUT}"
        if (stops := _early_stop(trainer)) is not None:
            settings["early_stop"] = stops
            # It keeps the best state as well.
            settings["checkpoint"].pop("keep_best", None)
        settings |= {
            "task": CALLING if _callbacks(trainer) else TASK,
            "args": {"folder": str(parcel)},
            "storage": str(storage),
        }
        text = yaml.safe_dump(merged(settings, given))
        return read_job(text, "Trainer(run=...)", name), parcel

    def __getstate__(self) -> dict[str, Any]:
        """Return what the workers need: everything that the constructor and the class keep, without model and data."""
        trainer: Any = self
        # Of the model, which does not come along: rows are read before workers build it.
        trainer._set_signature_columns_if_needed()
        state = {name: value for name, value in vars(self).items() if name not in _LEFT}
        return {**state, "callbacks_called": _callbacks(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take it, and find the devices of this machine."""
        vars(self).update(state | dict.fromkeys(_LEFT))
        # A cached property: the device of the machine where the trainer was made.
        vars(state["args"]).pop("_setup_devices", None)
        trainer: Any = self
        trainer.callback_handler = Unknown(
            "self.log is not offered where the loss of a batch is computed",
            "return more metrics from a Task of your own; the loss, rate and gradient norm are logged",
        )
        # Before the accelerator is made: looking for the device sets its state back.
        _ = trainer.args.device
        trainer.create_accelerator_and_postprocess()


class Trainer(TrainsAsRun, transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer`, whose `train` is a run."""


class Seq2SeqTrainer(TrainsAsRun, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """`transformers.Seq2SeqTrainer`, whose `train` is a run."""

    def __getstate__(self) -> dict[str, Any]:
        """See `TrainsAsRun`; also what `evaluate` passes to `generate`."""
        args = self.args
        given = {"max_length": args.generation_max_length, "num_beams": args.generation_num_beams}
        return {
            **super().__getstate__(),
            "_gen_kwargs": {name: value for name, value in given.items() if value is not None},
        }


def _overrides(trainer: Any, name: str) -> bool:
    """Return whether the class of a trainer has a method of Trainer's of its own."""
    kinds = type(trainer).__mro__
    # The library's class, to which `TrainsAsRun` is mixed in.
    plain = kinds[kinds.index(TrainsAsRun) + 1]
    own = getattr(type(trainer), name)
    return own is not getattr(plain, name) and own is not getattr(TrainsAsRun, name, None)


def _check(trainer: Any) -> None:
    """Raise `InputError` for what a run would not call, or cannot have."""
    for name, _ in inspect.getmembers(transformers.Trainer, inspect.isroutine):
        if name not in CALLED and not name.startswith("__") and _overrides(trainer, name):
            raise InputError(
                f"{type(trainer).__name__} overrides {name}, which a run does not call",
                where="Trainer",
                remedy="override compute_loss, prediction_step, create_optimizer or create_scheduler, or write a Task",
            )
    if trainer.optimizer is not None or trainer.lr_scheduler is not None:
        raise InputError(
            "optimizers=(optimizer, scheduler) are of the model in this process, and workers have models of their own",
            where="Trainer",
            remedy="give optimizer_cls_and_kwargs, or override create_optimizer and create_scheduler",
        )
    for callback in _callbacks(trainer):
        for name in UNHEARD:
            if getattr(type(callback), name) is not getattr(TrainerCallback, name):
                raise InputError(
                    f"the callback {type(callback).__name__} defines {name}, which a run does not call",
                    where="Trainer(callbacks=...)",
                    expected="on_step_end, on_log, on_evaluate, on_save",
                )


def _callbacks(trainer: Any) -> list[Any]:
    """Return the user's own callbacks; what those of Transformers do, a run does itself."""
    return [
        one
        for one in trainer.callback_handler.callbacks
        if type(one) not in _BUILT_IN and not type(one).__module__.startswith("transformers.integrations")
    ]


def _used(trainer: Any, dataset: Any) -> Any:
    """Return a dataset, or each of a dict; one of Hugging Face has only the columns that the model takes."""
    if isinstance(dataset, Mapping):
        return {name: _used(trainer, one) for name, one in dataset.items()}
    return trainer._remove_unused_columns(dataset) if _of_datasets(dataset) else dataset


def _of_datasets(dataset: Any) -> bool:
    return is_datasets_available() and isinstance(dataset, import_module("datasets").Dataset)


def _resumed(run: Path) -> Path | None:
    """Return the folder that the workers of an earlier run have read; None if there is no such run."""
    try:
        return Path(job_of(open_folder(str(run))).args["folder"])
    except (InputError, OSError, KeyError):
        return None


def _write(parcel: Path, trainer: Any, train: Any, held_out: Any) -> None:
    """Write what the workers read."""
    trainer.columns_removed = _of_datasets(train)
    first = train[0] if _length(train) and hasattr(train, "__getitem__") else None
    trainer.item_kinds = kinds_of(first)
    if first is not None:
        _check_collator(trainer, [train[number] for number in range(min(2, len(train)))])
    model = None
    if trainer.model_init is None:
        # The workers have the devices.
        model = prepared(trainer, trainer.model.cpu())
    if isinstance(held_out, Mapping):
        trainer.held_out_names = list(held_out)
        # The columns of both are the same.
        train, held_out = NumberedSets([train]), NumberedSets(list(held_out.values()))
    write_parcel(parcel, trainer, model, train, held_out)


def _check_collator(trainer: Any, items: Sequence[Any]) -> None:
    """Raise `InputError` for a collator that draws random numbers: rows that are read again must be the same."""
    if masks_at_random(trainer.data_collator):
        return
    collator = trainer.data_collator
    if not trainer.columns_removed:
        collator = trainer._get_collator_with_removed_columns(collator)
    before = _generators()
    collator([dict(one) if isinstance(one, Mapping) else one for one in items])
    if before != _generators():
        raise InputError(
            f"the data collator {type(collator).__name__} draws random numbers: rows that are read again would differ",
            where="Trainer(data_collator=...)",
            remedy="draw them in the model's forward pass, or in data.transform, which has a generator for them",
        )


def _generators() -> tuple[Any, ...]:
    """Return the states of the generators that all of this process draw from."""
    drawn: Any = np.random.get_state()
    return torch.get_rng_state().tolist(), drawn[1].tolist(), drawn[2], random.getstate()


def _early_stop(trainer: Any) -> dict[str, Any] | None:
    found = [one for one in trainer.callback_handler.callbacks if isinstance(one, EarlyStoppingCallback)]
    if not found:
        return None
    if found[0].early_stopping_threshold:
        raise InputError(
            "EarlyStoppingCallback(early_stopping_threshold=...) is not offered",
            where="Trainer(callbacks=...)",
            remedy="early_stopping_patience alone",
        )
    args = trainer.args
    return {"metric": best_metric(args), "mode": best_mode(args), "patience": found[0].early_stopping_patience}


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None


def _take_back(trainer: Any, result: Result, parcel: Path) -> None:
    """Give the trainer's model the weights of the run, whose workers have read this `parcel`."""
    if trainer.model_init is not None:
        trainer.model = trainer.model_wrapped = trainer.call_model_init()
    elif frozen := [pair for pair in trainer.model.named_parameters() if not pair[1].requires_grad]:
        # Of a run that is resumed they may be others than this process has drawn.
        begun = dict(read_parcel_model(parcel, torch.device("cpu")).named_parameters())
        with torch.no_grad():
            for name, value in frozen:
                value.copy_(begun[name])
    known = result.status == "finished" or trainer.state.best_model_checkpoint is not None
    best = trainer.args.load_best_model_at_end and known
    load(result.path, trainer.model, best=best)
    if trainer.place_model_on_device:
        trainer._move_model_to_device(trainer.model, trainer.args.device)


def _checkpoint(run: Folder, step: int) -> str | None:
    """Return the path of the run's complete checkpoint after this step; None if there is none."""
    saved = [found for found in load_history(run).found if found.manifest is not None and found.step == step]
    newest = max(saved, key=lambda found: found.generation, default=None)
    return None if newest is None else run.inside(CHECKPOINTS).inside(newest.name).address


def _output(trainer: Any, result: Result) -> TrainOutput:
    """Write down what the run reported as Trainer does, and return its last words."""
    log, losses = list[dict[str, Any]](), list[float]()
    state, every = trainer.state, in_steps(trainer.args.logging_steps, result.steps)
    since, rows, used, epoch = list[float](), _length(trainer.train_dataset), 0, 0.0
    folder = open_folder(result.path)
    # Of a step that was made again, the last one counts.
    newest = {(event["kind"], event["step"]): event for event in read_events(folder) if event["kind"] in _LOGGED}
    state.best_metric = state.best_global_step = state.best_model_checkpoint = None
    for event in sorted(newest.values(), key=lambda one: (one["step"], one["kind"] == "evaluated")):
        if event["step"] >= result.steps:
            break
        if event["kind"] == "step_committed":
            losses.append(float(event["loss"]))
            since.append(losses[-1])
            used += event["samples"]
            epoch = used / rows if rows else float(event["epoch"])
            if (event["step"] + 1) % every == 0:
                rate = event.get("lr")
                entry: dict[str, Any] = {"loss": sum(since) / len(since), "grad_norm": float(event["grad_norm"])}
                entry |= {"learning_rate": rate[0] if isinstance(rate, list) else rate}
                log.append({**entry, "epoch": epoch, "step": event["step"] + 1})
                since.clear()
        elif event["step"] >= 0:
            metrics = {name: float(value) for name, value in event["metrics"].items()}
            log.append({**metrics, "epoch": epoch, "step": event["step"] + 1})
            improve(state, trainer.args, event["step"], metrics)
    if state.best_global_step is not None:
        state.best_model_checkpoint = _checkpoint(folder, state.best_global_step - 1)
    state.global_step, state.max_steps, state.epoch = result.steps, result.steps, epoch
    state.log_history = log
    loss = sum(losses) / len(losses) if losses else 0.0
    totals = {
        "train_runtime": result.seconds,
        "train_samples_per_second": result.samples / result.seconds if result.seconds else 0.0,
        "train_steps_per_second": result.steps / result.seconds if result.seconds else 0.0,
        "train_loss": loss,
        "epoch": epoch,
    }
    log.append({**totals, "step": result.steps})
    return TrainOutput(result.steps, loss, totals)
