"""Define `Task`, the class that a user writes: model, optimizer, loss; without Ray, Horovod or ranks.

class Digits(Task):
    def model(self):
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def loss(self, model, batch):
        return F.cross_entropy(model(batch["pixels"]), batch["label"])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import nn

BufferRule = Literal["mean", "sum", "first", "max", "refuse"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """What a task knows of the run that it is built for."""

    total_steps: int
    """Steps of the whole run: the job's `steps`, or as many as its `epochs` have; for example for a schedule."""
    batch_size: int
    """Rows of a step, over all shards: the job's `data.batch_size`."""
    rows: int = 0
    """Rows of the training data, all of which an epoch uses; 0 where no data is known, as in an export."""


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Files that hold the initial values of a model."""

    path: str | Path
    """A `.safetensors` file; a folder with `model.safetensors`, or `model.safetensors.index.json` and its parts; or a
    file of `torch.save` that holds a dict of tensors. Absolute, or relative to the working directory of each worker."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Name in the model -> name in the files, such as {"block*.qkv.*": "h.*.attn.c_attn.*"}.

    Each * stands for any text, on the right for the text of the same * on the left; as little of it as fits. The first
    pattern that fits counts. A name that none fits is the same in the files.
    """
    new: Sequence[str] = ()
    """Patterns of weights that keep the values that they are drawn with, such as "head.*"."""


@dataclass(frozen=True, slots=True)
class StopRun:
    """Returned by `on_step`, `on_evaluate` or `on_checkpoint`: the run stops, as `raytrain stop` stops it."""

    why: str
    """The reason, which the run notes."""


class Task:
    """One training task. The job's `args` become the constructor's keyword arguments.

    Only `loss`, and one of `model` and `layers`, must be defined; everything else has a default.
    """

    @property
    def run(self) -> RunFacts:
        """The run that the task is built for; set after the constructor, for `optimizer`, `scheduler` and `loss`.

        `model`, `layers` and `weights` must not depend on it: they are also called where no run is known. Outside a
        run, as in a test of your own, set it first: `task.run = RunFacts(total_steps=300, batch_size=48)`.
        """
        facts: RunFacts | None = vars(self).get("run")
        if facts is None:
            raise AttributeError(
                f"{type(self).__name__}.run is not known in the constructor, nor outside a run; in a test of your own "
                "set it first: task.run = RunFacts(total_steps=..., batch_size=...)"
            )
        return facts

    @run.setter
    def run(self, facts: RunFacts) -> None:
        if not isinstance(facts, RunFacts):
            raise AttributeError(
                "`run` of a task holds the facts of its run (RunFacts): give this attribute another name"
            )
        vars(self)["run"] = facts

    def layers(self) -> Mapping[str, Callable[[], nn.Module]] | None:
        """Return the model as consecutive layers, name -> builder; each layer takes what the one before it returns.

        A model with layers gets its random numbers per layer (initial values and dropout alike) and can be partitioned
        into stages between any two of them. Return None (the default) to define `model` instead.
        """
        return None

    def tensor(self) -> Mapping[str, str]:
        """Return how the model is cut into slices with `parallel.tensor`, such as {"block*.qkv": "colwise"}.

        Keys are names of modules in `layers` or `model`, in which * stands for anything between two dots. `colwise`: an
        nn.Linear is cut by its outputs, `rowwise`: by its inputs, `vocab`: an nn.Embedding by its rows. In between, a
        module computes with the features of its slices alone, so attention must say `view(..., -1, head_dim)`. A
        colwise layer without a rowwise one beside it returns the outputs of all slices. Projections in one weight are
        cut each by itself if the name says so: three projections in `qkv`, two in `gate_up`. `sequence_parallel`: norms
        and nn.Dropout between them compute some of the positions for each slice, `replicated_with_grad_allreduce`:
        norms within them the heads of each. A model of Transformers has a plan: `layers.own_plan(self.model())`.

        `experts`: with `parallel.experts`, a module with `num_experts` experts, along the first dimension of each of
        its weights. Its `forward(tokens, experts, weights)` gets rows (tokens, width), the experts of each and their
        weights (tokens, k); `num_experts` in place of an expert means none. `layers.Experts` need no entry.
        """
        return {}

    def model(self) -> nn.Module:
        """Return the whole model, freshly initialised on the CPU."""
        raise NotImplementedError(f"{type(self).__name__} must define model() or layers()")

    def weights(self) -> WeightFiles | None:
        """Return the files that hold the initial values of the model. Default: None, they are drawn.

        `model` and `layers` are as without them, and must not read the files themselves. Each worker reads what it
        holds, also one that joins later, such as the layers of its stage. Values get the dtype of their parameter.
        Persistent buffers that the files lack keep their values. A run that resumes continues with its own state.
        """
        return None

    def rebuilt(self) -> Sequence[str]:
        """Return patterns of frozen weights that a run does not save, such as ["backbone.*"]. Default: none.

        Each worker builds them by itself, also one that joins later: `model`, `layers` or `weights` give them the same
        values whenever they are called, for example those of a file that stays where it is. In checkpoints, and in what
        workers send one another, a SHA-256 of its values stands for each; with other values, a run does not continue.
        An export needs the task and the file. In a pattern, * stands for any text; weights that are trained are saved
        even if one fits.
        """
        return ()

    def tied(self) -> Mapping[str, str]:
        """Return the parameters tied across `layers`, such as {"head.out.weight": "embed.tokens.weight"}.

        Each layer keeps its own copy, so that the model can be partitioned between them. The key's parameter starts
        with the values of the other, and both get the sum of their gradients; `optimizer` must give them the same
        settings. Parameters shared between the modules of an nn.Sequential are found automatically; parameters shared
        inside one layer need no entry.
        """
        return {}

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """Return the optimizer for (name, parameter) pairs. Default: AdamW with a learning rate of 1e-3.

        It must have no other parameters: with sharded states, lower precisions and offload these are not the model's
        own. To choose groups by the types of modules, define `optimizer(self, parameters, model)`. `model` is what
        `model()` returns; if the model is in layers, it is the sequence of the layers that the worker has.
        """
        return torch.optim.AdamW([parameter for _, parameter in parameters], lr=1e-3)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Return a learning-rate scheduler, stepped once after every optimizer step, or None (the default).

        For a schedule as long as the run, whether the job gives `steps` or `epochs`:

            def scheduler(self, optimizer):
                return schedules.warmup_cosine(optimizer, self.run.total_steps, warmup=0.05)

        `raytrain_plus.schedules` has this one, and others. A scheduler's `step` must need no argument: one that needs a
        metric is refused.
        """
        return None

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor | Mapping[str, Any]:
        """Return the mean loss of `batch`, a tensor with one value. To return more, return a mapping:

        {"loss": mean, "weight": number, "metrics": {"accuracy": number}}

        `weight` is what the mean counts if rows do not count equally, such as the number of tokens. Default: the number
        of rows, or of tokens with `data.collate: pack`. `metrics` are up to 64 other means over the batch, with the
        same names for every batch of a step. Each step reports loss and metrics as means over all its microbatches,
        weighted by `weight`. NaN is allowed in a metric. Nothing else may be returned: `return loss, accuracy` is an
        error.
        """
        raise NotImplementedError(f"{type(self).__name__} must define loss(model, batch)")

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, torch.Tensor | float]:
        """Return the metrics of a held-out `batch`, by name. Default: the loss, as `loss`, and the metrics beside it.

        The default counts each batch with the weight that `loss` returns. One of your own counts the rows, unless it
        returns a weight too (below), also if it adds to what this method returns.

        Called without gradients and with the model in evaluation mode. Each value is one of two kinds:

        - one number: a mean over the rows of the batch
        - a tensor whose first dimension is the rows: a value for each row

        The run reports the mean over all held-out rows, however they are batched. That is right for accuracy, not for
        F1, AUC or perplexity, which are no means over rows: define `summarise` for these. With `data.collate: pack` it
        is the mean over all tokens, of numbers that are means over the tokens of a batch. If batches do not count by
        their rows, return {"metrics": {...}, "weight": number}, and nothing else: numbers count with this weight, and
        values for each row with the rows.
        """
        result = self.loss(model, batch)
        return (
            {"loss": result["loss"], **result.get("metrics", {})} if isinstance(result, Mapping) else {"loss": result}
        )

    def summarise(self, outputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor | float]:
        """Return metrics that are no means over rows, given the values of all rows. Optional.

        `outputs`: for each name for which `evaluate` returned a value per row (a label, a score, a row of logits), the
        tensor over all held-out rows, in their order, on the CPU. Rows of numbers that are longer in some batches than
        in others are filled up with -100. Called on one worker in each evaluation; the outputs must fit into the memory
        of each worker. Numbers that `evaluate` returned are averaged as ever, and the values of rows only given to this
        method. Metric objects of torchmetrics are used here, on the whole set:

            def evaluate(self, model, batch):
                scores = model(batch["x"])
                return {"loss": F.cross_entropy(scores, batch["y"]), "scores": scores, "label": batch["y"]}

            def summarise(self, outputs):
                return {"f1": torchmetrics.F1Score("multiclass", num_classes=10)(outputs["scores"], outputs["label"])}
        """
        raise NotImplementedError(f"{type(self).__name__} defines no summarise(outputs)")

    def example(self, batch: Any) -> tuple[Any, ...] | Mapping[str, Any] | None:
        """Return the arguments with which `raytrain export --format torch-export` exports the model. Optional.

        A tuple of positional arguments, or a dict of keyword arguments, for the model's `forward`. The default, None,
        selects those with which `loss` calls the model. For a model that takes labels only to compute its loss:

            def example(self, batch):
                return (batch["ids"],)

        The program takes other numbers of rows, and other lengths, as far as torch and the model support it; a size of
        1 is fixed. The command reports what it takes.
        """
        return None

    def collate(self, table: pa.Table) -> Any:
        """Return the batch for a table of rows. Default: a dict of tensors, one per column.

        Numeric and boolean columns become tensors of shape (rows,), lists of equal length (rows, length, ...). Rows of
        `data.dataset` whose items are tuples become a tuple of tensors, and those that are single values one tensor.
        Override it for strings, ragged lists, or anything that needs the whole batch. It is called on a thread that
        runs ahead of the steps, and during an evaluation also on the training thread: it must support both at once and
        draw no random numbers (`data.transform` has a generator for them).
        """
        return as_item({name: column_tensor(table, name) for name in table.column_names})

    def buffer_rule(self, name: str) -> BufferRule | None:
        """Return how the shards' values of the buffer `name` are combined after a step.

        `mean`: over shards, weighted by rows (the default for floating buffers); `max` (the default for integers);
        `sum`: of what each shard has added to the integers;
        `first`: shard 0's value; `refuse`: changing the buffer is an error. None selects the default.
        """
        return None

    def show(self, model: nn.Module) -> str | None:
        """Return a few lines to print at the end of training, such as a sample from the model, or None."""
        return None

    def remarks(self) -> Sequence[str]:
        """Return sentences that whoever runs the task should know, once its model is built. Default: none.

        `raytrain validate` shows them, and each run once. For tasks that are written for others.
        """
        return ()

    def on_step(self, metrics: Mapping[str, Any]) -> StopRun | None:
        """Hear of a committed step. Optional, as `on_evaluate` and `on_checkpoint`: by default nothing is called.

        `metrics`: `step` and `epoch`, counted from 0, `samples` (rows), `loss`, `grad_norm`, `seconds`, `lr` (the
        learning rate, a list if the optimizer has several groups, or None), `skipped`, and `metrics`, those that `loss`
        returned beside the loss.

        The three methods are called in a process of the run's listeners, in the order of the run, on an instance of the
        task that has no model. They cannot delay a step, nor end the run by raising: that is reported. Through losses
        of workers each call is made once. If the controller or this process dies, calls may be made again, and steps
        that are computed again are called again: use the number of the step as a key.

        One that returns `StopRun(why)` has the run stop at a step boundary soon after, and save its state. Events from
        before a run was resumed cannot stop it.
        """

    def on_evaluate(self, step: int, metrics: Mapping[str, float]) -> StopRun | None:
        """Hear of an evaluation of the state after `step`, which is -1 before the first. See `on_step`."""

    def on_checkpoint(self, step: int, path: str) -> StopRun | None:
        """Hear of a complete checkpoint of the state after `step`. See `on_step`.

        `path`: its folder, a path or an address; `raytrain export` takes it. The checkpoint is removed once
        `checkpoint.keep` newer ones exist.
        """


