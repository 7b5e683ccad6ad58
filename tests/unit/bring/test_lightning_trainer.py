"""Arguments, callbacks, loggers and loaders of Lightning as settings of a job, or refused by name."""

from __future__ import annotations

import functools
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch import loggers
from torch.utils.data import (
    DataLoader,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from raytrain_plus.bring.lightning import Trainer
from raytrain_plus.bring.lightning.lightning_callbacks import CallingModule
from raytrain_plus.bring.lightning.lightning_task import ParcelledModule
from raytrain_plus.bring.lightning.lightning_trainer import last_metrics
from raytrain_plus.bring.lightning.record_rows import as_rows, read_rows
from raytrain_plus.data.sources.item_columns import schema_of, table_of
from raytrain_plus.errors import InputError, TaskError
from raytrain_plus.job.task_loader import build_task, load_function
from raytrain_plus.task import RunFacts
from raytrain_plus.training.model.model import build_model
from tests.support.lit import Digits, DigitsData, Plain

ROWS = TensorDataset(torch.rand(100, 4), torch.rand(100))


class Evaluated(Plain):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


def job_of(tmp_path: Path, module: Any = None, loader: Any = None, held_out: Any = None, **given: Any) -> Any:
    trainer = Trainer(**{"max_epochs": 2, "accelerator": "cpu", "default_root_dir": tmp_path, **given})
    loaders = (DataLoader(ROWS, 5) if loader is None else loader, DataLoader(ROWS, 8) if held_out is None else held_out)
    return trainer._job(module or Evaluated(), *loaders, None)[0]


def at(job: Any, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), job)


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({}, {"epochs": 2, "data.batch_size": 5, "data.shards": 1, "evaluate.every_steps": 20, "precision": "fp32"}),
        ({"max_epochs": None, "max_steps": 7}, {"steps": 7, "evaluate.every_steps": 7}),
        (
            {"accumulate_grad_batches": 2, "run": {"workers": {"min": 1, "max": 2}}},
            {"data.batch_size": 20, "data.shards": 4, "workers.max": 2, "evaluate.every_steps": 5},
        ),
        ({"run": {"data": {"batch_size": 10}}}, {"data.batch_size": 10, "evaluate.every_steps": 10}),
        ({"precision": "bf16-mixed"}, {"precision": "bf16"}),
        ({"precision": 16}, {"precision": "fp16"}),
        ({"gradient_clip_val": 0.5}, {"clip_norm": 0.5, "clip_value": None}),
        ({"gradient_clip_val": 1, "gradient_clip_algorithm": "value"}, {"clip_value": 1.0, "clip_norm": None}),
        ({"val_check_interval": 0.25}, {"evaluate.every_steps": 5}),
        ({"val_check_interval": 7}, {"evaluate.every_steps": 7}),
        ({"val_check_interval": 8, "accumulate_grad_batches": 2}, {"evaluate.every_steps": 4}),
        ({"check_val_every_n_epoch": 2}, {"evaluate.every_steps": 40}),
        ({"limit_val_batches": 0}, {"evaluate": None}),
        ({"fast_dev_run": True}, {"steps": 1, "epochs": None, "evaluate.every_steps": 1}),
        ({"logger": loggers.CSVLogger("x")}, {"trackers": ()}),
        (
            {"callbacks": of_lightning.EarlyStopping("val_loss", patience=4)},
            {"early_stop.metric": "val_loss", "early_stop.mode": "min", "early_stop.patience": 4},
        ),
        (
            {"callbacks": [of_lightning.ModelCheckpoint(monitor="val_loss", save_top_k=2)]},
            {"checkpoint.keep_best.metric": "val_loss", "checkpoint.keep_best.mode": "min", "checkpoint.keep": 2},
        ),
        (
            {
                "callbacks": [
                    of_lightning.ModelCheckpoint(monitor="val_loss"),
                    of_lightning.ModelCheckpoint(every_n_train_steps=30),
                    of_lightning.EarlyStopping("val_loss"),
                ]
            },
            {"early_stop.patience": 3, "checkpoint.keep_best": None, "checkpoint.every_steps": 30},
        ),
        ({"callbacks": [of_lightning.ModelCheckpoint(every_n_epochs=2)]}, {"checkpoint.every_steps": 40}),
        (
            {"callbacks": [of_lightning.ModelCheckpoint(train_time_interval=timedelta(minutes=5))]},
            {"checkpoint.every_s": 300.0},
        ),
        ({"callbacks": [of_lightning.LearningRateMonitor(), of_lightning.TQDMProgressBar()]}, {"early_stop": None}),
    ],
)
def test_arguments_become_settings(tmp_path: Path, given: Any, settings: Any) -> None:
    job = job_of(tmp_path, **given)
    for path, value in settings.items():
        found = at(job, path)
        assert (tuple(found) if isinstance(found, list) else found) == value, path


