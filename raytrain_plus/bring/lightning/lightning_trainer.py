"""`Trainer` for LightningModules, whose `fit` is a run that goes on while machines come and go.

from raytrain_plus.bring.lightning import Trainer     # in place of `from lightning import Trainer`

trainer = Trainer(max_epochs=3, run={"workers": {"min": 1, "max": 4}})
trainer.fit(module, datamodule=data)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.utils.data import Subset

from raytrain_plus.bring.item_kinds import kinds_of
from raytrain_plus.bring.lightning.configured import read_configured
from raytrain_plus.bring.lightning.lightning_arguments import (
    epoch_steps,
    held_out_rows,
    ignored_arguments,
    read_arguments,
    settings_of_trainer,
)
from raytrain_plus.bring.lightning.lightning_callbacks import own_callbacks, settings_of_callbacks, trackers_of
from raytrain_plus.bring.lightning.lightning_task import BROUGHT, Brought
from raytrain_plus.bring.lightning.loaders import LoadedData, read_loader
from raytrain_plus.bring.lightning.metric_objects import is_metric
from raytrain_plus.bring.lightning.module_checks import check_kind, check_module, overrides, package_of
from raytrain_plus.bring.lightning.trainer_view import TrainerFacts, TrainerView
from raytrain_plus.bring.parcel import (
    HELD_OUT,
    TRAIN,
    check_same,
    module_of,
    new_parcel,
    write_data,
    write_model,
    write_pickle,
)
from raytrain_plus.bring.script import with_overrides
from raytrain_plus.bring.settings_merged import merged
from raytrain_plus.errors import InputError, RunError
from raytrain_plus.job.settings import Job
from raytrain_plus.job.yaml import read_job
from raytrain_plus.launch.runner import run as run_job
from raytrain_plus.observe.run_events import read_events
from raytrain_plus.result import Result
from raytrain_plus.runs.export import load
from raytrain_plus.runs.folder import job_of
from raytrain_plus.storage.folders.open import open_folder
from raytrain_plus.task import RunFacts

TASK = "raytrain_plus.bring.lightning.lightning_task:ParcelledModule"
CALLING = "raytrain_plus.bring.lightning.lightning_callbacks:CallingModule"
FOLDER = "lightning_logs"
_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class LightningTrainer:
    """What replaces `lightning.Trainer`."""

    def __init__(self, *, run: Mapping[str, Any] | None = None, **arguments: Any) -> None:
        """Take the arguments of Lightning's Trainer, and `run`: settings of a job, such as {"workers": {"max": 4}}.

        They come before those that follow from the arguments. `Job` has the list. Raises `InputError` for what a run
        does not have.
        """
        self._args = read_arguments(arguments)
        self._ignored = ignored_arguments(arguments)
        self._run_settings = dict(run or {})
        callbacks = self._args["callbacks"] or []
        self.callbacks = list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
        self.result: Result | None = None
        """What the newest `fit` ended with."""
        self.callback_metrics: dict[str, torch.Tensor] = {}
        """The last values of what was logged."""
        self._module: Any = None

    @property
    def max_epochs(self) -> int | None:
        """The argument."""
        epochs: int | None = self._args["max_epochs"]
        return epochs

    @property
    def global_step(self) -> int:
        """The steps made."""
        return 0 if self.result is None else self.result.steps

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """The same as `callback_metrics`."""
        return self.callback_metrics

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | None = None,
    ) -> None:
        """Train in a run; `model` then has the weights of its end.

        `ckpt_path`: "last" continues the run in `default_root_dir` from its newest checkpoint; else an earlier run
        there is moved aside. Raises `InputError`, before any worker starts, for what a run cannot do, and `RunError` if
        it fails.
        """
        if ckpt_path not in (None, "last"):
            raise InputError(
                f"ckpt_path={str(ckpt_path)!r} is not offered",
                where="Trainer.fit",
                expected="'last', which continues the run",
                remedy="load_from_checkpoint begins with the weights of a file",
            )
        job, parcel = self._job(model, train_dataloaders, val_dataloaders, datamodule, resumes=ckpt_path == "last")
        self._module = model
        self.result = run_job(job, fresh=ckpt_path is None, roots=[parcel])
        if self.result.status == "failed":
            raise RunError(self.result.error or "the run failed")
        load_into(model, self.result.path)
        self.callback_metrics = last_metrics(self.result)
        model.on_train_end()
        model.on_fit_end()
        for one in (datamodule, model):
            if one is not None:
                one.teardown("fit")

    def validate(self, model: Any = None, dataloaders: Any = None, ckpt_path: str | None = None, **given: Any) -> Any:
        """Evaluate in this process, with Lightning's own Trainer. `ckpt_path`: None, "last" or "best"."""
        return self._local("validate", model, dataloaders, ckpt_path, given)

    def test(self, model: Any = None, dataloaders: Any = None, ckpt_path: str | None = None, **given: Any) -> Any:
        """Test in this process, as `validate` does."""
        return self._local("test", model, dataloaders, ckpt_path, given)

    def predict(self, model: Any = None, dataloaders: Any = None, ckpt_path: str | None = None, **given: Any) -> Any:
        """Predict in this process, as `validate` does."""
        return self._local("predict", model, dataloaders, ckpt_path, given)

    def _local(self, verb: str, model: Any, loaders: Any, ckpt_path: str | None, given: Mapping[str, Any]) -> Any:
        module = self._module if model is None else model
        if module is None:
            raise InputError("there is no module", where=f"Trainer.{verb}", remedy=f"{verb}(module, ...)")
        if ckpt_path not in (None, "last", "best"):
            raise InputError(f"ckpt_path={ckpt_path!r}", where=f"Trainer.{verb}", expected="None, 'last' or 'best'")
        if ckpt_path is not None:
            if self.result is None:
                raise InputError("no run has ended", where=f"Trainer.{verb}", remedy="call fit first")
            load_into(module, self.result.path, best=ckpt_path == "best")
        names = ("accelerator", "precision", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
        trainer = import_module(package_of(type(module))).Trainer(
            devices=1, logger=False, enable_checkpointing=False, **{name: self._args[name] for name in names}
        )
        found = getattr(trainer, verb)(module, loaders, **given)
        self.callback_metrics |= trainer.callback_metrics
        return found

    def _job(
        self, module: Any, train_loaders: Any, val_loaders: Any, datamodule: Any, *, resumes: bool = False
    ) -> tuple[Job, Path]:
        """Return the job of the run, and the folder beside it that the workers read."""
        check_kind(module, "Trainer.fit")
        check_module(module)
        given = with_overrides(self._run_settings)
        data, workers = given.get("data") or {}, given.get("workers") or {}
        if not isinstance(data, Mapping) or not isinstance(workers, Mapping):
            raise InputError("data and workers are groups", where="Trainer(run=...)", expected="workers: {max: 4}")
        storage = Path(self._args["default_root_dir"] or ".").absolute() / FOLDER
        view = TrainerView(TrainerFacts(max_epochs=self.max_epochs, default_root_dir=str(storage)), datamodule)
        train, held_out = _loaded(module, view, train_loaders, val_loaders, datamodule)
        size = data.get("batch_size")
        declared = int(workers.get("max") or workers.get("min") or 1)
        settings = settings_of_trainer(self._args, declared, train.rows, train.batch_size, size, held_out is not None)
        batch = settings["data"]["batch_size"]
        settings["data"]["shuffle"] = "rows" if train.shuffled else "none"
        callbacks = [*self.callbacks, *_configured_callbacks(module)]
        own = own_callbacks(callbacks)
        settings |= settings_of_callbacks(callbacks, lambda what: epoch_steps(train.rows, batch, what))
        trackers, left = trackers_of(self._args["logger"])
        settings["trackers"] = trackers
        if self._on_gpus():
            settings["workers"] = {"gpus": 1}
        facts = TrainerFacts(
            max_epochs=self.max_epochs,
            max_steps=self._args["max_steps"],
            accumulate_grad_batches=self._args["accumulate_grad_batches"],
            precision=str(self._args["precision"] or "32-true"),
            default_root_dir=str(storage),
            rows=train.rows,
        )
        _check_configured(module, view, facts, batch, settings)
        ignored = [*self._ignored, *left, *["drop_last"] * train.drops_last]
        remarks = [f"arguments of Lightning that a run has no use for: {', '.join(ignored)}"] if ignored else []
        brought = Brought(
            facts=facts, collate=train.collate, kinds=_kinds(train.dataset), remarks=remarks, callbacks=own
        )
        name = "run"
        parcel = _resumed(storage / name) if resumes else None
        arguments = {key: value for key, value in self._args.items() if key not in ("callbacks", "logger")}
        if parcel is not None:
            check_same(parcel, arguments, "Trainer", "fit()")
        else:
            parcel = new_parcel(storage / f"{name}.module")
            rows = None if held_out is None else held_out_rows(self._args, held_out.rows, held_out.batch_size)
            tested = None if held_out is None or "evaluate" not in settings else _first(held_out.dataset, rows)
            write_data(parcel, arguments, train.dataset, tested)
            write_pickle(parcel / BROUGHT, brought, "what the loader and the callbacks hold")
            write_model(parcel, module.cpu())
        settings["data"]["dataset"] = f"{module_of(parcel)}:{TRAIN}"
        if "evaluate" in settings:
            settings["evaluate"]["dataset"] = f"{module_of(parcel)}:{HELD_OUT}"
        settings |= {
            "task": CALLING if own else TASK,
            "args": {"folder": str(parcel)},
            "storage": str(storage),
        }
        return read_job(yaml.safe_dump(merged(settings, given)), "Trainer(run=...)", name), parcel

    def _on_gpus(self) -> bool:
        accelerator = self._args["accelerator"]
        if accelerator not in ("auto", "cpu", "gpu", "cuda"):
            raise InputError(f"accelerator={accelerator!r} is not offered", where="Trainer", expected="auto, cpu, gpu")
        return accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available())