SINGLE = "_"
"""The column of items that are single values."""


def field_name(number: int) -> str:
    """Return the column of field `number` of items that are tuples."""
    return f"_{number}"


def as_item(columns: dict[str, Any]) -> Any:
    """Return a batch in the form of the items that its rows are: a tuple, a single value, else the dict itself."""
    if list(columns) == [SINGLE]:
        return columns[SINGLE]
    if columns and list(columns) == [field_name(number) for number in range(len(columns))]:
        return tuple(columns.values())
    return columns


def column_tensor(table: pa.Table, name: str) -> torch.Tensor:
    """Return a column as a tensor: (rows,) for numbers, (rows, length, ...) for lists of equal length.

    Raises `TypeError` for nulls, lists of different lengths, and types that are not numeric.
    """
    column = column_array(table, name)
    shape = [len(column)]
    while (
        pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type)
    ):
        shape.append(_length(column, name))
        column = column.flatten()
        _check_no_nulls(column, name)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)):
        raise TypeError(f"column '{name}' has type {column.type}, which is not numeric: {_made_numeric(column.type)}")
    array = column.to_numpy(zero_copy_only=False)
    return torch.tensor(array).reshape(shape)


def column_array(table: pa.Table, name: str) -> pa.Array:
    """Return a column as one array. Raises `TypeError` if it holds nulls."""
    column = table.column(name).combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    _check_no_nulls(column, name)
    return column


def _length(column: pa.Array, name: str) -> int:
    """Return the length of all lists in a column."""
    if pa.types.is_fixed_size_list(column.type):
        return int(column.type.list_size)
    found = pc.min_max(pc.list_value_length(column)).as_py()
    if found["min"] != found["max"]:
        raise TypeError(
            f"column '{name}' holds lists of different lengths: set data.collate: pad, or override Task.collate"
        )
    return found["min"] or 0


def _made_numeric(kind: pa.DataType) -> str:
    """Return how values of a type that holds no numbers become some."""
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "set data.image_size if these are images, or override Task.collate"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "set data.tokenizer if this is text, make numbers of it in data.transform, or override Task.collate"
    return "set data.collate, or override Task.collate"


def _check_no_nulls(column: pa.Array, name: str) -> None:
    if count := column.null_count:
        nulls = f"{count} null{'s' * (count > 1)}"
        raise TypeError(f"column '{name}' holds {nulls}: fill them in data.transform or Task.collate")
