"""The task of a LightningModule: its own methods, called with one batch each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import nn
from torch.utils.data import default_collate

from raytrain_plus.bring.empty import without_values
from raytrain_plus.bring.item_kinds import items_of, kinds_of
from raytrain_plus.bring.lightning.configured import Configured, EpochSchedules, read_configured
from raytrain_plus.bring.lightning.loaders import LoadedData, read_loader
from raytrain_plus.bring.lightning.logged import LogBook, reduced
from raytrain_plus.bring.lightning.metric_objects import begin, counted, metrics_in, put_counted, take_out
from raytrain_plus.bring.lightning.module_checks import (
    call_step,
    check_kind,
    check_module,
    lightning_class,
    overrides,
    remarks_on,
)
from raytrain_plus.bring.lightning.record_rows import as_rows, read_rows
from raytrain_plus.bring.lightning.trainer_view import TrainerFacts, TrainerView
from raytrain_plus.bring.parcel import read_parcel_model, read_pickle
from raytrain_plus.errors import TaskError
from raytrain_plus.job.task_loader import load_function
from raytrain_plus.task import Task
from raytrain_plus.training.model.unshared import Attributes

BROUGHT = "lightning.pkl"
_BATCH, _ROWS = "batch", "rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Brought:
    """What the workers need beside module and datasets."""

    facts: TrainerFacts = field(default_factory=TrainerFacts)
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of items; None if the columns are the batch."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """What the fields of items are that are no values of Python's own: see `bring.item_kinds`."""
    remarks: Sequence[str] = ()
    callbacks: Sequence[Any] = ()