def _loaded(
    module: Any, view: TrainerView, train_loaders: Any, val_loaders: Any, datamodule: Any
) -> tuple[LoadedData, LoadedData | None]:
    """Return the data of the training rows and of the held-out ones, after the hooks that prepare it and the module."""
    if datamodule is not None and (train_loaders is not None or val_loaders is not None):
        raise InputError("both loaders and a datamodule are given", where="Trainer.fit", expected="one of them")
    module._trainer = view
    if datamodule is not None:
        for name in _TRANSFERS:
            if overrides(datamodule, name, "LightningDataModule"):
                raise InputError(
                    f"{type(datamodule).__name__} overrides {name}, which a run calls on the module",
                    where="Trainer.fit",
                    remedy=f"define {name} in the LightningModule",
                )
        datamodule.trainer = view
        datamodule.prepare_data()
        module.prepare_data()
        datamodule.setup("fit")
    else:
        module.prepare_data()
    module.setup("fit")
    module.configure_model()
    source = module if datamodule is None else datamodule
    base = "LightningModule" if datamodule is None else "LightningDataModule"
    made = {"train_dataloader": train_loaders, "val_dataloader": val_loaders}
    for name, value in made.items():
        if value is None and overrides(source, name, base):
            made[name] = getattr(source, name)()
    if made["train_dataloader"] is None:
        raise InputError("there are no training rows", where="Trainer.fit", expected="a loader, or a datamodule")
    train = read_loader(made["train_dataloader"], "train_dataloader")
    if made["val_dataloader"] is None or made["val_dataloader"] == [] or not overrides(module, "validation_step"):
        return train, None
    held_out = read_loader(made["val_dataloader"], "val_dataloader")
    if not _same(held_out.collate, train.collate):
        raise InputError(
            "val_dataloader has another collate_fn than train_dataloader",
            where="Trainer.fit",
            expected="the same for both",
            remedy="do in training_step or validation_step what differs",
        )
    return train, held_out