class Own(pl.Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.callback_metrics["heard"] = torch.tensor(1.0)


class Starting(pl.Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pass


class OtherLogger:
    pass


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"strategy": "ddp"}, "strategy='ddp' is not offered"),
        ({"devices": 4}, "devices=4 is not offered"),
        ({"num_nodes": 2}, "num_nodes=2"),
        ({"accelerator": "tpu"}, "accelerator='tpu'"),
        ({"plugins": ["x"]}, "plugins="),
        ({"profiler": "simple"}, "profiler='simple'"),
        ({"overfit_batches": 1}, "overfit_batches=1"),
        ({"limit_train_batches": 10}, "limit_train_batches=10"),
        ({"detect_anomaly": True}, "detect_anomaly=True"),
        ({"max_time": "00:01:00:00"}, "max_time="),
        ({"max_epochs": None}, "max_epochs=None gives the run no end"),
        ({"max_steps": 10}, "both max_epochs and max_steps"),
        ({"precision": "64-true"}, "precision='64-true'"),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "x"}, "gradient_clip_algorithm='x'"),
        ({"val_check_interval": "00:00:10:00"}, "val_check_interval='00:00:10:00'"),
        ({"epochs": 3}, "Trainer has no argument 'epochs'"),
        ({"logger": OtherLogger()}, "the logger OtherLogger"),
        ({"callbacks": of_lightning.StochasticWeightAveraging(1e-2)}, "StochasticWeightAveraging is not offered"),
        ({"callbacks": of_lightning.GradientAccumulationScheduler({0: 2})}, "GradientAccumulationScheduler"),
        ({"callbacks": of_lightning.BackboneFinetuning()}, "BackboneFinetuning"),
        ({"callbacks": of_lightning.LambdaCallback()}, "LambdaCallback"),
        ({"callbacks": of_lightning.EarlyStopping("x", min_delta=0.1)}, r"EarlyStopping\(min_delta"),
        ({"callbacks": of_lightning.EarlyStopping("x", stopping_threshold=1.0)}, r"EarlyStopping\(stopping_threshold"),
        ({"callbacks": [of_lightning.ModelCheckpoint(save_top_k=-1, monitor="x")]}, "save_top_k=-1"),
        (
            {"callbacks": [of_lightning.ModelCheckpoint(monitor="a"), of_lightning.EarlyStopping("b")]},
            "EarlyStopping looks at b, and ModelCheckpoint at a",
        ),
        ({"callbacks": [Starting()]}, "the callback Starting defines on_train_start"),
        ({"loader": [DataLoader(ROWS, 5), DataLoader(ROWS, 5)]}, "the rows come from a list of loaders"),
        ({"loader": {"a": DataLoader(ROWS, 5)}}, "the rows come from a dict of loaders"),
        ({"held_out": [DataLoader(ROWS, 5), DataLoader(ROWS, 5)]}, "the rows come from a list of loaders"),
        ({"loader": DataLoader(ROWS, 5, sampler=WeightedRandomSampler([1.0] * 100, 100))}, "WeightedRandomSampler"),
        ({"loader": DataLoader(ROWS, batch_size=None)}, "the loader makes no batches"),
        ({"held_out": DataLoader(ROWS, 5, collate_fn=list)}, "val_dataloader has another collate_fn"),
    ],
)
def test_what_a_run_does_not_have_is_refused_before_a_worker_starts(tmp_path: Path, given: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        job_of(tmp_path, **given)


def test_a_module_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    class Two(Evaluated):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([one], lr=1.0) for one in self.parameters()]

    with pytest.raises(TaskError, match="returned 2 optimizers"):
        job_of(tmp_path, Two())
    with pytest.raises(TaskError, match="the module is of type Linear"):
        job_of(tmp_path, torch.nn.Linear(1, 1))
    with pytest.raises(InputError, match=r"ckpt_path='x.ckpt' is not offered"):
        Trainer(max_epochs=1).fit(Evaluated(), DataLoader(ROWS, 5), ckpt_path="x.ckpt")
    data = DigitsData([1, 2], 2)
    with pytest.raises(InputError, match="both loaders and a datamodule"):
        Trainer(max_epochs=1).fit(Digits(), DataLoader(ROWS, 5), datamodule=data)


@pytest.mark.parametrize(
    ("loader", "shuffle", "rows"),
    [
        (DataLoader(ROWS, 5), "none", 100),
        (DataLoader(ROWS, 5, shuffle=True), "rows", 100),
        (DataLoader(ROWS, 5, sampler=SubsetRandomSampler(range(30))), "rows", 30),
    ],
)
def test_a_loader_gives_its_rows_and_its_order(tmp_path: Path, loader: Any, shuffle: str, rows: int) -> None:
    job = job_of(tmp_path, loader=loader)
    assert job.data.shuffle == shuffle
    folder = Path(job.args["folder"])
    assert len(load_function(job.data.dataset, [folder])()) == rows
    assert len(load_function(job.evaluate.dataset, [folder])()) == 100


