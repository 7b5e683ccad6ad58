"""The task of a Trainer script: the trainer's own methods, called with one batch each."""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import nn

from raytrain_plus.bring.arguments import ignored, improve, in_steps
from raytrain_plus.bring.empty import without_values
from raytrain_plus.bring.held_out_sets import SET, by_set, rows_where
from raytrain_plus.bring.item_kinds import items_of
from raytrain_plus.bring.lora import frozen_names, is_adapted
from raytrain_plus.bring.parcel import read_parcel_model
from raytrain_plus.bring.trainer_parcel import read_trainer
from raytrain_plus.errors import TaskError
from raytrain_plus.layers import own_plan
from raytrain_plus.task import StopRun, Task
from raytrain_plus.torch_compat import pytree

STOPS = "should_training_stop"
"""What a callback can ask of a run."""
LOSS, TOKEN_LOSS = "eval_loss", "eval_token_loss"
_PREDICTIONS, _LABELS, _INPUTS = "predictions", "labels", "inputs"


class TrainerTask(Task):
    """Calls `compute_loss`, `create_optimizer`, `create_scheduler`, `prediction_step` and `compute_metrics`."""

    def __init__(self, folder: str) -> None:
        """Take the trainer from its parcel (`bring.trainer_parcel`)."""
        self.folder = Path(folder)
        self._trainer = read_trainer(self.folder)
        self._trainer.state = self._state()
        self._forms: dict[str, Any] = {}
        """How the values of rows are nested in what `prediction_step` returns."""

    def _state(self) -> Any:
        """Return what the trainer's methods see as `state`."""
        # A step must not depend on what was before.
        return Unknown(
            "state.{} is not known where the loss of a batch is computed",
            "write a Task, whose `run` has the number of steps, or a scheduler for what changes with the step",
        )

    def model(self) -> nn.Module:
        """See `Task`."""
        trainer = self._trainer
        if trainer.model_init is None:
            empty = torch.get_default_device().type == "meta"
            model: Any = read_parcel_model(self.folder, torch.device("meta" if empty else "cpu"))
        else:
            model = prepared(trainer, trainer.call_model_init())
        model.train()
        args = trainer.args
        if args.gradient_checkpointing or getattr(args, "activation_checkpointing", None):
            if not hasattr(model, "gradient_checkpointing_enable"):
                raise TaskError(
                    f"{type(model).__name__} has no gradient_checkpointing_enable", where="TrainingArguments"
                )
            model.gradient_checkpointing_enable({"use_reentrant": False, **(args.gradient_checkpointing_kwargs or {})})
        if args.neftune_noise_alpha is not None:
            from transformers.integrations.neftune import activate_neftune

            activate_neftune(model, args.neftune_noise_alpha)
        trained: nn.Module = model
        return trained

    def rebuilt(self) -> Sequence[str]:
        """See `Task`: the frozen weights of a model that travels as a file."""
        # Runs of older versions have saved them.
        own = self._trainer.model_init is None and getattr(self._trainer, "saves_frozen_weights", True) is False
        return frozen_names(self._empty) if own else ()

    def tensor(self) -> Mapping[str, str]:
        """See `Task`: the model's own plan; one with an adapter has none."""
        return {} if is_adapted(self._empty) else own_plan(self._empty)

    def remarks(self) -> Sequence[str]:
        """See `Task`: the arguments that are ignored."""
        names = ignored(self._trainer.args)
        return [f"TrainingArguments that a run has no use for: {', '.join(names)}"] if names else []

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """See `Task`: what `create_optimizer` makes of these parameters."""
        trainer, model = self._trainer, self._trainer.model
        trainer.optimizer, trainer.model = None, _Named(self._empty, list(parameters))
        try:
            made: torch.optim.Optimizer = trainer.create_optimizer()
        finally:
            trainer.optimizer, trainer.model = None, model
        # Trainer makes a group for what has no weight decay even if there is nothing.
        made.param_groups[:] = [group for group in made.param_groups if group["params"]]
        return made

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        """See `Task`: what `create_scheduler` makes for the steps of the run."""
        trainer = self._trainer
        trainer.lr_scheduler, trainer.optimizer = None, optimizer
        try:
            made: torch.optim.lr_scheduler.LRScheduler = trainer.create_scheduler(self.run.total_steps, optimizer)
        finally:
            trainer.lr_scheduler = trainer.optimizer = None
        return made

    def collate(self, table: pa.Table) -> Any:
        """See `Task`: what the data collator makes of the rows."""
        trainer = self._trainer
        collator = trainer.data_collator
        if masks_at_random(collator):
            # The same tokens whenever these rows are read again.
            collator = copy.copy(collator)
            collator.generator = torch.Generator().manual_seed(zlib.crc32(repr(table.to_pydict()).encode()))
            collator.seed, collator._generator_pid = 1, os.getpid()
        sets = table.column(SET) if SET in table.column_names else None
        features = items_of(table if sets is None else table.drop_columns(SET), trainer.item_kinds)
        if not trainer.columns_removed and trainer.args.remove_unused_columns:
            collator = trainer._get_collator_with_removed_columns(collator)
        batch = _plain(collator(features))
        if len(features) != _rows(batch):
            raise TaskError(
                f"the data collator made a batch of {_rows(batch)} rows of {len(features)} rows",
                where="Trainer(data_collator=...)",
                expected="one row of the batch for each row of the dataset: every row counts once",
            )
        if sets is None:
            return batch
        if not isinstance(batch, Mapping):
            raise TaskError(
                f"the data collator made a {type(batch).__name__}",
                where="Trainer(data_collator=...)",
                expected="a dict, for a dict of held-out datasets",
            )
        return {**batch, SET: torch.tensor(sets.to_pylist())}

    def loss(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """See `Task`: what `compute_loss` returns for the batch; it counts the labels that Trainer divides by."""
        # `compute_loss` takes the labels out of it.
        inputs = self._inputs(model, batch)
        count = self._count(inputs)
        loss = self._trainer.compute_loss(model, inputs, num_items_in_batch=count)
        return {"loss": loss} if count is None else {"loss": loss, "weight": count}

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """See `Task`: the loss of each row, as Trainer repeats it, and what `compute_metrics` gets."""
        if isinstance(batch, Mapping) and SET in batch:
            sets = batch[SET]
            parts = [self._evaluated(model, rows_where(batch, sets == number))[0] for number in sets.unique()]
            return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        found, token_loss, count = self._evaluated(model, batch)
        if token_loss is not None and count is not None and _of_tokens(batch):
            return {"metrics": {**found, TOKEN_LOSS: token_loss}, "weight": count}
        return found

    def _evaluated(self, model: nn.Module, batch: Any) -> tuple[dict[str, Any], torch.Tensor | None, Any]:
        """Return what is known of each row of a batch, its mean loss, and how many labels that counts."""
        trainer = self._trainer
        inputs, rows = self._inputs(model, batch), _rows(batch)
        found: dict[str, Any] = {SET: batch[SET]} if isinstance(batch, Mapping) and SET in batch else {}
        if self._has_metrics and "inputs" in self._included:
            found |= self._flat(_INPUTS, inputs[getattr(model, "main_input_name", "input_ids")], rows)
        count = self._count(inputs)
        loss, logits, labels = trainer.prediction_step(model, inputs, not self._has_metrics)
        mean = None if loss is None else loss.detach().float().mean()
        if mean is not None:
            found[LOSS] = mean.repeat(rows)
        if self._has_metrics:
            if trainer.preprocess_logits_for_metrics is not None:
                logits = trainer.preprocess_logits_for_metrics(logits, labels)
            found |= self._flat(_PREDICTIONS, logits, rows) | self._flat(_LABELS, labels, rows)
        return found, mean, count

    def summarise(self, outputs: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        """See `Task`: the mean loss of the rows, and what `compute_metrics` returns; of each set, if there are some."""
        if SET not in outputs:
            return self._summary(outputs)
        sets = outputs[SET]
        numbers = {int(number): sets == number for number in sets.unique()}
        return by_set(
            {number: self._summary(rows_where(outputs, chosen)) for number, chosen in numbers.items()},
            self._trainer.held_out_names,
        )

    def _summary(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        from transformers import EvalPrediction

        trainer = self._trainer
        found: dict[str, Any] = {}
        if LOSS in outputs:
            found[LOSS] = outputs[LOSS].double().mean().item()
        if self._has_metrics:
            nested = EvalPrediction(
                self._nested(_PREDICTIONS, outputs),
                self._nested(_LABELS, outputs),
                inputs=self._nested(_INPUTS, outputs) if "inputs" in self._included else None,
                losses=outputs[LOSS].numpy() if "loss" in self._included and LOSS in outputs else None,
            )
            metrics = trainer.compute_metrics(nested)
            if not isinstance(metrics, Mapping):
                raise TaskError(
                    f"compute_metrics returned {type(metrics).__name__}",
                    where="Trainer(compute_metrics=...)",
                    expected="a dict of name -> number",
                )
            found |= {name if name.startswith("eval_") else f"eval_{name}": value for name, value in metrics.items()}
        return found

    @property
    def _has_metrics(self) -> bool:
        return self._trainer.compute_metrics is not None and not self._trainer.args.prediction_loss_only

    @property
    def _included(self) -> Sequence[str]:
        """What `compute_metrics` gets beside predictions and labels."""
        return self._trainer.args.include_for_metrics or ()

    def _inputs(self, model: nn.Module, batch: Any) -> Any:
        """Return a batch that the trainer's methods may change; they see this model and its device."""
        trainer, inputs = self._trainer, _plain(batch)
        if isinstance(inputs, dict):
            inputs.pop(SET, None)
        device = _device(inputs)
        trainer.model = trainer.model_wrapped = model
        # What `TrainingArguments` would find are the devices of a process that has them all.
        vars(trainer.args).update(_setup_devices=device, _n_gpu=1)
        return trainer._prepare_inputs(inputs)

    def _count(self, inputs: Any) -> torch.Tensor | None:
        """Return how many labels a batch has, where Trainer counts them."""
        found: torch.Tensor | None = self._trainer._get_num_items_in_batch([inputs], _device(inputs))
        return found

    def _flat(self, name: str, value: Any, rows: int) -> dict[str, torch.Tensor]:
        """Return the values of rows in something nested, by names of their own."""
        leaves, self._forms[name] = pytree.tree_flatten(value)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or not leaf.dim() or len(leaf) != rows:
                shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
                raise TaskError(
                    f"the {name} of an evaluation hold {shape} for a batch of {rows} rows",
                    where="Trainer(compute_metrics=...)",
                    expected="tensors whose first dimension is the rows",
                    remedy="choose what the metrics need: preprocess_logits_for_metrics",
                )
        return {f"{name}{number}": leaf.detach() for number, leaf in enumerate(leaves)}

    def _nested(self, name: str, outputs: Mapping[str, torch.Tensor]) -> Any:
        form = self._forms[name]
        leaves = [outputs[f"{name}{number}"] for number in range(form.num_leaves)]
        return pytree.tree_unflatten(
            [(one.float() if one.dtype is torch.bfloat16 else one).numpy() for one in leaves], form
        )

    @cached_property
    def _empty(self) -> nn.Module:
        return without_values(self)


class CallingTrainerTask(TrainerTask):
    """Calls the trainer's callbacks, too, in the process that hears of a run."""

    def _state(self) -> Any:
        from transformers import TrainerState

        return TrainerState()

    def on_step(self, metrics: Mapping[str, Any]) -> StopRun | None:
        """See `Task`: `on_step_end`, and `on_log` in the steps that are logged."""
        state = self._trainer.state
        state.global_step, state.epoch = metrics["step"] + 1, float(metrics["epoch"])
        state.max_steps = self.run.total_steps
        calls: dict[str, dict[str, Any]] = {"on_step_end": {}}
        if state.global_step % in_steps(self._trainer.args.logging_steps, self.run.total_steps) == 0:
            logs = {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"], "learning_rate": metrics["lr"]}
            calls["on_log"] = {"logs": logs}
        return self._call(calls)

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> StopRun | None:
        """See `Task`: `on_evaluate`, but for the untrained state, of which Trainer does not tell."""
        if step < 0:
            return None
        improve(self._trainer.state, self._trainer.args, step, metrics)
        return self._call({"on_evaluate": {"metrics": dict(metrics)}})

    def on_checkpoint(self, step: int, path: str) -> StopRun | None:
        """See `Task`: `on_save`."""
        state = self._trainer.state
        if state.best_global_step == step + 1:
            state.best_model_checkpoint = path
        return self._call({"on_save": {}})

    def _call(self, calls: Mapping[str, Mapping[str, Any]]) -> StopRun | None:
        """Call these methods of all callbacks. Raises `TaskError` if one then asks for something else than a stop."""
        from transformers import TrainerControl

        trainer, control = self._trainer, TrainerControl()
        asked: dict[str, str] = {}
        for method, given in calls.items():
            for callback in trainer.callbacks_called:
                control = getattr(callback, method)(trainer.args, trainer.state, control, **given) or control
                for name in [name for name, value in vars(control).items() if value is True]:
                    asked.setdefault(name, f"{type(callback).__name__} sets {name}")
        if STOPS in asked:
            # A run that stops saves its state, too.
            return StopRun(asked[STOPS])
        if asked:
            raise TaskError(
                f"{next(iter(asked.values()))}, which a run ignores",
                where="Trainer(callbacks=...)",
                expected=STOPS,
                remedy="set save_steps, eval_steps and logging_steps",
            )
        return None


class Unknown:
    """Stands for what a trainer does not have where the loss of a batch is computed."""

    def __init__(self, what: str, remedy: str) -> None:
        self._what, self._remedy = what, remedy

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # Such as those that pickling looks for.
            raise AttributeError(name)
        raise TaskError(self._what.format(name), where="Trainer", remedy=self._remedy)


class _Named:
    """A model whose parameters are others, of the same names: those that a worker changes."""

    def __init__(self, model: nn.Module, parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        self._model, self._parameters_given = model, parameters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._parameters_given

    def parameters(self, *_: Any, **__: Any) -> Iterator[nn.Parameter]:
        yield from (value for _, value in self._parameters_given)


def prepared(trainer: Any, model: Any) -> Any:
    """Return a model as `Trainer.train` begins with it: its special tokens are those of the tokenizer."""
    from transformers import PreTrainedTokenizerBase, ProcessorMixin
    from transformers.trainer_utils import align_special_tokens

    config = getattr(model, "config", None)
    if config is not None and isinstance(trainer.processing_class, (PreTrainedTokenizerBase, ProcessorMixin)):
        align_special_tokens(model, trainer.processing_class)
    if config is not None:
        config.use_cache = trainer.args.use_cache
    return model


def masks_at_random(collator: Any) -> bool:
    """Return whether a collator draws tokens to mask from a generator of its own."""
    return bool(getattr(collator, "mlm", False)) and hasattr(collator, "generator")


def _plain(batch: Any) -> Any:
    """Return a batch as a dict of its own if it is a mapping, such as a `BatchEncoding`."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def _first(batch: Any) -> torch.Tensor | None:
    """Return the first tensor with dimensions in something nested, such as a batch of several encodings."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.dim() else None
    within = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((found for one in within if (found := _first(one)) is not None), None)


def _rows(batch: Any) -> int:
    first = _first(batch)
    return 0 if first is None else len(first)


def _device(batch: Any) -> torch.device:
    first = _first(batch)
    return torch.device("cpu") if first is None else first.device


def _of_tokens(batch: Any) -> bool:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return isinstance(labels, torch.Tensor) and labels.dim() > 1