def _same(one: Any, other: Any) -> bool:
    """Return whether two collate functions are the same; partial ones are, if their parts are."""
    if isinstance(one, partial) and isinstance(other, partial):
        return (one.func, one.args, one.keywords) == (other.func, other.args, other.keywords)
    return bool(one == other)


def _check_configured(
    module: Any, view: TrainerView, facts: TrainerFacts, batch: int, settings: Mapping[str, Any]
) -> None:
    """Raise `TaskError` for an optimizer or a scheduler that a run cannot step."""
    total = settings.get("steps") or math.ceil((facts.rows or batch) * settings.get("epochs", 1) / batch)
    view.run = RunFacts(total_steps=total, batch_size=batch)
    state = [value.requires_grad for value in module.parameters()]
    read_configured(module.configure_optimizers())
    for value, trained in zip(module.parameters(), state, strict=True):
        value.requires_grad_(trained)


def _configured_callbacks(module: Any) -> list[Any]:
    found = module.configure_callbacks()
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _kinds(dataset: Any) -> dict[str, str]:
    return kinds_of(dataset[0]) if hasattr(dataset, "__getitem__") and len(dataset) else {}


def _first(dataset: Any, rows: int | None) -> Any:
    return dataset if rows is None else Subset(dataset, range(rows))


def _resumed(run: Path) -> Path | None:
    """Return the folder that the workers of an earlier run have read; None if there is no such run."""
    try:
        return Path(job_of(open_folder(str(run))).args["folder"])
    except (InputError, OSError, KeyError):
        return None


def load_into(module: Any, path: str | Path, *, best: bool = False) -> None:
    """Give a module the weights of a run; what its metrics have counted is no part of them."""
    for one in module.modules():
        if is_metric(one):
            one.persistent(False)
    load(path, module, best=best)


def last_metrics(result: Result) -> dict[str, torch.Tensor]:
    """Return the last value of each metric of a run; of `x_epoch`, the mean over the rows of the last epoch."""
    events = list(read_events(open_folder(result.path)))
    # Of a step that was made again, the last one counts.
    newest = {event["step"]: event for event in events if event["kind"] == "step_committed"}
    steps = [newest[step] for step in sorted(newest)]
    found: dict[str, float] = {}
    if steps:
        last = [event for event in steps if event["epoch"] == steps[-1]["epoch"]]
        rows = sum(event["samples"] for event in last)
        for name, value in (steps[-1].get("metrics") or {}).items():
            mean = sum(event["metrics"][name] * event["samples"] for event in last) / rows
            base = name.removesuffix("_step").removesuffix("_epoch")
            found[name] = value
            if base != name:
                found |= {f"{base}_epoch": mean, base: mean}
    for event in events:
        if event["kind"] == "evaluated" and event["step"] >= 0:
            found |= event["metrics"]
    return {name: torch.tensor(float(value)) for name, value in found.items()}