def test_held_out_rows_can_be_limited(tmp_path: Path) -> None:
    for number, (limit, rows) in enumerate(((3, 24), (0.5, 48), (1.0, 100), (50, 100))):
        job = job_of(tmp_path / str(number), limit_val_batches=limit)
        assert len(load_function(job.evaluate.dataset, [Path(job.args["folder"])])()) == rows


def collated(items: Any) -> Any:
    x, y = default_collate(items)
    return {"x": x * 2, "y": y}


def test_the_module_and_the_batches_that_travel_are_those_of_the_script(tmp_path: Path) -> None:
    class Named(Evaluated):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step((batch["x"], batch["y"]), batch_idx)

    module = Named()
    loader = DataLoader(ROWS, 5, collate_fn=collated, drop_last=True)
    job = job_of(
        tmp_path, module, loader, DataLoader(ROWS, 5, collate_fn=collated), deterministic=False, callbacks=[Own()]
    )
    task: Any = build_task(CallingModule, job.args, RunFacts(total_steps=40, batch_size=5))
    model: Any = build_model(task, 0, torch.device("cpu")).module
    assert torch.equal(model.layer.weight, module.layer.weight)
    items = [ROWS[n] for n in range(3)]
    batch = task.collate(table_of(items, schema_of(items)))
    assert torch.equal(batch["batch"]["x"], torch.stack([x for x, _ in items]) * 2)
    assert torch.equal(batch["batch"]["y"], torch.stack([y for _, y in items]))
    assert batch["rows"] == 3
    assert task.remarks() == ["arguments of Lightning that a run has no use for: deterministic, drop_last"]
    for step in range(21):
        task.on_step({"step": step, "epoch": step // 20, "loss": 1.0, "metrics": {"a": 2.0}})
    assert task._heard().callback_metrics["heard"] == 1.0


def test_a_plain_module_has_no_callbacks_and_no_evaluation(tmp_path: Path) -> None:
    job = job_of(tmp_path, Plain())
    assert job.evaluate is None
    assert job.task == "raytrain_plus.bring.lightning.lightning_task:ParcelledModule"
    task = build_task(ParcelledModule, job.args, RunFacts(total_steps=40, batch_size=5))
    with pytest.raises(TaskError, match="Plain has no validation_step"):
        task.evaluate(build_model(task, 0, torch.device("cpu")).module, {})


def test_a_callback_cannot_stop_a_run(tmp_path: Path) -> None:
    class Stops(pl.Callback):
        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = True

    task: Any = build_task(CallingModule, job_of(tmp_path, callbacks=[Stops()]).args)
    with pytest.raises(TaskError, match="a callback of a run cannot stop it"):
        task.on_evaluate(3, {"val_loss": 1.0})


def test_the_last_metrics_of_a_run_are_read_from_its_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(number: int, epoch: int, value: float) -> dict[str, Any]:
        metrics = {"a": value, "b_step": value, "c_epoch": value}
        return {"kind": "step_committed", "step": number, "epoch": epoch, "samples": number + 1, "metrics": metrics}

    events = [
        step(0, 0, 9.0),
        {"kind": "evaluated", "step": -1, "metrics": {"val": 5.0}},
        step(1, 1, 7.0),
        step(1, 1, 1.0),
        step(2, 1, 2.0),
        {"kind": "evaluated", "step": 2, "metrics": {"val": 4.0}},
    ]
    monkeypatch.setattr("raytrain_plus.bring.lightning.lightning_trainer.read_events", lambda _: iter(events))
    found = last_metrics(SimpleNamespace(path=str(tmp_path)))  # type: ignore[arg-type]
    mean = (1 * 2 + 2 * 3) / 5
    assert {name: round(float(value), 6) for name, value in found.items()} == {
        "a": 2.0,
        "b_step": 2.0,
        "b_epoch": mean,
        "b": mean,
        "c_epoch": mean,
        "c": mean,
        "val": 4.0,
    }


def test_records_survive_being_laid_over_rows() -> None:
    record = {"a": [torch.ones(2, dtype=torch.bool), (1, "x")], "b": None, "c": {3: 0.1}, "d": torch.zeros(0, 3)}
    for rows in (1, 3, 500):
        [(found_rows, found)] = read_rows(as_rows(record, rows, "it"))
        assert found_rows == rows
        assert torch.equal(found["a"][0], record["a"][0])  # type: ignore[index]
        assert (found["a"][1], found["b"], found["c"], tuple(found["d"].shape)) == ((1, "x"), None, {3: 0.1}, (0, 3))
    with pytest.raises(TaskError, match="it cannot be gathered from all workers: it holds an object of type object"):
        as_rows({"a": object()}, 2, "it")
