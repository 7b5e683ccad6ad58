"""The task of a Trainer script: the trainer's own methods, called with one batch each."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from raytrain_plus.bring.arguments import ignored
from raytrain_plus.bring.trainer_parcel import read_parcel_model, read_trainer
from raytrain_plus.errors import TaskError
from raytrain_plus.task import SINGLE, Task, field_name
from raytrain_plus.torch_compat import pytree

LOSS, TOKEN_LOSS = "eval_loss", "eval_token_loss"
_PREDICTIONS, _LABELS = "predictions", "labels"


class TrainerTask(Task):
    """Calls `compute_loss`, `create_optimizer`, `create_scheduler`, `prediction_step` and `compute_metrics`."""

    def __init__(self, folder: str) -> None:
        """Take the trainer from its parcel (`bring.trainer_parcel`)."""
        self.folder = Path(folder)
        self._trainer = read_trainer(self.folder)
        self._forms: dict[str, Any] = {}
        """How the values of rows are nested in what `prediction_step` returns."""

    def model(self) -> nn.Module:
        """See `Task`."""
        trainer = self._trainer
        device = torch.get_default_device()
        if trainer.model_init is None:
            model = read_parcel_model(self.folder, device if device.type == "meta" else torch.device("cpu"))
        else:
            model = trainer.call_model_init()
        trained: Any = model.train()
        args = trainer.args
        if args.gradient_checkpointing or getattr(args, "activation_checkpointing", None):
            trained.gradient_checkpointing_enable({"use_reentrant": False})
        if args.neftune_noise_alpha is not None and device.type != "meta":
            from transformers.integrations.neftune import activate_neftune

            activate_neftune(model, args.neftune_noise_alpha)
        if device.type != "meta":
            trainer.model = trainer.model_wrapped = model
        return model

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
        if hasattr(collator, "generator") and hasattr(collator, "mlm"):
            # It masks tokens at random: the same ones whenever these rows are read again.
            collator = copy.copy(collator)
            collator.seed = zlib.crc32(repr(table.to_pydict()).encode()) or 1
            collator.generator = None
        if trainer.model is None:
            # Its arguments say which columns are used, and rows are read before it is built.
            trainer.model = self._empty
        features = _items(table)
        batch = _plain(trainer._get_collator_with_removed_columns(collator)(features))
        if len(features) != _rows(batch):
            raise TaskError(
                f"the data collator made a batch of {_rows(batch)} rows of {len(features)} rows",
                where="Trainer(data_collator=...)",
                expected="one row of the batch for each row of the dataset: every row counts once",
            )
        return batch

    def loss(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """See `Task`: what `compute_loss` returns for the batch; it counts the labels that Trainer divides by."""
        # `compute_loss` takes the labels out of it.
        inputs = _plain(batch)
        count = self._count(inputs)
        loss = self._trainer.compute_loss(model, inputs, num_items_in_batch=count)
        return {"loss": loss} if count is None else {"loss": loss, "weight": count}

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """See `Task`: the loss of each row, as Trainer repeats it, and what `compute_metrics` gets."""
        trainer = self._trainer
        inputs, rows = _plain(batch), _rows(batch)
        count = self._count(inputs)
        loss, logits, labels = trainer.prediction_step(model, inputs, trainer.compute_metrics is None)
        found: dict[str, Any] = {}
        if loss is not None:
            found[LOSS] = loss.detach().float().mean().repeat(rows)
        if trainer.compute_metrics is not None:
            if trainer.preprocess_logits_for_metrics is not None:
                logits = trainer.preprocess_logits_for_metrics(logits, labels)
            found |= self._flat(_PREDICTIONS, logits, rows) | self._flat(_LABELS, labels, rows)
        if loss is not None and count is not None and _of_tokens(batch):
            return {"metrics": {**found, TOKEN_LOSS: loss.detach().float().mean()}, "weight": count}
        return found

    def summarise(self, outputs: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        """See `Task`: the mean loss of the rows, and what `compute_metrics` returns."""
        from transformers import EvalPrediction

        trainer = self._trainer
        found: dict[str, Any] = {}
        if LOSS in outputs:
            found[LOSS] = outputs[LOSS].double().mean().item()
        if trainer.compute_metrics is not None:
            nested = EvalPrediction(self._nested(_PREDICTIONS, outputs), self._nested(_LABELS, outputs))
            metrics = trainer.compute_metrics(nested)
            if not isinstance(metrics, Mapping):
                raise TaskError(
                    f"compute_metrics returned {type(metrics).__name__}",
                    where="Trainer(compute_metrics=...)",
                    expected="a dict of name -> number",
                )
            found |= {name if name.startswith("eval_") else f"eval_{name}": value for name, value in metrics.items()}
        return found

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
        """The model without values."""
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return self.model()


class CallingTrainerTask(TrainerTask):
    """Calls the trainer's callbacks, too, in the process that hears of a run."""

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        """See `Task`: `on_step_end`, and `on_log` in the steps that are logged."""
        state = self._trainer.state
        state.global_step, state.epoch = metrics["step"] + 1, float(metrics["epoch"])
        self._call("on_step_end")
        if state.global_step % max(1, int(self._trainer.args.logging_steps)) == 0:
            logs = {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"], "learning_rate": metrics["lr"]}
            self._call("on_log", logs=logs)

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> None:
        """See `Task`: `on_evaluate`, but for the untrained state, of which Trainer does not tell."""
        if step >= 0:
            self._call("on_evaluate", metrics=dict(metrics))

    def on_checkpoint(self, step: int, path: str) -> None:
        """See `Task`: `on_save`."""
        self._call("on_save")

    def _call(self, event: str, **given: Any) -> None:
        from transformers import TrainerControl

        trainer, control = self._trainer, TrainerControl()
        for callback in trainer.callbacks_called:
            getattr(callback, event)(trainer.args, trainer.state, control, **given)
            if control.should_training_stop:
                raise TaskError(
                    f"{type(callback).__name__} asks to stop, and a callback of a run cannot",
                    where="Trainer(callbacks=...)",
                    remedy="EarlyStoppingCallback, or raytrain stop",
                )


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


def _items(table: pa.Table) -> list[Any]:
    """Return rows as the items that the dataset had: mappings, tuples or single values.

    Numbers of the types that only arrays and tensors have become arrays of that type, others are Python's.
    """
    columns = {name: _values(table.column(name)) for name in table.column_names}
    if list(columns) == [SINGLE]:
        return list(columns[SINGLE])
    rows = zip(*columns.values(), strict=True)
    if columns and list(columns) == [field_name(number) for number in range(len(columns))]:
        return list(rows)
    return [dict(zip(columns, row, strict=True)) for row in rows]


_PYTHONS = (pa.int64(), pa.float64(), pa.bool_())


def _values(column: pa.ChunkedArray) -> Sequence[Any]:
    kind = column.type
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    values: list[Any] = column.to_pylist()
    if kind in _PYTHONS or not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        return values
    return [None if one is None else np.asarray(one, dtype=kind.to_pandas_dtype()) for one in values]


def _plain(batch: Any) -> Any:
    """Return a batch as a dict of its own if it is a mapping, such as a `BatchEncoding`."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def _first(batch: Any) -> torch.Tensor | None:
    return next((one for one in pytree.tree_leaves(batch) if isinstance(one, torch.Tensor) and one.dim()), None)


def _rows(batch: Any) -> int:
    first = _first(batch)
    return 0 if first is None else len(first)


def _device(batch: Any) -> torch.device:
    first = _first(batch)
    return torch.device("cpu") if first is None else first.device


def _of_tokens(batch: Any) -> bool:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return isinstance(labels, torch.Tensor) and labels.dim() > 1