class LightningTask(Task):
    """Calls a module's `training_step`, `validation_step`, `configure_optimizers` and hooks; derive from it."""

    def __init__(self, brought: Brought, datamodule: Any = None) -> None:
        self._brought = brought
        self._view = TrainerView(brought.facts, datamodule)
        self._hooks = _Hooks(self._view)
        self._configured: Configured | None = None
        self._remarks: list[str] = []

    def bring(self) -> Any:
        """Return the module, freshly built."""
        raise NotImplementedError

    def model(self) -> nn.Module:
        """See `Task`: the module, without its metrics, which are no part of the training state."""
        module = self.bring()
        check_kind(module, "args.module")
        check_module(module)
        self._remarks = remarks_on(module)
        attach(module, self._hooks)
        for hook in ("on_fit_start", "on_train_start"):
            getattr(module, hook)()
        trained: nn.Module = module
        return trained

    def remarks(self) -> Sequence[str]:
        """See `Task`: what of the module and of Trainer's arguments is left out."""
        return [*self._brought.remarks, *self._remarks]

    def optimizer(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """See `Task`: what `configure_optimizers` makes of these parameters."""
        self._view.run = vars(self).get("run")
        pieces: dict[str, list[nn.Parameter]] = {}
        for name, value in parameters:
            pieces.setdefault(name, []).append(value)
        _put_parameters(self._empty, {name: values[0] for name, values in pieces.items()})
        self._configured = read_configured(self._empty.configure_optimizers())  # type: ignore[operator]
        optimizer = self._configured.optimizer
        # A weight may be in several pieces here, or in none: what is not trained, or changed by other workers.
        of_first = {id(values[0]): values for values in pieces.values()}
        for group in optimizer.param_groups:
            group["params"] = [one for value in group["params"] for one in of_first.get(id(value), [])]
        if pieces and not any(group["params"] for group in optimizer.param_groups):
            raise TaskError(
                "configure_optimizers returned an optimizer of none of the parameters that are trained",
                where="configure_optimizers",
                remedy="make it in configure_optimizers, of self.parameters(), and not before",
            )
        self._view.optimizer = optimizer
        return optimizer

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        """See `Task`: the schedulers that `configure_optimizers` made with this optimizer, and the count of steps."""
        assert self._configured is not None, "the optimizer is made first"
        schedules = EpochSchedules(self._configured.schedules, self.run.batch_size, self._brought.facts.rows)
        schedules.on_epoch_end = self._hooks.end_epoch
        self._view.schedules = schedules
        return schedules

    def collate(self, table: pa.Table) -> Any:
        """See `Task`: what the loader's `collate_fn` makes of the rows, with their number."""
        collate = self._brought.collate
        if collate is None:
            return {_BATCH: super().collate(table), _ROWS: table.num_rows}
        if collate is default_collate and all(map(_is_numeric, table.schema.types)):
            batch = super().collate(table)
            # As torch's function does.
            return {_BATCH: list(batch) if isinstance(batch, tuple) else batch, _ROWS: table.num_rows}
        return {_BATCH: collate(items_of(table, self._brought.kinds)), _ROWS: table.num_rows}

    def loss(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """See `Task`: what `training_step` returns for the batch, and what it logs."""
        module: Any = model
        given, _ = _parts(batch)
        self._view.run = vars(self).get("run")
        with self._hooks.batch(module, "train") as book:
            number = self._view.batch_idx
            self._hooks.begin_epoch()
            given = _transferred(module, given)
            if module.on_train_batch_start(given, number) == -1:
                raise TaskError(
                    "on_train_batch_start returned -1, which would leave out the rest of an epoch",
                    where="LightningModule",
                    remedy="end the run by its length, or with EarlyStopping",
                )
            outputs = call_step(module.training_step, given, number)
            loss = _loss_of(outputs)
            if overrides(module, "on_train_batch_end"):
                with torch.no_grad():
                    module.on_train_batch_end(_detached(outputs), given, number)
            return {"loss": loss, "metrics": book.of_step()}

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """See `Task`: what `validation_step` logs, counts and keeps, as a record over the rows of the batch."""
        module: Any = model
        if not overrides(module, "validation_step"):
            raise TaskError(
                f"{type(module).__name__} has no validation_step",
                where="LightningModule",
                remedy="leave out the held-out data",
            )
        given, rows = _parts(batch)
        gathers = overrides(module, "on_validation_epoch_end")
        with self._hooks.batch(module, "validate") as book:
            number = self._hooks.begin_evaluation(rows)
            # Each batch is an evaluation of its own: what comes out of all of them is put together in `summarise`.
            module.on_validation_start()
            module.on_validation_epoch_start()
            given = _transferred(module, given)
            module.on_validation_batch_start(given, number)
            lengths = {name: len(value) for name, value in _lists(module).items()}
            before = Attributes(module) if gathers and self._hooks.looks() else None
            outputs = call_step(module.validation_step, given, number)
            module.on_validation_batch_end(outputs, given, number)
            kept = {name: value[lengths.get(name, 0) :] for name, value in _lists(module).items()}
            _shorten(module, lengths)
            if before is not None:
                _check_kept(before, kept)
            metrics = self._hooks.metrics
            record = {
                "logged": book.record(metrics),
                "counted": counted(metrics),
                "kept": {name: value for name, value in kept.items() if value} if gathers else {},
            }
        return as_rows(record, rows, "what validation_step logs and keeps")

    def summarise(self, outputs: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        """See `Task`: the metrics of all held-out rows, and what `on_validation_epoch_end` logs of them."""
        module, metrics = self._hooks.module, self._hooks.metrics
        batches = read_rows(outputs)
        begin(metrics, torch.device("cpu"))
        put_counted(metrics, [record["counted"] for _, record in batches])
        found = reduced([(rows, record["logged"]) for rows, record in batches], metrics)
        if overrides(module, "on_validation_epoch_end"):
            lists = _lists(module)
            lengths = {name: len(value) for name, value in lists.items()}
            for _, record in batches:
                for name, values in record["kept"].items():
                    lists[name].extend(values)
            with self._hooks.after_evaluation(module) as book:
                module.on_validation_epoch_end()
            _shorten(module, lengths)
            found |= reduced([(1, book.record(metrics))], metrics)
        begin(metrics, torch.device("cpu"))
        return found

    def epochs_after(self, steps: int) -> int:
        """See `runs.lightning_file.CountsEpochs`."""
        rows = self._brought.facts.rows
        return steps * self.run.batch_size // rows if rows else 0

    @cached_property
    def _empty(self) -> nn.Module:
        return without_values(self)


class ParcelledModule(LightningTask):
    """The task of a script that calls `Trainer.fit`: the module comes from the parcel of the script."""

    def __init__(self, folder: str) -> None:
        """Take what the script has written into this folder (`bring.parcel`)."""
        self.folder = Path(folder)
        super().__init__(read_pickle(self.folder / BROUGHT))

    def bring(self) -> Any:
        """See `LightningTask`."""
        empty = torch.get_default_device().type == "meta"
        return read_parcel_model(self.folder, torch.device("meta" if empty else "cpu"))


class NamedModule(LightningTask):
    """A LightningModule that a job file names."""

    def __init__(
        self,
        module: str,
        hparams: Mapping[str, Any] | None = None,
        datamodule: str | None = None,
        data_hparams: Mapping[str, Any] | None = None,
        rows: int | None = None,
        max_epochs: int | None = None,
    ) -> None:
        """Train `module:Class`, made with `hparams`.

        `datamodule`: `module:Class` of a LightningDataModule, made with `data_hparams`; the `collate_fn` of its
        `train_dataloader` makes the batches. Without it the columns of the data are the batch. `rows`: rows of an
        epoch, for schedulers that are stepped at its end; by default those of the datamodule. `max_epochs`: what the
        module sees as `self.trainer.max_epochs`.
        """
        self._build, self._hparams = load_function(module, ()), dict(hparams or {})
        data, loaded = None, None
        if datamodule is not None:
            data = load_function(datamodule, ())(**(data_hparams or {}))
            data.setup("fit")
            loaded = read_loader(data.train_dataloader(), "train_dataloader")
        super().__init__(_named(loaded, rows, max_epochs), data)

    def bring(self) -> Any:
        """See `LightningTask`."""
        module = self._build(**self._hparams)
        check_kind(module, "args.module")
        module._trainer = self._view
        module.setup("fit")
        module.configure_model()
        return module


def _named(loaded: LoadedData | None, rows: int | None, max_epochs: int | None) -> Brought:
    """Return what the workers need, given the data of a datamodule."""
    if loaded is None:
        return Brought(facts=TrainerFacts(rows=rows, max_epochs=max_epochs))
    facts = TrainerFacts(rows=loaded.rows if rows is None else rows, max_epochs=max_epochs)
    kinds = kinds_of(loaded.dataset[0]) if hasattr(loaded.dataset, "__getitem__") else {}
    return Brought(facts=facts, collate=loaded.collate, kinds=kinds)


def attach(module: nn.Module, hooks: _Hooks) -> None:
    """Let a module, and those of Lightning inside it, log to a run and see its trainer."""
    vars(module)["run_metrics"] = metrics_in(take_out(module))
    for one in module.modules():
        if lightning_class(type(one), "LightningModule") is not None:
            vars(one).update(
                log=hooks.log,
                log_dict=hooks.log_dict,
                optimizers=hooks.optimizers,
                lr_schedulers=hooks.lr_schedulers,
                print=print,
                _trainer=hooks.view,
                # A plain tensor, of which no other worker knows.
                _example_input_array=None,
            )


class _Hooks:
    """Where a module's calls of `self.log` go, and which hooks were called in this process.

    It has no `__dict__`: what changes in it with each step is no state of the task.
    """

    __slots__ = ("_book", "_epoch", "_looked", "_number", "_step", "metrics", "module", "view")

    def __init__(self, view: TrainerView) -> None:
        self.view = view
        self.module: Any = None
        self.metrics: Mapping[str, nn.Module] = {}
        self._book: LogBook | None = None
        self._epoch, self._looked = -1, False
        self._step, self._number = -1, 0

    @contextmanager
    def batch(self, module: Any, stage: str) -> Iterator[LogBook]:
        """Let the module compute one batch; what it logs meanwhile is in the book."""
        self.module, self.metrics = module, vars(module)["run_metrics"]
        begin(self.metrics, module.device)
        book = self._book = LogBook(on_step=stage == "train")
        self.view.stage = stage
        try:
            yield book
        finally:
            self._book, self.view.stage = None, ""

    @contextmanager
    def after_evaluation(self, module: Any) -> Iterator[LogBook]:
        """Let the module log values of a whole evaluation, in evaluation mode and without gradients."""
        trained = [one for one in module.modules() if one.training]
        module.eval()
        book = self._book = LogBook(on_step=False)
        self.view.stage = "validate"
        try:
            with torch.no_grad():
                yield book
        finally:
            self._book, self.view.stage = None, ""
            for one in trained:
                one.training = True

    def begin_epoch(self) -> None:
        """Call `on_train_epoch_start` once in each epoch of this process; nothing is reported from it."""
        if self._epoch != self.view.current_epoch:
            self._epoch = self.view.current_epoch
            # What it logs would be of one microbatch alone.
            book, self._book = self._book, None
            with self._same_trained("on_train_epoch_start"):
                self.module.on_train_epoch_start()
            self._book = book

    def end_epoch(self) -> None:
        """Call `on_train_epoch_end`, from which nothing is reported."""
        if self.module is not None:
            with self._same_trained("on_train_epoch_end"):
                self.module.on_train_epoch_end()

    @contextmanager
    def _same_trained(self, hook: str) -> Iterator[None]:
        """Raise `TaskError` if a hook freezes parameters, or trains others: a run trains the same ones throughout."""
        before = [value.requires_grad for value in self.module.parameters()]
        yield
        if before != [value.requires_grad for value in self.module.parameters()]:
            raise TaskError(
                f"{hook} changes which parameters are trained",
                where="LightningModule",
                remedy="freeze them in __init__, and train again for the next phase",
            )

    def begin_evaluation(self, rows: int) -> int:
        """Return the number of a held-out batch in this process since the last step."""
        self._number = self._number + 1 if self._step == self.view.global_step else 0
        self._step = self.view.global_step
        return self._number

    def looks(self) -> bool:
        """Return True once: what a held-out batch changes is looked at for the first one."""
        looked, self._looked = self._looked, True
        return not looked

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Take the place of the module's `log`: all that a run reports is a mean over all workers."""
        if self._book is not None:
            self._book.log(name, value, on_step, on_epoch, reduce_fx, batch_size)

    def log_dict(self, dictionary: Any, prog_bar: bool = False, logger: bool | None = None, **given: Any) -> None:
        """Take the place of the module's `log_dict`."""
        taken = ("on_step", "on_epoch", "reduce_fx", "batch_size")
        if self._book is not None:
            self._book.log_dict(dictionary, **{name: value for name, value in given.items() if name in taken})

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Take the place of the module's `optimizers`: the settings of the only one."""
        return self.view.optimizers[0]

    def lr_schedulers(self) -> Any:
        """Take the place of the module's `lr_schedulers`."""
        raise TaskError(
            "self.lr_schedulers() is not offered: a run steps schedulers itself",
            where="LightningModule",
            remedy="each step reports its rates",
        )


def _parts(batch: Any) -> tuple[Any, int]:
    """Return the batch that the module gets, and its rows."""
    if isinstance(batch, Mapping) and batch.keys() == {_BATCH, _ROWS}:
        return batch[_BATCH], batch[_ROWS]
    # `data.collate` has made it.
    return batch, next(len(one) for one in batch.values() if isinstance(one, torch.Tensor) and one.dim())


def _transferred(module: Any, batch: Any) -> Any:
    """Return the batch after the module's hooks of its transfer; it is on the device already."""
    batch = module.on_before_batch_transfer(batch, 0)
    if overrides(module, "transfer_batch_to_device"):
        batch = module.transfer_batch_to_device(batch, module.device, 0)
    return module.on_after_batch_transfer(batch, 0)


def _loss_of(outputs: Any) -> torch.Tensor:
    if isinstance(outputs, Mapping):
        outputs = outputs.get("loss")
    if not isinstance(outputs, torch.Tensor):
        raise TaskError(
            f"training_step returned {'no loss' if outputs is None else type(outputs).__name__}",
            where="LightningModule",
            expected="the loss, or a dict with 'loss', for every batch: every row counts once",
            remedy="to leave out rows, return a loss that is zero for them: (loss * mask).sum()",
        )
    return outputs


def _detached(outputs: Any) -> Any:
    if isinstance(outputs, torch.Tensor):
        return outputs.detach()
    return {name: one.detach() if isinstance(one, torch.Tensor) else one for name, one in outputs.items()}


def _lists(module: nn.Module) -> dict[str, list[Any]]:
    """Return the lists that a module keeps."""
    return {name: value for name, value in vars(module).items() if type(value) is list}


def _shorten(module: nn.Module, lengths: Mapping[str, int]) -> None:
    """Take from the lists of a module what came after these lengths."""
    for name, value in _lists(module).items():
        del value[lengths.get(name, 0) :]


def _check_kept(before: Attributes, kept: Mapping[str, Any]) -> None:
    """Raise `TaskError` if a held-out batch has changed more of the module than lists and metrics."""
    changed = [name for name in before.changed() if name not in kept]
    if changed:
        raise TaskError(
            f"validation_step changes '{changed[0]}' of the module, which on_validation_epoch_end would see on one "
            "worker only",
            where="LightningModule",
            remedy="append to a list of the module, or count with an object of torchmetrics",
        )


def _put_parameters(module: nn.Module, given: Mapping[str, nn.Parameter]) -> None:
    """Put parameters into a model in place of its own of these names, under all names that these have."""
    own = dict(module.named_parameters(remove_duplicate=False))
    by_id = {id(own[name]): value for name, value in given.items() if name in own}
    for one in module.modules():
        for name, value in list(one._parameters.items()):
            if value is not None and id(value) in by_id:
                one._parameters[name] = by_id[id(value)]


def _is_numeric(kind: pa.DataType) -> bool:
    while pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))
