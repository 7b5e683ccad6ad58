"""Train a model that computes its own loss, from a folder or from a function that builds it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import torch
from torch import nn

from raytrain_plus import schedules
from raytrain_plus.bring.counted import IGNORED, counted, shifts_labels
from raytrain_plus.bring.empty import without_values
from raytrain_plus.bring.lora import frozen_names, is_adapted, with_adapter, without_adapter
from raytrain_plus.bring.pretrained import (
    check_folder,
    check_library,
    class_of,
    config_of,
    read_model,
    taken_by,
)
from raytrain_plus.data.values.collate import MASK, pad
from raytrain_plus.errors import InputError, TaskError, listed
from raytrain_plus.job.task_loader import load_function
from raytrain_plus.layers import own_plan
from raytrain_plus.task import Task

UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)
"""Names of parameters without weight decay, as `transformers.Trainer` has them."""
LABELS = ("label", "label_ids")
"""Columns that are the labels under other names, as Transformers' own collators know them."""


class Model(Task):
    """A model that returns its loss if it is given labels, as those of Transformers do."""

    def __init__(
        self,
        folder: str | None = None,
        build: str | None = None,
        head: str | None = None,
        config: Mapping[str, Any] | None = None,
        loss: str | None = None,
        lora: Mapping[str, Any] | None = None,
        learning_rate: float = 5e-5,
        weight_decay: float = 0.0,
        warmup: float = 0.0,
        schedule: Literal["linear", "cosine", "constant"] = "linear",
    ) -> None:
        """Train the model in a folder, or the one that a function returns.

        `folder`: as `save_pretrained` writes it, absolute or relative to the working directory; every worker reads it.
        `head`: what follows `AutoModelFor`, such as `SequenceClassification`; by default the model is of the class that
        wrote the folder. `config`: settings that replace those of the folder's `config.json`, such as `num_labels`.
        `build`: `module:function`, which returns the model; in place of `folder`. `loss`: `module:function`, which
        returns the loss of (model, batch) as `Task.loss` does; by default the model returns it. `lora`: settings of
        `peft.LoraConfig`; an adapter is trained, the model is frozen and keeps the dtype of the folder. The optimizer
        is AdamW; biases and norms have no weight decay. `warmup`: steps, or a share of the run if it is below 1.
        """
        if (folder is None) == (build is None):
            raise InputError(
                "the model comes from a folder or from a function",
                where="args",
                expected="either `folder` or `build`",
            )
        if schedule not in ("linear", "cosine", "constant"):
            raise InputError(
                f"unknown schedule '{schedule}'", where="args.schedule", expected="linear, cosine, constant"
            )
        self.folder = None if folder is None else Path(folder)
        self._head, self._config = head, dict(config or {})
        self._build = None if build is None else load_function(build, ())
        self._loss = None if loss is None else load_function(loss, ())
        self._lora = None if lora is None else dict(lora)
        self._new: list[str] = []
        """The weights that the folder lacks."""
        self._rate, self._decay, self._warmup, self._schedule = learning_rate, weight_decay, warmup, schedule
        if self.folder is not None:
            check_library("args.folder")
            check_folder(self.folder, "args.folder")

    def model(self) -> nn.Module:
        """See `Task`. Under the meta device a folder's model has no values, and none are read."""
        model = self._whole()
        return model if self._lora is None else with_adapter(model, self._lora, self._new, "args.lora")

    def _whole(self) -> nn.Module:
        if self.folder is None:
            return self._built()
        config = config_of(self.folder, self._config, "args.folder")
        cls = class_of(config, self._head, "args.folder")
        # A model that is frozen keeps the dtype that its folder names.
        dtype = torch.float32 if self._lora is None else config.dtype or torch.float32
        if torch.get_default_device().type == "meta":
            empty: nn.Module = cls(config)
            return empty if self._lora is None else empty.to(dtype)
        model, self._new = read_model(self.folder, config, cls, "args.folder", dtype)
        trained: nn.Module = model.train()
        return trained

    def remarks(self) -> Sequence[str]:
        """See `Task`: which weights the folder lacks."""
        if not self._new:
            return ()
        return (f"{self.folder} has no weights for {listed(self._new)}: they are trained from new",)

    def rebuilt(self) -> Sequence[str]:
        """See `Task`: the frozen weights of a model with an adapter."""
        if self._lora is None and self._build is None:
            return ()
        return frozen_names(self._empty) if is_adapted(self._empty) else ()

    def tensor(self) -> Mapping[str, str]:
        """See `Task`: the model's own plan; one with an adapter has none."""
        return {} if is_adapted(self._empty) else own_plan(self._empty)

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """See `Task`: AdamW, with weight decay for what is neither a bias nor in a norm."""
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, value in parameters:
            groups[name not in self._undecayed].append(value)
        decays = [(value, self._decay if decayed else 0.0) for decayed, value in groups.items() if value]
        return torch.optim.AdamW([{"params": value, "weight_decay": decay} for value, decay in decays], lr=self._rate)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        """See `Task`."""
        if self._schedule == "constant" and not self._warmup:
            return None
        if self._schedule == "constant":
            return schedules.warmup_stable_decay(optimizer, self.run.total_steps, warmup=self._warmup, decay=0)
        fall = schedules.warmup_linear if self._schedule == "linear" else schedules.warmup_cosine
        return fall(optimizer, self.run.total_steps, warmup=self._warmup)

    def collate(self, table: pa.Table) -> dict[str, Any]:
        """See `Task`: the columns that the model takes, padded; the labels of a causal model are its tokens."""
        causal = shifts_labels(without_adapter(self._empty))
        if "labels" not in table.column_names and not causal:
            named = next((name for name in LABELS if name in table.column_names), None)
            table = table.rename_columns(["labels" if name == named else name for name in table.column_names])
        if self._loss is None:
            table = table.select([name for name in table.column_names if name in self._taken])
        if not table.column_names:
            raise TaskError(
                "no column of the data is an argument of the model",
                where="data",
                expected=f"columns such as {', '.join(self._taken[:4])}; data.tokenizer makes input_ids of text",
            )
        # As the collators of Transformers do, for which Python's numbers are those of the model.
        batch = {name: value.float() if _is_double(value) else value for name, value in pad(table).items()}
        if "labels" not in batch and "input_ids" in batch and causal:
            mask = batch.get(MASK)
            tokens = batch["input_ids"]
            batch["labels"] = tokens if mask is None else tokens.masked_fill(mask == 0, IGNORED)
        return batch

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor | Mapping[str, Any]:
        """See `Task`: the model's own loss, or that of the function `loss`."""
        if self._loss is not None:
            return self._loss(model, batch)  # type: ignore[no-any-return]
        if not isinstance(batch, Mapping):
            raise TaskError(
                f"the batch is a {type(batch).__name__}, and the model takes its arguments by name",
                where="args",
                expected="rows with columns",
                remedy="name a function that calls the model: args.loss",
            )
        given = {name: value for name, value in batch.items() if name in self._taken}
        if "use_cache" in self._taken:
            # Keys and values are kept for generation alone.
            given["use_cache"] = False
        found = model(**given)
        loss = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
        if loss is None:
            raise TaskError(
                f"{type(model).__name__} returned no loss for a batch of {', '.join(batch)}",
                where="args",
                expected="a column `labels`, of which the model computes its loss",
                remedy="add that column with data.transform, or name a function that computes the loss: args.loss",
            )
        weight = counted(without_adapter(model), batch)
        return {"loss": loss} if weight is None else {"loss": loss, "weight": weight}

    def example(self, batch: Any) -> Mapping[str, Any] | None:
        """See `Task`: what the model takes of a batch, without the labels."""
        return None if self._loss else {k: v for k, v in batch.items() if k in self._taken and k != "labels"}

    def _built(self) -> nn.Module:
        assert self._build is not None, "there is a folder or a function"
        model = self._build()
        if not isinstance(model, nn.Module):
            raise TaskError(
                f"the function returned {type(model).__name__}", where="args.build", expected="a torch.nn.Module"
            )
        return model

    @cached_property
    def _empty(self) -> nn.Module:
        return without_values(self)

    @cached_property
    def _taken(self) -> list[str]:
        return taken_by(without_adapter(self._empty))

    @cached_property
    def _undecayed(self) -> set[str]:
        norms = {name for name, part in self._empty.named_modules() if isinstance(part, (nn.LayerNorm, nn.GroupNorm))}
        named = (name for name, _ in self._empty.named_parameters())
        return {name for name in named if UNDECAYED.search(name) or name.rpartition(".")[0] in norms}


def _is_double(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float64
